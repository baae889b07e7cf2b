"""A rank process: listens to its scheduler on one thread, computes on another.

Hand-over orders are carried out by the listening thread at once, even while a step is computed; steps and
what belongs to their order wait in a queue. The process ends when its pipe does, whatever it is busy with:
an instance has one fate.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from time import monotonic

import msgspec
import torch

from baton.engine.drafting import HIDDEN, PROPOSAL, Guess
from baton.engine.rank.config import RankConfig
from baton.engine.rank.drawing import draw
from baton.engine.rank.handing import Part
from baton.engine.rank.parts import Parts, attach, load
from baton.engine.rank.pipeline import Pipeline
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import Progress, SamplingParams, ending
from baton.engine.steps import (
    Abort,
    Answer,
    Attach,
    Begin,
    Decline,
    Down,
    End,
    Order,
    Receive,
    Sampled,
    Send,
    Step,
    StepDone,
    Stop,
    Up,
    Work,
)
from baton.errors import BatonError, EngineError
from baton.protocol.outcomes import Aux

GOING_S_MAX = 3.0
"""How long a rank may take to end by itself; while it lives, pages that it may write are in quarantine."""
FORMING_S_MAX = 120.0
"""How long the ranks may take to attach once the first one waits for them."""


class Pipe:
    """Messages to and from the scheduler; any thread may tell."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Order)

    def tell(self, answer: Answer) -> None:
        """One answer; a scheduler that is gone hears nothing."""
        raw = self._encoder.encode(answer)
        with self._lock:
            try:
                self._connection.send_bytes(raw)
            except OSError:
                os._exit(1)

    def heard(self) -> Order | None:
        """The next order, or None at the end."""
        try:
            order: Order = self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return order

    def first(self) -> RankConfig:
        """What this rank is to be."""
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=RankConfig)


class Rank:
    """The computing thread: one step after another."""

    def __init__(self, config: RankConfig, parts: Parts, pipe: Pipe) -> None:
        self.config = config
        self.parts = parts
        self.pipe = pipe
        self.pipeline = Pipeline(parts.handing, parts.clock, config.policy, parts.layer_bytes)
        self.sampler = Sampler(parts.vocab_size, config.eos_ids) if parts.is_sampler else None
        self._begun: dict[int, tuple[int, SamplingParams]] = {}
        """By sequence: the tokens of its prompt, without what was answered already, and its wishes."""
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def listen(self) -> None:
        """Carries hand-over orders out and queues the others, until the pipe ends."""
        handing = self.parts.handing
        while (order := self.pipe.heard()) is not None:
            match order:
                case Send():
                    handing.send(order)
                case Receive():
                    handing.receive(order)
                case Abort():
                    handing.abort(order)
                case Decline():
                    handing.decline(order)
                case _:
                    self.orders.put(order)
        self.orders.put(Stop())
        threading.Event().wait(GOING_S_MAX)
        os._exit(1)

    def compute(self) -> None:
        """Takes orders until told to stop."""
        while True:
            match self.orders.get():
                case Step() as step:
                    self.pipe.tell(self._run(step))
                case Begin() as begun:
                    if self.sampler and begun.dp == self.parts.mesh.at["dp"]:
                        self.sampler.begin(begun)
                        self._begun[begun.sequence] = (begun.num_prompt, begun.params)
                case End(sequence):
                    if self.sampler:
                        self.sampler.end(sequence)
                        self._begun.pop(sequence, None)
                case Stop():
                    return

    def _run(self, step: Step) -> StepDone:
        start_s = monotonic()
        batch = step.batches[self.parts.mesh.at["dp"]]
        logits = self.parts.runner.run(step.batches, self.pipeline)
        wanted = [work for work in batch.works if work.num_samples]
        samples: dict[int, list[Sampled]] = {}
        if self.sampler and wanted:
            assert logits is not None
            samples = draw(self.sampler, logits, wanted)
        guesses = self._guess(wanted, samples) if self.parts.runner.has_draft else {}
        # Before the commits: once all is known to be copied, so is when it was computed.
        groups = self.pipeline.groups()
        for part in self.pipeline.leaving:
            aux, is_ended = self._aux(part, samples, guesses.get(part.work.sequence))
            self.parts.handing.commit(part, aux, is_ended=is_ended)
        return StepDone(
            number=step.number,
            rank=self.config.rank,
            groups=groups,
            samples=samples,
            proposals={sequence: guess.token for sequence, guess in guesses.items()},
            hidden={work.sequence: guesses[work.sequence].hidden for work in wanted if _forks(work, guesses)},
            unpipelined=self.pipeline.unpipelined,
            start_s=start_s,
            stop_s=monotonic(),
        )

    def _guess(self, wanted: list[Work], samples: dict[int, list[Sampled]]) -> dict[int, Guess]:
        """The draft's part of a step; guesses by sequence, on the rank that samples."""
        said = None
        if self.sampler:
            # Where an answer forks, the first one's token stands for all.
            found = [samples[work.sequence][: 1 + work.num_drafted] for work in wanted]
            said = [[each.token for each in tokens] for tokens in found]
        proposed = self.parts.runner.propose(said, self.pipeline)
        if not self.sampler:
            return {}
        triples = zip(wanted, proposed.tokens, proposed.rows, strict=True)
        return {work.sequence: Guess(token, row) for work, token, row in triples}

    def _aux(
        self, part: Part, samples: dict[int, list[Sampled]], guess: Guess | None
    ) -> tuple[Aux | None, bool]:
        """What the target needs beside the cache, and whether the answer ended with its first token."""
        work = part.work
        found = samples.get(work.sequence)
        if not found or self.sampler is None:
            return None, False
        # A token's own is among them where any are told; where none are, the target tells none either.
        logprobs = tuple(each.top for each in found)
        aux = Aux(
            tokens=tuple(each.token for each in found),
            logprobs=logprobs,
            sampler_position=work.start + len(work.tokens),
            cached_tokens=part.outgoing.order.num_cached,
            # A row is long; one answer goes on from the guess alone.
            tensors={HIDDEN: guess.hidden} if guess is not None and work.num_samples > 1 else {},
            fields={} if guess is None else {PROPOSAL: guess.token},
        )
        return aux, all(self._is_ending(work, each.token) for each in found)

    def _is_ending(self, work: Work, token: int) -> bool:
        """Whether an answer is over with the first token sampled here, as far as tokens tell."""
        num_prompt, params = self._begun[work.sequence]
        num_tokens = work.start + len(work.tokens) + 1
        progress = Progress(token, num_tokens - num_prompt, num_tokens, self.config.context_max)
        return ending(progress, params, self.config.eos_ids) is not None


