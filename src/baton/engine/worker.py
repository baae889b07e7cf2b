"""A worker process: one rank of an instance, with its part of the model, its cache pools and its endpoint.

One thread listens to the scheduler, another computes. Hand-over commands are executed by the listening thread
at once, even while a step is computed; steps, and what belongs to their order, go through a queue. The
process ends when its pipe does, whatever it is busy with: the workers of an instance live and die together.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import torch

from baton.engine.attention import prefill
from baton.engine.attention.pools import DTYPES, CachePools
from baton.engine.commands import (
    AbortTransfer,
    AttachCoordinator,
    Command,
    DeclineTransfer,
    EndSequence,
    QueueTransfer,
    ReceiveKV,
    Reply,
    SampledToken,
    ScheduledSequence,
    SendCached,
    SendKV,
    StartSequence,
    Step,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerReady,
)
from baton.engine.config import EngineConfig, WorkerConfig
from baton.engine.connector import KVConnector, PromptSlice
from baton.engine.cost_model import CostModel, LayerBytes
from baton.engine.drafting import FAILURE, HIDDEN, PROPOSALS, DraftTokens, packed
from baton.engine.gpu_memory import gpu_of
from baton.engine.grammar import Grammars
from baton.engine.layer_pipeline import LayerPipeline, clock_of
from baton.engine.model_runner import (
    ModelRunner,
    open_decoding,
    sample_tokens,
    why_not_captured,
    why_not_paged,
)
from baton.engine.models.build import build
from baton.engine.parallel import connect
from baton.engine.sampler import Sampler
from baton.engine.sizes import derive_sizes
from baton.errors import BatonError, ConfigError, EngineError
from baton.plan import Spec
from baton.plan.ownership import buffers
from baton.protocol.outcomes import Aux
from baton.session import Endpoint, EndpointConfig, SocketConfig
from baton.session.process import TransportConfig
from baton.session.remote import EndpointProcess, RemoteEndpoint
from baton.transport import Transport, option_names, parse_transport

EXIT_S_MAX = 3.0
"""How long a worker may take to end by itself; while it lives, pages that it may write are in quarantine."""
ATTACH_S_MAX = 120.0
"""How long the other ranks may take to attach once rank 0 waits for them."""


class SchedulerPipe:
    """Commands from the scheduler and replies to it; any thread may reply."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self) -> Command | None:
        """The next command, or None when the pipe is closed."""
        try:
            command: Command = self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return command

    def send(self, reply: Reply) -> None:
        """Sends a reply; ends the process if the scheduler is gone."""
        raw = self._encoder.encode(reply)
        with self._lock:
            try:
                self._connection.send_bytes(raw)
            except OSError:
                os._exit(1)


