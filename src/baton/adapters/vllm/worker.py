"""The connector in a vLLM worker: sends this rank's layers as they are computed, receives into its blocks.

vLLM calls everything here on the worker's main thread; only `_on_change` runs on the endpoint's.

A step's chunks are offered by layer. Where vLLM calls no hook for a layer, the end of the step offers it. A
group of layers leaves when its last layer is computed. On a GPU the kernels are then only launched, so the
fence is an event on the stream; the tokens of a prefix hit are behind it too, because whoever computed them
did so in this step or before.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

from baton.adapters.common import StepLayers, StepTrace, outcome_text, write_trace
from baton.adapters.vllm.cache import CacheLayer, group_name, reach
from baton.adapters.vllm.metadata import BlockIds, Cancel, Load, StepMetadata, Transfer
from baton.errors import BatonError
from baton.session import (
    Aux,
    CheckedPages,
    Digest,
    Endpoint,
    Failed,
    Handle,
    Receiving,
    Request,
    Sending,
    Waiting,
)
from baton.transport import Fence

IDLE_S = 0.002
"""How long a step without a forward waits for a change: an idle vLLM with transfers steps all the time."""
NULL_BLOCK = 0
"""What vLLM has in a block table where a block was freed."""
QUIET_S_MAX = 60.0
"""How long the blocks of a preempted request are waited for; copies end within their deadline."""

logger = logging.getLogger("vllm.baton")


@dataclass(slots=True)
class SentPrompt:
    """A prompt that this rank sends."""

    sending: Sending | None
    """None where it could not begin."""
    blocks: list[list[int]]
    """By group."""
    pages: CheckedPages | None = None
    """The same, read once for all layers of a step; None if it was refused."""
    is_committed: bool = False
    is_withdrawn: bool = False
    """Whether the request was preempted and is not scheduled again yet."""
    steps: dict[int, StepTrace] = field(default_factory=dict)
    """By number, where there is a trace."""

    @property
    def is_open(self) -> bool:
        """Whether chunks are still of use."""
        return self.sending is not None and not self.is_committed and isinstance(self.sending.state, Waiting)


@dataclass(slots=True)
class StepProgress:
    """The step that is computed."""

    number: int
    metadata: StepMetadata
    layers: StepLayers | None
    """None where it computes no prompt."""


@dataclass(frozen=True, slots=True)
class TransferResults:
    """Requests by what became of them since the last step."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """They are among those received."""


class WorkerSide:
    """Every hand-over that one rank takes part in."""

    def __init__(
        self,
        endpoint: Endpoint,
        layers: Sequence[CacheLayer],
        groups: Sequence[int],
        *,
        policy: str = "fixed:1",
        is_verified: bool = False,
        trace: Path | None = None,
        fence: Callable[[], Fence],
    ) -> None:
        self.endpoint = endpoint
        self._rank = endpoint.config.rank
        self._layers = {layer.name: layer.index for layer in layers}
        self._group_names = [group_name(group) for group in groups]
        self._block_tokens = max(layer.block_tokens for layer in layers)
        windows = {layer.group: layer.window for layer in layers}
        self._windows = [windows.get(group, 0) for group in groups]
        """By group, in tokens; 0 where there is none."""
        self._policy = policy
        self._is_verified = is_verified
        self._fence = fence
        """Makes a fence for what was launched up to now."""
        self._trace = trace
        """A file that gets a line of JSON for each prompt that was sent."""
        self._num_steps = 0
        self._outgoing: dict[str, SentPrompt] = {}
        self._incoming: dict[str, Receiving | None] = {}
        self._ended: set[str] = set()
        """Requests that vLLM has finished and whose prompts are still being sent."""
        self._given_up: set[str] = set()
        """Requests that ended at decode before they were loaded."""
        self._step: StepProgress | None = None
        self._changed = threading.Event()
        endpoint.on_change(self._on_change)

    def _on_change(self, handle: Handle) -> None:
        self._changed.set()

    # A step, in the order of vLLM's calls.

    def preempt(self, step: StepMetadata) -> None:
        """Withdraws prompts whose blocks vLLM has taken back; returns when nothing reads them any more."""
        withdrawals = []
        for request in step.preempted:
            prompt = self._outgoing.get(request)
            if prompt is not None and prompt.sending is not None:
                withdrawals.append((prompt.sending.transfer, prompt.sending.withdraw()))
                prompt.is_withdrawn, prompt.is_committed = True, False
        for transfer, withdrawal in withdrawals:
            if not withdrawal.wait(QUIET_S_MAX):
                raise BatonError(
                    f"transfer {transfer}: blocks of a preempted request are still read after "
                    f"{QUIET_S_MAX:g} s; the worker cannot continue"
                )

    def begin_step(self, step: StepMetadata) -> None:
        """Begins loads and sends; before the forward, so that a grant may come while it runs."""
        for decline in step.declines:
            if self._rank == 0:
                self.endpoint.decline(decline.transfer, decline.source, decline.text)
        for cancel in step.cancels:
            self._cancel(cancel)
        for queued in step.queued:
            prompt = self._outgoing.get(queued.request)
            if queued.source:
                if self._rank == 0:
                    self.endpoint.queue(queued.transfer.id, queued.source)
            elif prompt is None:
                self._outgoing[queued.request] = self._send(queued.transfer, is_queued=True)
            elif prompt.sending is not None and self._rank == 0:
                prompt.sending.queued()
        for load in step.loads:
            self._incoming[load.request] = self._receive(load)
        for chunk in step.chunks:
            prompt = self._outgoing.get(chunk.request)
            if prompt is None:
                prompt = self._outgoing[chunk.request] = self._send(chunk.transfer)
            if prompt.is_withdrawn:
                assert prompt.sending is not None
                prompt.sending.resume()
                prompt.is_withdrawn, prompt.blocks = False, [[] for _ in self._group_names]
            for blocks, new_blocks in zip(prompt.blocks, chunk.new_blocks, strict=False):
                blocks.extend(new_blocks)
            self._read_pages(prompt, chunk.transfer)
            if self._trace:
                prompt.steps[self._num_steps] = StepTrace(monotonic())
        lengths = [chunk.transfer.num_tokens for chunk in step.chunks]
        layers = StepLayers(self._policy, self._layers, lengths) if lengths else None
        self._step = StepProgress(self._num_steps, step, layers)
        self._num_steps += 1

    def layer_done(self, name: str) -> None:
        """A layer has stored the step's tokens, or on a GPU was launched to do so."""
        step = self._step
        if step is not None and step.layers is not None and (group := step.layers.done(name)):
            self._offer(step, group)

    def end_step(self) -> None:
        """Offers what no hook has reported, and commits prompts that are complete."""
        step, self._step = self._step, None
        if step is None:
            return
        if step.layers is not None and step.layers.repeated:
            self._abort(
                step,
                f"layer {step.layers.repeated[0]} ran twice in one step and was sent after the first time; "
                "start vLLM without options that cut a batch in parts",
            )
            return
        for group in step.layers.left if step.layers is not None else ():
            self._offer(step, group)
        for chunk in step.metadata.chunks:
            prompt = self._outgoing[chunk.request]
            if self._trace:
                prompt.steps[step.number].ended_s = monotonic()
            if prompt.is_open and prompt.pages is not None and chunk.tokens[1] == chunk.transfer.num_tokens:
                assert prompt.sending is not None
                prompt.sending.commit(Aux() if self._rank == 0 else None)
                prompt.is_committed = True

    def take_results(self, finished: set[str], *, is_idle: bool) -> TransferResults:
        """What ended; `finished` are requests that vLLM has finished since the last call."""
        if is_idle and (self._incoming or self._outgoing):
            self._changed.wait(IDLE_S)
        self._changed.clear()
        results = TransferResults()
        for request in finished:
            if (receiving := self._incoming.get(request)) is not None:
                receiving.abort("the request ended at decode")
                self._given_up.add(request)
            if (prompt := self._outgoing.get(request)) is not None:
                self._ended.add(request)
                sending = prompt.sending
                if sending is not None and not prompt.is_committed and isinstance(sending.state, Waiting):
                    sending.abort("the request ended at prefill")
        for request in [*self._ended]:
            sending = self._outgoing[request].sending
            if sending is None or sending.is_released:
                self._ended.remove(request)
                self._write_trace(self._outgoing.pop(request))
                results.sent.add(request)
        for request, receiving in [*self._incoming.items()]:
            if receiving is not None and not receiving.is_released:
                continue
            del self._incoming[request]
            results.received.add(request)
            if receiving is None:
                results.failed.add(request)
            elif isinstance(receiving.state, Failed):
                results.failed.add(request)
                if self._rank == 0 and request not in self._given_up:
                    text = outcome_text(receiving)
                    logger.warning("baton: request %s: transfer failed: %s", request, text)
            self._given_up.discard(request)
        return results

    def close(self) -> None:
        """Ends this rank, and with it the instance."""
        self.endpoint.close()

    # Parts of it.

    def _send(self, transfer: Transfer, *, is_queued: bool = False) -> SentPrompt:
        digest, sending = Digest(transfer.num_tokens, transfer.digest), None
        try:
            sending = self.endpoint.send(transfer.id, digest, is_queued=is_queued)
        except BatonError as error:
            logger.warning("baton: transfer %s could not begin: %s", transfer.id, error)
        return SentPrompt(sending, [[] for _ in self._group_names])

    def _cancel(self, cancel: Cancel) -> None:
        prompt = self._outgoing.pop(cancel.request, None) or self._send(cancel.transfer)
        if prompt.sending is not None:
            prompt.sending.abort(cancel.text)

    def _receive(self, load: Load) -> Receiving | None:
        transfer = load.transfer
        request = Request(
            transfer=transfer.id,
            source=load.source,
            digest=Digest(transfer.num_tokens, transfer.digest),
            pages={self._rank: self._pages(load.blocks)},
            # Of states nothing can be held, and vLLM has no prefix cache then.
            held=dict.fromkeys(self._group_names, load.num_held) if load.num_held else {},
            is_verified=self._is_verified,
        )
        try:
            return self.endpoint.receive(request)
        except BatonError as error:
            logger.warning("baton: request %s: cannot receive the KV cache: %s", load.request, error)
            return None

    def _pages(self, blocks: BlockIds | list[list[int]]) -> dict[str, list[int]]:
        return dict(zip(self._group_names, blocks, strict=True))

    def _read_pages(self, prompt: SentPrompt, transfer: Transfer) -> None:
        """Reads the page table of a prompt for a step."""
        prompt.pages = None
        for blocks, window in zip(prompt.blocks, self._windows, strict=True):
            if window:
                # vLLM frees them on the way, and decode's window does not reach back to them.
                num_freed = max(0, transfer.num_tokens - reach(window)) // self._block_tokens
                blocks[:num_freed] = [NULL_BLOCK] * min(num_freed, len(blocks))
        if not prompt.is_open:
            return
        assert prompt.sending is not None
        try:
            prompt.pages = prompt.sending.read_pages(self._pages(prompt.blocks))
        except BatonError as error:
            logger.warning("baton: transfer %s: %s", transfer.id, error)
            prompt.sending.abort(str(error))

    def _offer(self, step: StepProgress, layers: tuple[int, int]) -> None:
        fence = self._fence()
        for chunk in step.metadata.chunks:
            prompt = self._outgoing[chunk.request]
            if not prompt.is_open or prompt.pages is None:
                continue
            assert prompt.sending is not None
            try:
                prompt.sending.ready(layers, chunk.tokens, prompt.pages, fence)
                if self._trace:
                    prompt.steps[step.number].offered.append((layers, chunk.tokens, monotonic()))
            except BatonError as error:
                logger.warning("baton: transfer %s: cannot offer a chunk: %s", chunk.transfer.id, error)
                prompt.sending.abort(str(error))

    def _abort(self, step: StepProgress, text: str) -> None:
        """Gives up the prompts of a step."""
        for chunk in step.metadata.chunks:
            prompt = self._outgoing[chunk.request]
            if prompt.is_open and prompt.sending is not None:
                logger.warning("baton: transfer %s: %s", chunk.transfer.id, text)
                prompt.sending.abort(text)

    def _write_trace(self, prompt: SentPrompt) -> None:
        if self._trace is not None and prompt.sending is not None:
            steps = {number: asdict(step) for number, step in prompt.steps.items()}
            write_trace(self._trace, prompt.sending, self._rank, blocks=prompt.blocks, steps=steps)
