"""A whole deployment on this machine: registry, instances and router, for `baton up` and `baton demo`.

The registry starts first, because the others need its address; then the instances and the router. They end in
the opposite order, so that no process waits for one that has left.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton import settings
from baton.cli.logs import Form, Level, is_json_log, with_service
from baton.cli.output import REFRESH_PER_S
from baton.cli.side_args import ALIKE, SideArgs, check_same_transport
from baton.cli.vllm_servers import VllmServer
from baton.engine.config import GPU_MEMORY_UTILIZATION, EngineConfig, EngineSizes, check_config
from baton.engine.gpu_memory import deal_gpus, read_gpus
from baton.errors import ConfigError, EngineError
from baton.plan import Spec, parse_layout
from baton.plan.planner import plan
from baton.plan.printer import human_bytes
from baton.plan.report import Report
from baton.plan.routes import Prompt
from baton.plan.steps import NEVER_PACK, PackCost
from baton.settings import Tls
from baton.supervisor import LAST_LINE, Service, SupervisedService, Supervisor, fetch_health
from baton.units import parse_speed

REGISTRY, ROUTER = "registry", "router"
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
TOKENS_PLANNED = 1024
POLL_S = 0.25
FOLDER_CHARS_MAX = 50
RESTARTING = "restarting: "
"""Start of an instance's stage after it has failed."""


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """Everything a user may set; None: the default of `baton serve` or `baton route`."""

    model: str
    prefills: tuple[str, ...]
    """One layout for each prefill instance."""
    decodes: tuple[str, ...] = ()
    """One layout for each decode instance; empty: every instance prefills and decodes."""
    link: str | None = None
    """Link speed of each prefill rank."""
    transport: str | None = None
    overlap: str | None = None
    first_token: str | None = None
    dtype: str | None = None
    device: str | None = None
    generation_config: str | None = None
    page_tokens: int | None = None
    pool_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    """The share of a GPU that all instances on it take together."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    chunk_tokens: int | None = None
    queue: int | None = None
    transfer_timeout: float | None = None
    served_model_name: str | None = None
    no_prefix_caching: bool = False
    draft: bool = False
    verify: bool = False
    prefill_args: SideArgs = ALIKE
    """For every prefill instance, where they differ from the options above."""
    decode_args: SideArgs = ALIKE
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str | None = None
    local: str | None = None
    local_prefill_max: int | None = None
    api_key_file: Path | None = None
    tls: Tls | None = None
    """Of every process."""
    log_level: Level = "info"
    log_format: Form = "text"
    vllm: str = ""
    """The `vllm` program, where instances run vLLM; empty: Baton's own engine."""
    vllm_args: tuple[str, ...] = ()
    """Options of `vllm serve`, for every server."""

    @property
    def model_name(self) -> str:
        """As clients name it."""
        return self.served_model_name or self.model

    def process_arguments(self) -> list[str]:
        """Options of every process: logs and certificates."""
        logs = _arguments(log_level=self.log_level, log_format=self.log_format)
        if self.tls is None:
            return logs
        tls = self.tls
        return [*logs, *_arguments(tls_cert=tls.certificate, tls_key=tls.key, tls_ca=tls.authority)]

    def side_args(self, role: str) -> SideArgs:
        """What is given for the instances of one role alone."""
        return self.decode_args if role == DECODE else self.prefill_args

    @property
    def instances(self) -> list[tuple[str, str, str]]:
        """(role, name, layout) of every instance, prefill instances first."""
        first = PREFILL if self.decodes else BOTH
        return [
            (role, f"{role}-{index}", layout)
            for role, layouts in ((first, self.prefills), (DECODE, self.decodes))
            for index, layout in enumerate(layouts)
        ]


def kv_transport(options: DeploymentOptions) -> str | None:
    """The transport of the deployment; None: the default of `baton serve`.

    Between GPUs of this host it is cuda_ipc, unless the link is to have a stated speed.
    """
    sides = [side.engine_options for side in (options.prefill_args, options.decode_args)]
    is_given = any("transport" in side or "link_bytes_per_s" in side for side in sides)
    if options.transport or options.link or is_given or not options.decodes:
        return options.transport
    return "cuda_ipc" if _is_on_gpus(options) else None