class Worker:
    """One rank: loads its part of the model, attaches to the instance, then runs steps."""

    def __init__(self, config: WorkerConfig, pipe: SchedulerPipe) -> None:
        self.config = config.engine
        self.rank = config.rank
        self.rendezvous = Path(config.rendezvous)
        self.eos_ids = config.eos_ids
        self.pipe = pipe
        self.sizes = derive_sizes(config.engine, is_checked=True)
        self._load(config.tokenizer)
        if self.rank == 0:
            note = self._attach(None)
            endpoint = self.connector.endpoint
            ready = WorkerReady(0, endpoint.address, endpoint.config.epoch, note)
            pipe.send(ready)
            if not endpoint.wait_ready(ATTACH_S_MAX):
                raise EngineError(
                    f"not all ranks of {self.config.name} have attached after {ATTACH_S_MAX:.0f} s"
                )
            pipe.send(ready)
        else:
            command = pipe.receive()
            if not isinstance(command, AttachCoordinator):
                raise EngineError(f"rank {config.rank} received {command} before its coordinator's address")
            pipe.send(WorkerReady(config.rank, note=self._attach(command)))

    def _load(self, tokenizer: str) -> None:
        """Loads the weights of this rank, and connects to the other ranks."""
        config, rank, sizes = self.config, self.rank, self.sizes
        # Now, so that it has imported what it needs when the weights are loaded.
        self.process = EndpointProcess(_transport_config(config)) if config.is_offloaded else None
        self.device = torch.device(config.device)
        if config.device == "cuda":
            self.device = torch.device("cuda", gpu_of(config.base_gpu_id, rank, torch.cuda.device_count()))
            torch.cuda.set_device(self.device)
        prefill.preload(self.device)
        self.mesh = connect(sizes.layout, rank, self.rendezvous, self.device)
        cut = self.mesh.cut(sizes.cache.num_layers, DTYPES[config.dtype], self.device)
        self.stage = build(sizes.checkpoint, cut, max_context=sizes.context_max, has_draft=config.has_draft)
        self.sampler = None
        if self.mesh.is_last and self.mesh.at["cp"] == 0 and self.mesh.at["tp"] == 0:
            vocab_size, grammars = sizes.architecture.vocab_size, None
            with suppress(ConfigError):  # requests with grammars are refused for the same reason
                # Now: it holds Python's lock for a second, and the heartbeats of an endpoint would wait.
                grammars = Grammars(tokenizer, vocab_size, self.eos_ids)
            self.sampler = Sampler(vocab_size, self.eos_ids, grammars)

    def _attach(self, coordinator: AttachCoordinator | None) -> str:
        """Makes the pools, the endpoint over them, and what runs steps; returns what users should know."""
        config, rank, spec, mesh = self.config, self.rank, self.sizes.spec, self.mesh
        transport = self.process or _transport_config(config).open()
        pools = _allocate_pools(spec, rank, transport, self.device)
        self.runner, note = self._make_runner(CachePools(spec, rank, pools, self.device))
        endpoint_config = EndpointConfig(
            instance=config.name,
            spec=spec,
            rank=rank,
            secret=config.secret,
            role=config.role,
            epoch=coordinator.epoch if coordinator else 0,
            coordinator=coordinator.coordinator if coordinator else None,
            registry=config.registry,
            fingerprint=self.sizes.checkpoint.fingerprint(),
            staging_bytes=self.sizes.staging_bytes,
            packing=config.packing,
            timings=config.timings(),
            ungranted_share_max=config.ungranted_share_max,
            url=config.url,
            sockets=SocketConfig(host=config.host, port=0 if coordinator else config.port, tls=config.tls),
        )
        endpoint: Endpoint | RemoteEndpoint
        if isinstance(transport, EndpointProcess):
            endpoint = RemoteEndpoint(endpoint_config, pools, transport)
        else:
            endpoint = Endpoint(endpoint_config, pools, transport)
        layers = spec.layout.stages(spec.cache.num_layers, "this")[mesh.at["pp"]]
        clock, costs = clock_of(self.device), CostModel()
        self.connector = KVConnector(
            endpoint,
            layers,
            costs,
            self.pipe.send,
            num_drafts=int(self.stage.draft is not None),
            is_verified=config.is_verified,
            # A later stage has nothing to launch before the first one is through its layers.
            begins_with_step=clock.is_async and mesh.is_first and self.process is None,
        )
        layer_bytes = LayerBytes.of_rank(spec, rank, layers)
        self.pipeline = LayerPipeline(
            self.connector,
            costs,
            clock,
            layers,
            layer_bytes,
            policy=config.policy,
            is_offloaded=self.process is not None,
        )
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        return note

    def _make_runner(self, pools: CachePools) -> tuple[ModelRunner, str]:
        """What runs steps, and how decode steps run where that is not by CUDA graphs on a GPU."""
        reason, decoding = why_not_paged(self.stage, self.mesh, pools), None
        if not reason:
            decoding = open_decoding(pools, self.config.sequences_max, self.sizes.context_max)
        runner = ModelRunner(self.stage, self.mesh, pools, decoding)
        if decoding is not None:
            reason = why_not_captured(self.mesh, self.sizes.architecture.num_experts)
            if not reason and self.config.role != "prefill":
                runner.capture()
        if self.device.type != "cuda" or not reason:
            return runner, ""
        how = "without paged kernels" if decoding is None else "kernel by kernel"
        return runner, f"decode steps run {how}: {reason}"

    def listen(self) -> None:
        """Executes hand-over commands and queues the others, until the pipe closes."""
        while (command := self.pipe.receive()) is not None:
            match command:
                case SendKV():
                    self.connector.send(command)
                case SendCached():
                    self.connector.send_cached(command)
                case ReceiveKV():
                    self.connector.receive(command)
                case AbortTransfer():
                    self.connector.abort(command)
                case DeclineTransfer():
                    self.connector.decline(command)
                case QueueTransfer():
                    self.connector.queue(command)
                case _:
                    self._queue.put(command)
        self._queue.put(Stop())
        threading.Event().wait(EXIT_S_MAX)
        os._exit(1)

    def compute(self) -> None:
        """Runs queued commands until it is to stop."""
        while True:
            match self._queue.get():
                case Step() as step:
                    self.pipe.send(self._run(step))
                case StartSequence() as started:
                    if self.sampler and started.dp == self.mesh.at["dp"]:
                        self.sampler.begin(started)
                case EndSequence(sequence):
                    if self.sampler:
                        self.sampler.end(sequence)
                case Stop():
                    return

    def close(self) -> None:
        """Leaves the instance and the mesh."""
        self.connector.close()
        self.mesh.close()

    def _run(self, step: Step) -> StepDone:
        start_s = monotonic()
        batch = step.batches[self.mesh.at["dp"]]
        logits = self.runner.run(step.batches, self.pipeline)
        sampled = [scheduled for scheduled in batch.sequences if scheduled.num_samples]
        samples: dict[int, list[SampledToken]] = {}
        if self.sampler and sampled:
            assert logits is not None
            samples = sample_tokens(self.sampler, logits, sampled)
        drafts = self._propose(sampled, samples) if self.runner.has_draft else {}
        # Before the commits: once every copy is known to be done, the times of its layers have to be.
        groups = self.pipeline.finish()
        for part in self.pipeline.slices:
            aux, is_ended = self._aux(part, samples, drafts.get(part.scheduled.sequence))
            self.connector.commit(part, aux, is_ended=is_ended)
        return StepDone(
            number=step.number,
            rank=self.rank,
            groups=groups,
            samples=samples,
            failures=self.sampler.failures(samples) if self.sampler else {},
            prompt_logprobs=self.runner.prompt_logprobs if self.sampler else {},
            proposals={sequence: draft.tokens for sequence, draft in drafts.items()},
            hidden={
                scheduled.sequence: drafts[scheduled.sequence].hidden
                for scheduled in sampled
                if scheduled.num_samples > 1 and scheduled.sequence in drafts
            },
            unpipelined=self.pipeline.unpipelined,
            start_s=start_s,
            stop_s=monotonic(),
        )

    def _propose(
        self, sampled: list[ScheduledSequence], samples: dict[int, list[SampledToken]]
    ) -> dict[int, DraftTokens]:
        """Runs the draft layer; returns draft tokens by sequence, on the rank that samples."""
        if not self.sampler:
            self.runner.propose(None, self.pipeline)
            return {}
        # Where an answer forks, the first one's token stands for all.
        tokens = [
            [sample.token for sample in samples[scheduled.sequence][: 1 + scheduled.num_drafted]]
            for scheduled in sampled
        ]
        drafts = self.runner.propose(tokens, self.pipeline)
        return {scheduled.sequence: draft for scheduled, draft in zip(sampled, drafts, strict=True)}

    def _aux(
        self, part: PromptSlice, samples: dict[int, list[SampledToken]], draft: DraftTokens | None
    ) -> tuple[Aux | None, bool]:
        """What the target needs besides the cache, and whether the answer ended with its first token."""
        scheduled, sampler = part.scheduled, self.sampler
        first_tokens = samples.get(scheduled.sequence)
        if not first_tokens or sampler is None:
            return None, False
        if failures := sampler.failures([scheduled.sequence]):
            return Aux(fields={FAILURE: failures[scheduled.sequence]}), False
        tensors = {}
        if draft is not None:
            tensors[PROPOSALS] = packed(draft.tokens)
            if scheduled.num_samples > 1:  # a row is long, and a single answer goes on without it
                tensors[HIDDEN] = draft.hidden
        aux = Aux(
            tokens=tuple(sample.token for sample in first_tokens),
            # Where any were asked for, a token's own is among them; where none were, the target reports none.
            logprobs=tuple(sample.top for sample in first_tokens),
            cached_tokens=part.transfer.command.num_cached,
            tensors=tensors,
        )
        context_max = self.sizes.context_max
        return aux, all(
            sampler.is_ending(scheduled.sequence, sample.token, context_max) for sample in first_tokens
        )


