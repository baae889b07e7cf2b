"""Senders and receivers as SGLang's schedulers poll them, over the endpoint of one rank.

SGLang calls everything here on its scheduler's thread. It knows five poll states and takes the lowest of all
ranks. A rank shows Success or Failed only when nothing reads or writes the request's pages on it any more.
Another rank may show Failed first, so what SGLang calls before it frees pages (`failure_exception`, and
`abort` of a sender) waits until they are quiet here too.

A step's tokens are offered by layer while the forward runs. Where a layer does not report, the end of the
step offers them, and SGLang's own `send` whatever is left: prefix hits, and prompts that were computed before
decode had room for them.

After a forward SGLang inserts the prompt into its tree of prefixes. Where another request has inserted the
same tokens first, it frees this request's pages of them and gives it the tree's. `Transfers.follow` then
takes back what is not copied, waits until nothing reads the freed pages, and offers out of the new ones.
Pages are allocated on the scheduler's thread only, so until it returns nobody has written the freed ones.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from baton.adapters.common import StepLayers, StepTrace, outcome_text, write_trace
from baton.adapters.sglang.cache import STATES
from baton.errors import BatonError, ConfigError
from baton.session import (
    Aux,
    CheckedPages,
    Digest,
    Endpoint,
    Failed,
    Ready,
    Receiving,
    Request,
    Sending,
    Waiting,
    prompt_digest,
)
from baton.transport import Fence

FAILED, BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS = range(5)
"""SGLang's KVPoll."""
METADATA = "sglang.metadata"
"""The name of a row of SGLang's metadata buffers in an aux record."""
QUIET_S_MAX = 60.0
"""How long a scheduler may stand still until pages are quiet."""

logger = logging.getLogger("sglang.baton")


class TransferFailedError(Exception):
    """What `failure_exception` raises; SGLang logs it and answers with it."""


@dataclass(frozen=True, slots=True)
class TransferMetric:
    """SGLang's KVTransferMetric."""

    transfer_latency_s: float | None = None
    alloc_latency_s: float | None = None
    transfer_total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MetadataRows:
    """SGLang's metadata buffers in host memory: first token, log-probabilities, hidden states, room."""

    addresses: Sequence[int]
    row_bytes: Sequence[int]

    def read(self, index: int) -> bytes:
        """The row of a request."""
        parts = zip(self.addresses, self.row_bytes, strict=True)
        return b"".join(ctypes.string_at(address + index * size, size) for address, size in parts)

    def write(self, index: int, row: bytes) -> None:
        """Stores what `read` gave at the source; BatonError if its buffers have other sizes."""
        if len(row) != sum(self.row_bytes):
            raise BatonError(
                f"prefill's metadata has {len(row)} bytes and ours {sum(self.row_bytes)}; start both servers "
                "with the same SGLang, the same model and the same options for speculative decoding"
            )
        for address, size in zip(self.addresses, self.row_bytes, strict=True):
            ctypes.memmove(address + index * size, row[:size], size)
            row = row[size:]


@dataclass(slots=True)
class ForwardStep:
    """The forward that is computed."""

    prompts: list[tuple[Sender, int, CheckedPages]]
    """With the end of the tokens that it computes and the pages up to there."""
    layers: StepLayers
    batches: dict[tuple[int, bool], Any] = field(default_factory=dict)
    """Of each layer that was reported: the batch for which it was computed."""