def gpu_places(options: DeploymentOptions) -> list[dict[str, Any]]:
    """For every instance, first GPU and share of its GPUs, as fields of EngineConfig; none on CPUs."""
    gpus = read_gpus() if _is_on_gpus(options) else []
    if not gpus:
        return [{} for _ in options.instances]
    dealt = deal_gpus([parse_layout(layout).num_ranks for _, _, layout in options.instances], len(gpus))
    whole = options.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    return [{"base_gpu_id": first, "gpu_memory_utilization": whole * share} for first, share in dealt]


def _is_on_gpus(options: DeploymentOptions) -> bool:
    # Importing torch takes seconds, which a mistake need not wait for.
    from baton.engine.sizes import find_device

    sides = [side.engine_options for side in (options.prefill_args, options.decode_args)]
    return {find_device(side.get("device", options.device or "auto")) for side in sides} == {"cuda"}


def instance_services(options: DeploymentOptions, registry: str) -> list[Service]:
    """`baton serve` for every instance."""
    common = _arguments(
        transport=kv_transport(options),
        overlap=options.overlap,
        first_token=options.first_token,
        dtype=options.dtype,
        device=options.device,
        generation_config=options.generation_config,
        page_tokens=options.page_tokens,
        pool_tokens=options.pool_tokens,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        chunk_tokens=options.chunk_tokens,
        queue=options.queue,
        transfer_timeout=options.transfer_timeout,
        served_model_name=options.served_model_name,
    )
    services = []
    for (role, name, layout), place in zip(options.instances, gpu_places(options), strict=True):
        own = _arguments(role=role, model=options.model, layout=layout, registry=registry, name=name, **place)
        link = _arguments(link=options.link if role == PREFILL else None)
        flags = [
            f"--{name.replace('_', '-')}"
            for name in ("draft", "verify", "no_prefix_caching")
            if getattr(options, name)
        ]
        # The last of an option counts.
        side = options.side_args(role).words
        words = ("serve", *own, *common, *link, *flags, *side, *options.process_arguments())
        services.append(Service(name, words, "serving at "))
    return services


def router_service(
    options: DeploymentOptions, registry: str | None, servers: Sequence[VllmServer] = ()
) -> Service:
    """`baton route`, which clients connect to."""
    arguments = [word for server in servers for word in server.route_words]
    arguments += _arguments(
        registry=registry,
        engine="vllm" if servers else None,
        host=options.host,
        policy=options.policy,
        local=options.local,
        local_prefill_max=options.local_prefill_max,
        api_key_file=options.api_key_file,
    )
    words = ("route", *arguments, *options.process_arguments())
    return Service(ROUTER, words, "routing at ", options.port, host=options.host)


def _arguments(**values: object) -> list[str]:
    """Options of a command line; None is left out."""
    return [
        word
        for name, value in values.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def vllm_services(options: DeploymentOptions, servers: Sequence[VllmServer]) -> list[Service]:
    """`vllm serve` for every instance."""
    connector = {"transport": options.transport, "overlap": options.overlap, "verify": options.verify or None}
    given = {name: value for name, value in connector.items() if value is not None}
    return [
        server.service(
            options.vllm, options.model, given, (*options.vllm_args, *options.side_args(server.role).words)
        )
        for server in servers
    ]


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """An instance with its derived sizes, before it is started."""

    name: str
    config: EngineConfig
    sizes: EngineSizes

    @property
    def spec(self) -> Spec:
        """The layout and the KV cache as peers see them."""
        return self.sizes.spec

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.sizes.lines())}"


def plan_instances(options: DeploymentOptions) -> list[PlannedInstance]:
    """Derives the sizes of every instance; raises on a model, layout or number that cannot work."""
    if options.decode_args.words and not options.decodes:
        raise ConfigError("--decode-args is for decode instances; give --decode too")
    if options.link is not None:
        parse_speed(options.link)
    given = {
        "transport": options.transport,
        "policy": options.overlap,
        "dtype": options.dtype,
        "device": options.device or "auto",
        "page_tokens": options.page_tokens,
        "pool_tokens": options.pool_tokens,
        "context_max": options.max_model_len,
        "sequences_max": options.max_num_seqs,
        "total_s": options.transfer_timeout,
        "has_prefix_cache": False if options.no_prefix_caching else None,
        "chunk_tokens": options.chunk_tokens,
        "has_draft": options.draft,
        "is_verified": options.verify,
    }
    overrides = {name: value for name, value in given.items() if value is not None}
    configs = []
    for (role, name, layout), place in zip(options.instances, gpu_places(options), strict=True):
        own = overrides | place | dict(options.side_args(role).engine_options)
        configs.append(EngineConfig(options.model, layout, name, **own))
        check_config(configs[-1])
    check_same_transport(config.transport for config in configs)
    # As in kv_transport, which imports it too.
    from baton.engine.sizes import derive_sizes

    if (transport := kv_transport(options)) is not None and options.transport is None:
        configs = [replace(config, transport=transport) for config in configs]
    return [PlannedInstance(config.name, config, derive_sizes(config)) for config in configs]