def _transport_config(config: EngineConfig) -> TransportConfig:
    name, options = parse_transport(config.transport)
    if "host" in option_names(name):
        # Peers reach this memory by the coordinator's address, unless the options name another.
        options.setdefault("host", config.host)
    return TransportConfig(name, options, config.link_bytes_per_s)


def _allocate_pools(
    spec: Spec, rank: int, transport: Transport | EndpointProcess, device: torch.device
) -> dict[str, Any]:
    sizes = buffers(spec, rank, "pool")
    if device.type == "cuda":
        return {name: torch.zeros(size, dtype=torch.uint8, device=device) for name, size in sizes.items()}
    return {name: transport.allocate(size) for name, size in sizes.items()}


def main(connection: Connection) -> None:
    """Runs a worker over the pipe that its process was started with."""
    config = msgspec.msgpack.decode(connection.recv_bytes(), type=WorkerConfig)
    pipe = SchedulerPipe(connection)
    torch.set_num_threads(config.engine.num_threads)
    torch.set_num_interop_threads(1)
    try:
        worker = Worker(config, pipe)
        # What exists now stays; the garbage collector would scan it again and again, and delay steps.
        gc.collect()
        gc.freeze()
        threading.Thread(target=worker.listen, name="listen", daemon=True).start()
        try:
            worker.compute()
        finally:
            failure = sys.exception()
            if failure is not None:
                # Before its hand-overs fail, so that the scheduler hears the reason first.
                pipe.send(WorkerFailed(config.rank, f"{type(failure).__name__}: {failure}"))
            worker.close()
    except BatonError as error:
        pipe.send(WorkerFailed(config.rank, str(error)))
        os._exit(1)
