"""A whole deployment on this machine: registry, instances and router, for `baton up` and `baton demo`.

The registry starts first, because the others need its address; then the instances and the router. They end in
the opposite order, so that no process waits for one that has left.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton import settings
from baton.cli.checks import check_same_transport, side_options, side_words
from baton.cli.logs import is_json_log, with_service
from baton.cli.options import DeploymentOptions, InstanceOptions
from baton.cli.output import REFRESH_PER_S, StatusLines
from baton.cli.parser import engine_fields, given, override, words
from baton.cli.vllm_servers import VllmServer, plan_servers
from baton.engine.config import EngineConfig, EngineSizes, check_config, worker_modules
from baton.errors import ConfigError, EngineError
from baton.fork_server import FORK_SERVERS
from baton.plan.planner import plan
from baton.plan.printer import human_bytes
from baton.plan.report import Report
from baton.plan.routes import Prompt
from baton.plan.steps import NEVER_PACK, PackCost
from baton.supervisor import LAST_LINE, Service, SupervisedService, Supervisor, fetch_health

REGISTRY, ROUTER = "registry", "router"
TOKENS_PLANNED = 1024
POLL_S = 0.25
FOLDER_CHARS_MAX = 50
RESTARTING = "restarting: "
"""Start of an instance's stage after it has failed."""


@dataclass(frozen=True, slots=True)
class DeployedInstance:
    """An instance of a deployment, with the options that it alone has."""

    role: str
    name: str
    layout: str
    options: InstanceOptions

    @property
    def config(self) -> EngineConfig:
        """As `baton serve` makes it of these options."""
        return EngineConfig(layout=self.layout, name=self.name, role=self.role, **engine_fields(self.options))

    def service(self, registry: str, server: list[str]) -> Service:
        """Its `baton serve`; `server` are the options of every process."""
        own = words(role=self.role, layout=self.layout, registry=registry, name=self.name)
        arguments = ("serve", *own, *words(**given(self.options)), *server)
        return Service(self.name, arguments, "serving at ", modules=serve_modules(self.options.model))


def serve_modules(model: str) -> tuple[str, ...]:
    """What `baton serve` imports: its processes are forked from one that has done so."""
    return (*worker_modules(model), "baton.serving.server")


def fork_early(model: str) -> None:
    """Imports it in this process, for planning too, and makes a fork of it the fork server of instances."""
    FORK_SERVERS.fork_early(settings.rank_environment(1), serve_modules(model))


def check_instances(options: DeploymentOptions) -> list[DeployedInstance]:
    """Every instance with its own options; raises on options that cannot be, without importing PyTorch."""
    if options.decode_args and not options.decode:
        raise ConfigError("--decode-args is for decode instances; give --decode too")
    if "base_gpu_id" in options.instance.given:
        raise ConfigError("--base-gpu-id is for one side; give it in --prefill-args or --decode-args")
    sides, instances = _sides(options), []
    for role, name, layout in options.layouts:
        own = override(options.instance, sides[role])
        if role != "prefill" and "link" not in sides[role]:  # it is for ranks that send
            own = replace(own, link=None, given=tuple(option for option in own.given if option != "link"))
        instances.append(DeployedInstance(role, name, layout, own))
        check_config(instances[-1].config)
    check_same_transport(instance.options.transport for instance in instances)
    return instances


def _sides(options: DeploymentOptions) -> dict[str, dict[str, Any]]:
    """By role: the options that are for one side alone."""
    prefill = side_options("--prefill-args", options.prefill_args)
    decode = side_options("--decode-args", options.decode_args)
    return {"prefill": prefill, "both": prefill, "decode": decode}


def make_instances(options: DeploymentOptions) -> list[DeployedInstance]:
    """Every instance with its own options and its GPUs; raises on options that cannot be."""
    return _place_on_gpus(check_instances(options), _sides(options))