@dataclass(slots=True)
class Transfers:
    """Every hand-over that one rank takes part in."""

    endpoint: Endpoint
    caches: Mapping[tuple[int, bool], int]
    """Of this rank: the number of the layer, by layer and whether it is a state. A layer may have both."""
    metadata: MetadataRows
    has_aux: bool
    """Whether this rank gives the aux record of what it sends."""
    pages: Callable[[Any, int], dict[str, Any]]
    """The page ids of a request's first so many tokens, by group."""
    fence: Callable[[], Fence]
    """Makes a fence for what was launched up to now."""
    policy: str = "fixed:1"
    is_verified: bool = False
    trace: Path | None = None
    """A file that gets a line of JSON for each prompt that was sent."""
    step: ForwardStep | None = None

    @property
    def all_layers(self) -> tuple[int, int]:
        """Of this rank, as a range."""
        return min(self.caches.values()), max(self.caches.values()) + 1

    def begin_step(self, requests: Iterable[Any]) -> None:
        """Before the forward of requests that prefill."""
        prompts = []
        for request in requests:
            sender = getattr(request, "disagg_kv_sender", None)
            # Before decode has room, SGLang may take the pages back without a word.
            if not isinstance(sender, Sender) or request.pending_bootstrap or not sender.is_open:
                continue
            end = min(request.extend_end, len(request.origin_input_ids))
            if end > sender.num_offered and (pages := sender.read_pages(end)) is not None:
                prompts.append((sender, end, pages))
                sender.steps.append(StepTrace(monotonic()))
        if prompts:
            lengths = [len(sender.request.origin_input_ids) for sender, _, _ in prompts]
            self.step = ForwardStep(prompts, StepLayers(self.policy, self.caches, lengths))

    def layer_done(self, layer: int, *, is_state: bool = False, batch: Any = None) -> None:
        """A layer has stored the step's tokens, or its state; on a GPU it was launched to do so.

        `batch`: for which SGLang computed it. A layer may report several times for one batch, as those with
        latents do, which attend to a long prefix in pieces. Several batches are parts of the step's, and what
        was offered after the first part may be in no other one.
        """
        step = self.step
        if step is None:
            return
        if step.batches.setdefault((layer, is_state), batch) is not batch:
            for sender, _, _ in step.prompts:
                sender.fail(f"SGLang computed layer {layer} for several parts of a batch")
        elif group := step.layers.done((layer, is_state)):
            self._offer(step, group)

    def end_step(self) -> None:
        """After the forward: offers what no layer has reported."""
        step, self.step = self.step, None
        if step is None:
            return
        for group in step.layers.left:
            self._offer(step, group)
        for sender, end, _ in step.prompts:
            sender.num_offered = end
            sender.steps[-1].ended_s = monotonic()

    def follow(self, request: Any) -> None:
        """After SGLang has inserted the prompt of a request into its tree of prefixes."""
        sender = getattr(request, "disagg_kv_sender", None)
        if isinstance(sender, Sender):
            sender.follow_pages()

    def _offer(self, step: ForwardStep, layers: tuple[int, int]) -> None:
        fence = self.fence()
        for sender, end, pages in step.prompts:
            # A prefix hit was sent since the step began, but before its first layer.
            sender.offer(layers, (sender.num_offered, end), pages, fence)