def _forks(work: Work, guesses: dict[int, Guess]) -> bool:
    return work.num_samples > 1 and work.sequence in guesses


def main(connection: Connection) -> None:
    """The whole life of a rank process, over the pipe that it was born with."""
    pipe = Pipe(connection)
    config = pipe.first()
    torch.set_num_threads(config.num_threads)
    torch.set_num_interop_threads(1)
    try:
        _live(config, pipe)
    except BatonError as error:
        pipe.tell(Down(config.rank, str(error)))
        os._exit(1)


def _live(config: RankConfig, pipe: Pipe) -> None:
    loaded = load(config)
    if config.rank == 0:
        parts = attach(config, loaded, None, pipe.tell)
        endpoint = parts.handing.endpoint
        up = Up(0, endpoint.address, endpoint.config.epoch, endpoint.registry or "")
        pipe.tell(up)
        if not endpoint.wait_ready(FORMING_S_MAX):
            raise EngineError(f"{config.instance} has not all of its ranks after {FORMING_S_MAX:.0f} s")
        # A registry that is hosted here has its address by now.
        pipe.tell(msgspec.structs.replace(up, registry=endpoint.registry or ""))
    else:
        order = pipe.heard()
        if not isinstance(order, Attach):
            raise EngineError(f"rank {config.rank} was told {order} before it was told its coordinator")
        parts = attach(config, loaded, order, pipe.tell)
        pipe.tell(Up(config.rank))
    # What is there now stays: looking through it again and again would hold steps up.
    gc.collect()
    gc.freeze()
    rank = Rank(config, parts, pipe)
    threading.Thread(target=rank.listen, name="listen", daemon=True).start()
    try:
        rank.compute()
    finally:
        error = sys.exception()
        if error is not None:
            # Before the hand-overs fail for it, so that what is told first is the reason.
            pipe.tell(Down(config.rank, f"{type(error).__name__}: {error}"))
        parts.handing.close()
        parts.mesh.close()