def _place_on_gpus(
    instances: list[DeployedInstance], sides: Mapping[str, Mapping[str, Any]]
) -> list[DeployedInstance]:
    """Where all run on GPUs, each gets GPUs or a share of them, and they copy to each other by cuda_ipc.

    Options of one side go first, and a link of a stated speed is one of the default transport.
    """
    # Importing torch takes seconds, which a mistake need not wait for.
    from baton.engine.sizes import find_device, place_on_gpus

    if {find_device(instance.options.device) for instance in instances} != {"cuda"}:
        return instances
    is_transport_given = any({"transport", "link"} & set(instance.options.given) for instance in instances)
    has_pairs = instances[-1].role == "decode"
    common = {"transport": "cuda_ipc"} if has_pairs and not is_transport_given else {}
    placed = []
    for instance, config in zip(
        instances, place_on_gpus([instance.config for instance in instances]), strict=True
    ):
        place = {
            name: getattr(config, name)
            for name in ("base_gpu_id", "gpu_memory_utilization")
            if name not in sides[instance.role]
        }
        placed.append(replace(instance, options=override(instance.options, common | place)))
    return placed


def router_service(
    options: DeploymentOptions, registry: str | None, servers: Sequence[VllmServer] = ()
) -> Service:
    """`baton route`, which clients connect to."""
    arguments = words(
        registry=registry,
        engine=options.engine,
        host=options.host,
        policy=options.policy,
        local=options.local,
        local_prefill_max=options.local_prefill_max,
        queue_timeout=options.instance.queue_timeout,
        api_key_file=options.api_key_file,
    )
    named = [word for server in servers for word in server.route_words]
    line = ("route", *named, *arguments, *words(**asdict(options.server)))
    return Service(ROUTER, line, "routing at ", options.port, host=options.host)


def make_vllm_servers(options: DeploymentOptions) -> list[VllmServer]:
    """The servers of vLLM; raises on options that they cannot have."""
    if not options.decode:
        raise ConfigError("--engine vllm needs --decode: without it there is nothing to hand over")
    # --queue-timeout is the router's.
    names = set(options.instance.given) - {"model", "transport", "overlap", "verify", "queue_timeout"}
    names |= set() if options.local_prefill_max is None else {"local_prefill_max"}
    for name in sorted(names):
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} is for Baton's own engine; give vLLM's own options after --")
    if options.server.tls() is not None:
        raise ConfigError(
            "--tls-cert: the servers of `baton up --engine vllm` speak plain HTTP on loopback; for TLS start "
            "`vllm serve` and `baton route` yourself"
        )
    servers = plan_servers(options.layouts, settings.gpus())
    vllm_services(options, servers)  # raises on a program or options that cannot be
    return servers


def vllm_services(options: DeploymentOptions, servers: Sequence[VllmServer]) -> list[Service]:
    """`vllm serve` for every instance."""
    program, common = settings.vllm_command(options.vllm), given(options.instance)
    connector = {name: common[name] for name in ("transport", "overlap", "verify") if name in common}
    sides = {
        "prefill": side_words("--prefill-args", options.prefill_args),
        "decode": side_words("--decode-args", options.decode_args),
    }
    return [
        server.service(program, options.instance.model, connector, [*options.vllm_args, *sides[server.role]])
        for server in servers
    ]


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """An instance with its derived sizes, before it is started."""

    config: EngineConfig
    sizes: EngineSizes

    @property
    def title(self) -> str:
        """Name and layout."""
        return f"{self.config.name} ({self.sizes.layout})"

    def __str__(self) -> str:
        return f"{self.config.name}: {'; '.join(self.sizes.lines())}"


def plan_instances(options: DeploymentOptions) -> list[PlannedInstance]:
    """Derives the sizes of every instance; raises on a model, layout or number that cannot work."""
    configs = [instance.config for instance in make_instances(options)]
    from baton.engine.sizes import derive_sizes  # as in _place_on_gpus

    return [PlannedInstance(config, derive_sizes(config)) for config in configs]


def plan_pairs(instances: list[PlannedInstance]) -> list[str]:
    """A line for every prefill instance with every decode instance; raises if a pair has no hand-over."""
    sources, targets = (
        [instance for instance in instances if instance.config.role == role] for role in ("prefill", "decode")
    )
    return [_plan_pair(source, target) for source in sources for target in targets]