def plan_pairs(
    options: DeploymentOptions, instances: list[PlannedInstance]
) -> list[tuple[PlannedInstance, PlannedInstance, Report]]:
    """Plans every prefill instance with every decode instance; raises if a pair has no hand-over."""
    split = len(options.prefills)
    pairs = []
    for source in instances[:split]:
        for target in instances[split:]:
            num_tokens = min(TOKENS_PLANNED, source.sizes.context_max, target.sizes.context_max)
            pair = plan(source.spec, target.spec)
            cost = PackCost() if target.config.packing == "cost" else NEVER_PACK
            pairs.append((source, target, Report(options.model, pair, Prompt(num_tokens, {}), cost)))
    return pairs


def pair_line(source: PlannedInstance, target: PlannedInstance, report: Report) -> str:
    """A pair in one line."""
    names = " to ".join(f"{instance.name} ({instance.spec.layout})" for instance in (source, target))
    num_pairs = len({(route.source, route.target) for route in report.routes})
    packed = f"packed for {len(report.packed_pairs)} of them" if report.packed_pairs else "none packed"
    dtypes = source.spec.storage.dtype, target.spec.storage.dtype
    converted = "" if dtypes[0] == dtypes[1] else f", converted from {dtypes[0]} to {dtypes[1]}"
    size = human_bytes(sum(report.bytes_by_source))
    return (
        f"{names}: {len(report.routes)} routes between {num_pairs} pairs of ranks, {packed}{converted}; "
        f"{size} for {report.prompt.num_tokens} tokens"
    )


