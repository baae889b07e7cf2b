"""Help and mistakes come before anything slow is imported, and before anything starts."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import get_args

import pytest

from baton.checkpoint.names import KV_DTYPES
from baton.cli import VERBS
from baton.cli.options import InstanceOptions, RouterPolicy
from baton.cli.parser import engine_fields
from baton.cli.route import route
from baton.engine.attention import pools
from baton.engine.config import EngineConfig
from baton.serving.policies import policy_names
from baton.serving.router import RouterConfig, RouterLimits

SLOW = ("aiohttp", "numpy", "prometheus_client", "rich", "torch", "transformers")
SLOW_FOR_HELP = {*SLOW, "msgspec", "pydantic"}
SCRIPT = """
import json, sys
from baton.cli import main
sys.argv = ["baton", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    print(json.dumps([ended.code, sorted(sys.modules)]), file=sys.stderr)
"""


def run(*words: str) -> tuple[int, set[str], str, str]:
    """The exit code, what was imported, stdout, and stderr."""
    environment = {**os.environ, "BATON_SECRET": "s" * 32}
    environment.pop("BATON_API_KEY", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    *lines, last = done.stderr.splitlines()
    code, modules = json.loads(last)
    return code, set(modules), done.stdout, "\n".join(lines)


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        *(f"{verb} --help" for verb in VERBS),
    ],
)
def test_help_imports_nothing_slow(words: str) -> None:
    code, modules, text, _ = run(*words.split())
    assert (code, modules & SLOW_FOR_HELP) == (0, set())
    assert text


def test_a_router_that_is_restarted_imports_neither_plans_nor_engine() -> None:
    """It is not there meanwhile: these would double the time."""
    script = "import json, sys, baton.serving.router; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stdout))
    slow = {"torch", "transformers", "rich", "baton.plan.binding", "baton.session.endpoint"}
    assert not modules & slow
    # The page draws the traces of instances, which need nothing else of the engine.
    traces = {f"baton.engine{part}" for part in ("", ".trace", ".commands", ".sampling_params")}
    assert {name for name in modules if name.startswith("baton.engine")} <= traces


GENERATE = "generate hi --model dummy:llama-3-8b"
SERVE, UP, ROUTE = (
    "serve --model dummy:llama-3-8b",
    "up --model dummy:llama-3-8b",
    "route --registry http://127.0.0.1:9",
)
FIRST_MISTAKES = {
    f"{SERVE} --layout tpp2": "tpp2",
    "serve --model no/model": "there is no model 'no/model' here",
    f"{SERVE} --dtype nonsense": "dtype 'nonsense'",
    "up --prefill tp1 --model llama-3-8b": "dummy:llama-3-8b",
    f"{UP} --prefill tp2,tpp2 --decode tp1": "tpp2",
    f"{UP} --prefill tp2 --dtype nonsense": "dtype 'nonsense'",
    "generate hi --model no/model": "there is no model 'no/model' here",
    "generate hi --model demo --decode tpp2": "tpp2",
    "bench serve --model no/model": "there is no model 'no/model' here",
    "bench overlap --model no/model": "there is no model 'no/model' here",
    "bench engine --model no/model": "there is no model 'no/model' here",
    "bench serve --decode tpp2": "tpp2",
    "demo --model no/model": "there is no model 'no/model' here",
    "demo --prefill tpp2": "tpp2",
    f"{UP} --prefill tp1 -tp 2": "up has no option -tp; give a layout for each side, like --prefill tp2",
    f"{GENERATE} -pp 2": "generate has no option -pp; give a layout for each side",
    f"{SERVE} --registry nowhere": "registry 'nowhere' is not an address; write http://host:port",
    "route --registry http://127.0.0.1:99999": "is not an address; write http://host:port",
}
"""Those that people make, found before anything slow is imported."""
BAD_TRANSPORTS = {
    "pigeon": "transport 'pigeon' is not known; use cuda_ipc, memory, mooncake, nixl, shm, tcp",
    "tcp:colour=red": "transport 'tcp' has no option 'colour'; it has host, port, num_streams",
    "tcp:num_streams=many": "num_streams is 'many'; give a whole number",
    "tcp:num_streams=0": "tcp num_streams 0: use 1 to",
    "shm:num_slots=-1": "shm num_slots -1: use 1 or more",
}
ON_TRANSPORTS = (SERVE, f"{UP} --prefill tp1 --decode tp2", "generate hi --model demo", "bench overlap")
MISTAKES = {
    f"{SERVE} --kv-layout nhd": "kv_layout 'nhd'",
    f"{SERVE} --overlap adaptive:x=1": "adaptive:x=1",
    f"{SERVE} --role reader": "reader",
    f"{SERVE} --host 0.0.0.0": "API key",
    **{
        f"{verb} {option}": said
        for verb, layout in ((SERVE, "--layout"), (f"{UP} --decode tp1", "--prefill"), (GENERATE, "--decode"))
        for option, said in (
            (f"{layout} tp12", "layout tp12: the model has 8 KV heads; use tp up to 8, or a multiple of 8"),
            (f"{layout} pp40", "layout pp40: 40 pipeline stages for 32 layers; use at most pp32"),
            (f"{layout} tp1 --max-model-len 9000", "is beyond max_position_embeddings; use at most 8192"),
            (f"{layout} tp1 --kv-cache-dtype fp7", "--kv-cache-dtype 'fp7' is not supported; use auto"),
        )
    },
    f"{UP} --prefill tp2 --decode tp1 --decode-args '--colour red'": "--colour",
    f"{UP} --prefill tp2 --decode tp1 --decode-args '--transport tcp:colour=red'": "'colour'",
    f"{ROUTE} --policy fastest": "round_robin",
    f"{ROUTE} --host 0.0.0.0": "API key",
}


@pytest.mark.parametrize("words", [*FIRST_MISTAKES, *MISTAKES])
def test_a_mistake_is_found_before_torch_is_imported(words: str) -> None:
    code, modules, out, err = run(*shlex.split(words))
    assert (code, out) == (2, "")
    assert (FIRST_MISTAKES | MISTAKES)[words] in err
    assert len(err.splitlines()) == 1
    slow = SLOW if words in FIRST_MISTAKES else ("torch", "aiohttp", "transformers")
    assert not modules & set(slow)


@pytest.mark.parametrize("transport", BAD_TRANSPORTS)
@pytest.mark.parametrize("verb", ON_TRANSPORTS)
def test_a_transport_that_cannot_be_is_found_before_torch_is_imported(verb: str, transport: str) -> None:
    code, modules, out, err = run(*verb.split(), "--transport", transport)
    assert (code, out) == (2, "")
    assert BAD_TRANSPORTS[transport] in err
    assert not modules & {"torch", "aiohttp", "transformers", "rich", "baton.engine.config"}


@pytest.mark.parametrize("words", [SERVE, f"{UP} --prefill tp1", ROUTE, "registry"])
def test_a_port_in_use_is_found_before_torch_is_imported(words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, modules, out, err = run(*words.split(), "--port", str(port))
    assert (code, out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert not modules & {"torch", "aiohttp", "transformers", "numpy"}


@pytest.mark.parametrize("verb", ON_TRANSPORTS[:3])
def test_a_host_of_another_machine_is_found_before_torch_is_imported(verb: str) -> None:
    code, modules, out, err = run(*verb.split(), "--transport", "tcp:host=198.51.100.1")
    assert (code, out) == (1, "")
    assert "cannot listen on 198.51.100.1" in err
    assert len(err.splitlines()) == 1
    assert not modules & {"torch", "aiohttp", "transformers", "baton.engine.config"}


@pytest.mark.long
def test_the_check_sees_what_is_imported() -> None:
    _, modules, _, _ = run("doctor")
    assert "numpy" in modules
    _, modules, _, _ = run(*SERVE.split(), "--name", "two words", "--registry", "http://127.0.0.1:9")
    assert {"torch", "aiohttp"} <= modules


def test_defaults_are_those_of_the_parts() -> None:
    limits, config = RouterLimits(), RouterConfig(None)
    defaults = {parameter.name: parameter.default for parameter in route.params}
    assert {
        "in_flight": limits.num_in_flight_max,
        "waiting": limits.num_waiting_max,
        "queue_timeout": limits.queue_s_max,
        "silence_s": limits.silence_s_max,
        "stall_s": limits.stall_s_max,
        "policy": config.decode_policy,
        "local": config.local.value,
    }.items() <= defaults.items()
    engine = asdict(EngineConfig(**engine_fields(InstanceOptions(model="demo"))))
    differ = {name for name, value in asdict(EngineConfig("demo")).items() if engine[name] != value}
    assert differ == {"device", "queue_max"}, "a server takes what GPUs there are, and refuses at some point"


def test_names_are_those_of_the_parts() -> None:
    assert get_args(RouterPolicy) == policy_names()
    assert tuple(pools.DTYPES) == KV_DTYPES