def _plan_pair(source: PlannedInstance, target: PlannedInstance) -> str:
    num_tokens = min(TOKENS_PLANNED, source.sizes.context_max, target.sizes.context_max)
    cost = PackCost() if target.config.packing == "cost" else NEVER_PACK
    pair = plan(source.sizes.spec, target.sizes.spec)
    report = Report(source.config.model, pair, Prompt(num_tokens, {}), cost)
    num_pairs = len({(route.source, route.target) for route in report.routes})
    packed = f"packed for {len(report.packed_pairs)} of them" if report.packed_pairs else "none packed"
    dtypes = source.sizes.spec.storage.dtype, target.sizes.spec.storage.dtype
    converted = "" if dtypes[0] == dtypes[1] else f", converted from {dtypes[0]} to {dtypes[1]}"
    return (
        f"{source.title} to {target.title}: {len(report.routes)} routes between {num_pairs} pairs of ranks, "
        f"{packed}{converted}; {human_bytes(sum(report.bytes_by_source))} for {num_tokens} tokens"
    )


class DeploymentProcesses:
    """The processes of a deployment; leaving the context ends them."""

    def __init__(self, options: DeploymentOptions, *, shows_logs: bool = True) -> None:
        self.options = options
        self.status = StatusLines(options.server)
        self._shows_logs = shows_logs
        environment, folder = settings.service_environment(secrets.token_hex(32)), ""
        if options.is_vllm:
            # It makes Unix sockets there, whose paths have at most 107 characters. Baton makes no files.
            place = tempfile.gettempdir()
            place = place if len(place) <= FOLDER_CHARS_MAX else "/tmp"
            folder = f"{place}/baton-up-{secrets.token_hex(4)}"
            environment |= settings.vllm_environment() | {"TMPDIR": folder}
        self._supervisor = Supervisor(environment, self._on_line, folder)

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
            server = words(**asdict(self.options.server))
            registry = self._supervisor.start(Service(REGISTRY, ("registry", *server), "registry at "))
            self._supervisor.wait_until(lambda: registry.is_listening)
            for instance in make_instances(self.options):
                self._supervisor.start(instance.service(registry.url, server))
            self._supervisor.start(router_service(self.options, registry.url))
            self._wait_ready(show)

    def restart_prefill(self, options: DeploymentOptions) -> None:
        """Restarts the first prefill instance with other options, and waits until all can serve again."""
        first, server = make_instances(options)[0], words(**asdict(options.server))
        with self._progress() as show:
            # Until it has polled again, the router reports the instance that has left.
            self._supervisor.services[ROUTER].is_ready = False
            self._supervisor.replace(first.service(self._supervisor.services[REGISTRY].url, server))
            self._wait_ready(show)

    def wait_failure(self) -> None:
        """Blocks until a service has failed for good, and raises its error."""
        self._supervisor.wait_until(lambda: False)

    def _start_order(self) -> list[list[str]]:
        instances = [name for _, name, _ in self.options.layouts]
        return [[], instances, [ROUTER]] if self.options.is_vllm else [[REGISTRY], instances, [ROUTER]]

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
            is_healthy, body = fetch_health(supervised.url, tls=self.options.server.tls())
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
        if self.options.is_vllm and name != ROUTER:
            # vLLM logs every request; what it ends with is worth reading, and what is said about it.
            is_shown = line.startswith((LAST_LINE, "ended", "was ended"))
        else:
            is_log_shown = self._shows_logs and was_ready and not self._supervisor.is_closing
            is_shown = is_log_shown or not is_log(line)
        if is_shown and is_json_log(line):
            print(with_service(line, name), file=sys.stderr, flush=True)
        elif is_shown:
            self.status.say(f"{name}: {line}", logging.WARNING, service=name)

    @contextmanager
    def _progress(self) -> Iterator[Callable[[SupervisedService], None]]:
        """A row per service on a terminal until all are ready; plain lines elsewhere."""
        layouts = {name: layout for _, name, layout in self.options.layouts}

        def title(supervised: SupervisedService) -> str:
            name = supervised.service.name
            return f"{name} ({layouts[name]})" if name in layouts else name

        if self.status.is_json or not self.status.console.is_terminal:
            yield lambda supervised: self.status.say(
                f"{title(supervised)}: {supervised.stage}",
                service=supervised.service.name,
                stage=supervised.stage,
            )
            return
        rows: dict[str, SupervisedService] = {}
        with Live(console=self.status.console, refresh_per_second=REFRESH_PER_S, transient=True) as live:

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
        answer = json.loads(body)
        message = str(answer["error"]["message"] if "error" in answer else answer["message"])
    except (ValueError, KeyError, TypeError):
        return "not ready"
    return message.removeprefix(f"{name} is not ready: ")