class Sender:
    """One prompt that this rank sends; SGLang's KV sender."""

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.request: Any = None
        self.num_offered = 0
        """Tokens of which every layer was offered."""
        self.steps: list[StepTrace] = []
        self._transfers: Transfers = mgr.transfers
        self._sending: Sending | None = None
        self._offered = CheckedPages()
        """The page table of the last offer; those of earlier offers agree with it."""
        self._error = ""
        self._num_sent = 0
        """Tokens that SGLang has sent, as it sees it."""
        self._is_begun = False
        self._is_committed = False
        self._is_given_up = False
        self._queued_s = 0.0
        self._metadata_index = -1

    def bind(self, request: Any) -> None:
        """Begins to send the prompt of a request; it is not computed yet."""
        self.request = request
        try:
            digest = request_digest(request)
            endpoint = self._transfers.endpoint
            self._sending = endpoint.send(str(self.bootstrap_room), digest, is_queued=True)
        except BatonError as error:
            self._error = str(error)
        self._queued_s = monotonic()

    @property
    def is_open(self) -> bool:
        """Whether chunks are still of use."""
        sending = self._sending
        return (
            sending is not None
            and isinstance(sending.state, Waiting)
            and not self._is_committed
            and not self._is_given_up
        )

    def read_pages(self, num_tokens: int) -> CheckedPages | None:
        """The page table of the first so many tokens; None if it is not valid, and then the prompt fails."""
        assert self._sending is not None
        try:
            return self._sending.read_pages(self._transfers.pages(self.request, num_tokens))
        except BatonError as error:
            self.fail(str(error))
            return None

    def offer(
        self, layers: tuple[int, int], tokens: tuple[int, int], pages: CheckedPages, fence: Fence
    ) -> None:
        """Some layers of some tokens may be read once the fence is."""
        if not self.is_open:
            return
        assert self._sending is not None
        try:
            self._sending.ready(layers, tokens, pages, fence)
            self._offered = pages
            if self.steps:
                self.steps[-1].offered.append((layers, tokens, monotonic()))
        except BatonError as error:
            self.fail(str(error))

    def fail(self, text: str) -> None:
        """Fails this prompt alone; SGLang learns of it by polling."""
        if self._sending is None or self._is_given_up:
            return
        logger.warning("baton: transfer %s: %s", self.bootstrap_room, text)
        self._is_given_up, self._error = True, text
        self._sending.abort(text)

    def follow_pages(self) -> None:
        """Offers out of the pages that SGLang has given the request now, if they are not those offered."""
        sending, transfers = self._sending, self._transfers
        if sending is None or not sending.chunks_read()[1]:
            return
        pages = self.read_pages(self.num_offered)
        if pages is not None and not is_moved(self._offered, pages):
            return
        wait_until_quiet(sending.withdraw().wait, self.bootstrap_room, "read")
        if pages is None:
            return
        sending.resume()
        # What has landed is passed over.
        self.offer(transfers.all_layers, (0, self.num_offered), pages, transfers.fence())

    # SGLang's calls.

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Decode has room; the request is computed from now on."""
        self._is_begun = True
        self._metadata_index = -1 if aux_index is None else aux_index

    def send(
        self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, **_: Any
    ) -> None:
        """Tokens up to here are computed; there are state indices with the last of them only."""
        transfers = self._transfers
        self._num_sent += num_kv_tokens or 0
        if self._num_sent > self.num_offered:
            if self.is_open and (pages := self.read_pages(self._num_sent)) is not None:
                tokens = self.num_offered, self._num_sent
                self.offer(transfers.all_layers, tokens, pages, transfers.fence())
            self.num_offered = self._num_sent
        if state_indices is not None and self.is_open:
            assert self._sending is not None
            self._is_committed = True
            aux = None
            if transfers.has_aux:
                row = transfers.metadata.read(self._metadata_index)
                first, logprobs = tuple(self.request.output_ids), first_logprobs(self.request)
                aux = Aux(tokens=first, logprobs=logprobs, tensors={METADATA: row})
            self._sending.commit(aux)

    def poll(self) -> int:
        sending = self._sending
        if sending is None:
            return FAILED
        if isinstance(sending.state, Waiting):
            # Without decode's request nothing is queued here: SGLang waits for it, and the deadline runs.
            if not self.num_offered and (sending.is_granted or self._is_begun):
                self._stay_queued(sending)
        elif sending.is_released:
            self._write_trace(sending)
            return SUCCESS if isinstance(sending.state, Ready) else FAILED
        if self._is_committed:
            return TRANSFERRING
        # With pipeline stages the first one decides when a request may be computed.
        return WAITING_FOR_INPUT if sending.is_granted or self._is_begun else BOOTSTRAPPING

    poll_pp_consensus = poll

    def failure_exception(self) -> None:
        self._give_up("another rank failed")
        state = self._sending.state if self._sending is not None else None
        raise TransferFailedError(str(state.cause) if isinstance(state, Failed) else self._error)

    def abort(self) -> None:
        """SGLang frees the pages right after this."""
        self._give_up("the request was aborted at prefill")

    def clear(self) -> None:
        pass

    def mark_prefill_complete(self) -> None:
        raise NotImplementedError("--disaggregation-decode-allocation-policy prefill_complete")

    def pop_decode_prefix_len(self) -> int:
        """Baton passes over what decode has; SGLang offers all of it."""
        return 0

    def get_max_transfer_tokens(self) -> int | None:
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def get_transfer_metric(self) -> TransferMetric:
        return TransferMetric()

    # Parts of it.

    def _give_up(self, text: str) -> None:
        sending, self._is_given_up = self._sending, True
        if sending is None or sending.is_released:
            return
        if isinstance(sending.state, Waiting):
            self._error = text
            sending.abort(text)
        wait_until_quiet(sending.withdraw().wait, self.bootstrap_room, "read")

    def _stay_queued(self, sending: Sending) -> None:
        now = monotonic()
        if now - self._queued_s > self._transfers.endpoint.config.timings.offer_s / 4:
            self._queued_s = now
            sending.queued()

    def _write_trace(self, sending: Sending) -> None:
        trace, steps = self._transfers.trace, self.steps
        if trace is not None and steps:
            self.steps = []
            rank = self._transfers.endpoint.config.rank
            write_trace(trace, sending, rank, steps=[asdict(step) for step in steps])


class Receiver:
    """One prompt that this rank receives; SGLang's KV receiver."""

    require_staging = False
    abort_notified = False
    supports_host_destination = False
    conclude_state: int | None = None

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.request: Any = None
        self._transfers: Transfers = mgr.transfers
        self._source = ""
        self._receiving: Receiving | None = None
        self._error = ""
        self._queued_s = 0.0
        self._metadata_index = -1
        self._is_stored = False

    def bind(self, request: Any) -> None:
        """Which request it is for; it has no pages yet."""
        self.request = request

    # SGLang's calls.

    def init(self, prefill_dp_rank: int) -> None:
        """Finds the source."""
        if self._error:
            return
        try:
            self._source = self.kv_mgr.find_source(self.bootstrap_addr, prefill_dp_rank)
        except BatonError as error:
            self._fail(str(error))

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        """Asks for the prompt; SGLang's indices begin behind the prefix that decode has."""
        self._metadata_index = -1 if aux_index is None else aux_index
        endpoint = self._transfers.endpoint
        try:
            digest = request_digest(self.request)
            pages = self._transfers.pages(self.request, digest.num_tokens)
            request = Request(
                transfer=str(self.bootstrap_room),
                source=self._source,
                digest=digest,
                pages={endpoint.config.rank: pages},
                held={group: decode_prefix_len or 0 for group in pages if group != STATES},
                # A request that has finished may have one more forward in flight, which writes these slots.
                fence=self._transfers.fence(),
                is_verified=self._transfers.is_verified,
            )
            self._receiving = endpoint.receive(request)
        except BatonError as error:
            self._fail(str(error))

    def poll(self) -> int:
        receiving = self._receiving
        if receiving is None:
            if self._error:
                return FAILED
            if not self._source:
                return BOOTSTRAPPING
            self._stay_queued()
            return WAITING_FOR_INPUT
        if isinstance(receiving.state, Waiting) or not receiving.is_released:
            return TRANSFERRING
        if not isinstance(receiving.state, Ready):
            self._fail(outcome_text(receiving))
        elif not self._is_stored and not self._error:
            try:
                row = receiving.state.aux.tensors.get(METADATA, b"")
                self._transfers.metadata.write(self._metadata_index, row)
                self._is_stored = True
            except BatonError as error:
                self._fail(str(error))
        return SUCCESS if self._is_stored and not self._error else FAILED

    poll_pp_consensus = poll

    def failure_exception(self) -> None:
        receiving = self._receiving
        if receiving is not None:
            if isinstance(receiving.state, Waiting):
                receiving.abort("another rank failed")
            wait_until_quiet(receiving.wait_released, self.bootstrap_room, "written")
            self._error = self._error or outcome_text(receiving)
        raise TransferFailedError(self._error)

    def abort(self) -> None:
        """SGLang goes on polling, and frees the pages when Failed is shown."""
        text = "the request was aborted at decode"
        if self._receiving is not None:
            self._receiving.abort(text)
        elif not self._error and self._source and self._transfers.endpoint.config.rank == 0:
            self._transfers.endpoint.decline(str(self.bootstrap_room), self._source, text)
        # Also where the prompt has arrived: SGLang has not taken it yet.
        self._error = self._error or text

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing: pages are quiet before Failed is shown."""

    def clear(self) -> None:
        pass

    # Parts of it.

    def _fail(self, text: str) -> None:
        self._error = self._error or text
        self.kv_mgr.forget(self.bootstrap_addr)

    def _stay_queued(self) -> None:
        endpoint, now = self._transfers.endpoint, monotonic()
        if endpoint.config.rank == 0 and now - self._queued_s > endpoint.config.timings.offer_s / 4:
            self._queued_s = now
            endpoint.queue(str(self.bootstrap_room), self._source)


def wait_until_quiet(wait: Callable[[float], bool], room: int | None, access: str) -> None:
    """Waits until the pages of a transfer are not read or written any more: SGLang is about to reuse them.

    If they do not become quiet, this server ends. An Exception would not do: SGLang logs it and goes on.
    """
    if not wait(QUIET_S_MAX):
        text = (
            f"baton: transfer {room}: its pages are still {access} after {QUIET_S_MAX:g} s; "
            "the server cannot continue"
        )
        logger.error(text)
        raise SystemExit(text)


def is_moved(offered: CheckedPages, pages: CheckedPages) -> bool:
    """Whether tokens that were offered lie in other pages now. Page 0 is before a window and not read.

    There may be more tokens now: those of a step after which the transfer had failed were not offered.
    """
    rows = [(pages[group][: len(ids)], ids) for group, ids in offered.items()]
    return any(((now != ids) & (now != 0)).any() for now, ids in rows)


def request_digest(request: Any) -> Digest:
    """What shaped the cache: the whole prompt, its embeddings if they were given, and SGLang's extra key."""
    if request.positional_embed_overrides is not None:
        raise ConfigError("positional_embed_overrides cannot be handed over: the digest does not cover them")
    embeddings = b""
    if request.input_embeds is not None:
        # As Baton's own engine has them.
        embeddings = np.asarray(request.input_embeds, "<f4").tobytes()
    return prompt_digest(request.origin_input_ids, salt=request.extra_key or "", embeddings=embeddings)


def first_logprobs(request: Any) -> tuple[dict[int, float], ...]:
    """Of the first token and the likeliest ones beside it, where they were asked for.

    SGLang reads them from its metadata; other engines have them from here.
    """
    if not request.return_logprob:
        return ()
    logprob = request.logprob
    first = {request.output_ids[0]: float(logprob.output_token_logprobs_val[0])}
    if logprob.output_top_logprobs_idx:
        tokens, values = logprob.output_top_logprobs_idx[0], logprob.output_top_logprobs_val[0]
        first |= {int(token): float(value) for token, value in zip(tokens, values, strict=True)}
    return (first,)