class Deployment:
    """The processes of a deployment; leaving the context ends them."""

    def __init__(self, options: DeploymentOptions, *, shows_logs: bool = True) -> None:
        self.options = options
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._shows_logs = shows_logs
        # vLLM makes Unix sockets in it, whose paths have at most 107 characters.
        is_long = bool(options.vllm) and len(tempfile.gettempdir()) > FOLDER_CHARS_MAX
        folder = tempfile.mkdtemp(prefix="baton-up-", dir="/tmp" if is_long else None)
        environment = settings.service_environment(secrets.token_hex(32), folder)
        if options.vllm:
            environment |= settings.vllm_environment()
        self._supervisor = Supervisor(environment, folder, self._on_line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._supervisor.close(list(reversed(self._start_order())))

    @property
    def url(self) -> str:
        """The router's URL."""
        return self._supervisor.services[ROUTER].url

    @property
    def registry(self) -> str:
        """The registry's URL."""
        return self._supervisor.services[REGISTRY].url

    def hurry(self) -> None:
        """Do not wait for running requests any longer."""
        self._supervisor.hurry()

    def start(self, servers: Sequence[VllmServer] = ()) -> None:
        """Starts every process and waits until all can serve, with progress on stderr.

        `servers` are those of vLLM, which need no registry.
        """
        with self._progress() as show:
            if servers:
                for service in vllm_services(self.options, servers):
                    self._supervisor.start(service)
                self._supervisor.start(router_service(self.options, None, servers))
                self._wait_ready(show)
                return
            registry = self._supervisor.start(
                Service(REGISTRY, ("registry", *self.options.process_arguments()), "registry at ")
            )
            self._supervisor.wait_until(lambda: registry.is_listening)
            for service in instance_services(self.options, registry.url):
                self._supervisor.start(service)
            self._supervisor.start(router_service(self.options, registry.url))
            self._wait_ready(show)

    def restart_prefill(self, options: DeploymentOptions) -> None:
        """Restarts the first prefill instance with other options, and waits until all can serve again."""
        services = instance_services(options, self.registry)
        with self._progress() as show:
            # Until it has polled again, the router reports the instance that has left.
            self._supervisor.services[ROUTER].is_ready = False
            self._supervisor.replace(next(service for service in services if service.name == f"{PREFILL}-0"))
            self._wait_ready(show)

    def wait_failure(self) -> None:
        """Blocks until a service has failed for good, and raises its error."""
        self._supervisor.wait_until(lambda: False)

    def _start_order(self) -> list[list[str]]:
        instances = [name for _, name, _ in self.options.instances]
        return [[], instances, [ROUTER]] if self.options.vllm else [[REGISTRY], instances, [ROUTER]]

    def _wait_ready(self, show: Callable[[SupervisedService], None]) -> None:
        services = self._supervisor.services
        for supervised in services.values():
            if not supervised.is_ready:
                show(supervised)
        for names in self._start_order():
            group = [services[name] for name in names]
            while pending := [supervised for supervised in group if not supervised.is_ready]:
                for supervised in pending:
                    self._check_health(supervised, show)
                self._supervisor.wait_until(lambda: False, 0 if all(s.is_ready for s in pending) else POLL_S)

    def _check_health(self, supervised: SupervisedService, show: Callable[[SupervisedService], None]) -> None:
        name = supervised.service.name
        stage = "starting"
        if supervised.is_listening:
            is_healthy, body = fetch_health(supervised.url, tls=self.options.tls)
            stage = "" if is_healthy else health_stage(name, body) if body else supervised.stage
        if stage.startswith(RESTARTING) and not supervised.was_ready:
            # The instance would retry, but what never worked will not work now.
            raise EngineError(f"{name} cannot start: {stage.removeprefix(RESTARTING)}")
        supervised.is_ready = supervised.is_listening and not stage
        supervised.was_ready = supervised.was_ready or supervised.is_ready
        if supervised.is_ready or stage != supervised.stage:
            supervised.stage = stage or "ready"
            show(supervised)

    def _on_line(self, name: str, line: str) -> None:
        """Shows a line of a service. Logs of the start repeat /health, and the end is our own doing."""
        was_ready = name in self._supervisor.services and self._supervisor.services[name].was_ready
        if self.options.vllm and name != ROUTER:
            # vLLM logs every request; what it ends with is worth reading, and what is said about it.
            is_shown = line.startswith((LAST_LINE, "ended", "was ended"))
        else:
            is_log_shown = self._shows_logs and was_ready and not self._supervisor.is_closing
            is_shown = is_log_shown or not is_log(line)
        if is_shown:
            shown = with_service(line, name) if is_json_log(line) else f"{name}: {line}"
            self.console.print(Text(shown, style="dim"))

    @contextmanager
    def _progress(self) -> Iterator[Callable[[SupervisedService], None]]:
        """A row per service on a terminal until all are ready; plain lines elsewhere."""
        layouts = {name: layout for _, name, layout in self.options.instances}

        def title(supervised: SupervisedService) -> str:
            name = supervised.service.name
            return f"{name} ({layouts[name]})" if name in layouts else name

        if not self.console.is_terminal:
            yield lambda supervised: self.console.print(Text(f"{title(supervised)}: {supervised.stage}"))
            return
        rows: dict[str, SupervisedService] = {}
        with Live(console=self.console, refresh_per_second=REFRESH_PER_S, transient=True) as live:

            def show(supervised: SupervisedService) -> None:
                rows[supervised.service.name] = supervised
                table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
                for row in rows.values():
                    table.add_row(title(row), "[green]ready[/green]" if row.is_ready else Text(row.stage))
                live.update(table)

            yield show


def is_log(line: str) -> bool:
    """Whether a line starts with a date, as log lines do, or is JSON."""
    return is_json_log(line) or re.match(r"\d{4}-\d\d-\d\d ", line) is not None


def health_stage(name: str, body: bytes) -> str:
    """The stage in the body of a /health that is not all right; "not ready" if the body has another form."""
    try:
        told = json.loads(body)
        message = str(told["error"]["message"] if "error" in told else told["message"])
    except (ValueError, KeyError, TypeError):
        return "not ready"
    return message.removeprefix(f"{name} is not ready: ")
