"""Baton's connector beside vLLM's NixlConnector, in one run: time to first token and processor time.

    make bench-vllm

Servers of both connectors run at the same time, with the same model and layouts. Single requests take turns
in changing order, every prompt is new, and the answers have to be equal. Three ways:

    baton            both halves at once, as a router of Baton sends them
    baton, in turn   decode is asked when prefill has answered, as a proxy for NixlConnector does
    nixl             the same with NixlConnector (pull), UCX over TCP and shared memory

Time to first token runs from the first byte that the client sends to the first token of decode's stream.
Processor time is that of all processes of both servers, from the same start to the end of the answer. A ratio
is the median over the rounds of ours over NixlConnector's in the same round. Pairs with pipelines, which
NixlConnector does not run, are tried once, and what it says is recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table
from suite import RESULTS, load_averages
from tests.vllm.servers import VENV, Server, new_transfer, run, run_client, running

from baton.bench.record import write
from baton.supervisor import free_port

PAIRS = (("tp2", "tp1"), ("tp1", "tp2"))
PIPELINES = (("pp2", "tp1"), ("tp1", "pp2"))
LENGTHS = (128, 512, 1024, 1600)
LENGTH_OF_TARGET = 512
"""From here on ours is to be at least as good."""
NUM_TOKENS = 8
OURS, IN_TURN, THEIRS = "baton", "baton, in turn", "nixl"
NIXL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def baton_server(layout: str, model: Path, folder: Path) -> Server:
    # Longer than the default, for machines with more processes than cores; nothing else is changed.
    return Server(layout, model, folder, transfer={"kv_connector_extra_config": {"silence_s": 120.0}})


def nixl_server(layout: str, model: Path, folder: Path, venv: Path, role: str = "kv_both") -> Server:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": None,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {},
    }
    env = {
        "UCX_TLS": "tcp,self,sm",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return Server(layout, model, folder, transfer=transfer, venv=venv, env=env)


def processor_s(*servers: Server) -> float:
    """What all threads of these servers have run, in seconds."""
    total_ns = 0
    for server in servers:
        for process in server.processes():
            for stat in Path(f"/proc/{process}/task").glob("*/schedstat"):
                try:
                    total_ns += int(stat.read_text().split()[0])
                except OSError:  # the thread has ended
                    continue
    return total_ns / 1e9


@dataclass(frozen=True)
class Sample:
    """One request."""

    ttft_s: float
    processor_s: float
    tokens: list[int]


@dataclass
class Measured:
    """The samples of a pair and a length, by way; one of each per round."""

    samples: dict[str, list[Sample]] = field(default_factory=lambda: {OURS: [], IN_TURN: [], THEIRS: []})

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("ttft_s", "processor_s"):
            values = {way: [getattr(sample, name) for sample in some] for way, some in self.samples.items()}
            found[name] = {way: median(some) for way, some in values.items()}
            found[f"{name}_ratio"] = {
                way: median(one / other for one, other in zip(values[way], values[THEIRS], strict=True))
                for way in (OURS, IN_TURN)
            }
        return found


async def ask(
    session: aiohttp.ClientSession, way: str, prefill: Server, decode: Server, prompt: list[int]
) -> Sample:
    """One request, by one of the ways."""
    before, start = processor_s(prefill, decode), perf_counter()
    sent, wanted = (NIXL_PARAMS, {}) if way == THEIRS else new_transfer(prefill.source)
    prefilling = asyncio.ensure_future(prefill.ask(session, prompt, 1, sent))
    if way != OURS:
        status, answer = await prefilling
        assert status == 200, answer
        wanted = answer["kv_transfer_params"]
    async with decode.stream(session, prompt, NUM_TOKENS, wanted) as stream:
        tokens = await stream.tokens()
        ttft_s = perf_counter() - start
        while more := await stream.tokens():
            tokens += more
    status, answer = await prefilling
    assert status == 200, answer
    return Sample(ttft_s, processor_s(prefill, decode) - before, tokens)


async def measure_pair(
    session: aiohttp.ClientSession,
    servers: dict[str, tuple[Server, Server]],
    rounds: int,
    chance: random.Random,
) -> dict[int, Measured]:
    """All lengths; `servers` are prefill and decode by way."""
    found = {length: Measured() for length in LENGTHS}
    for number in range(-1, rounds):  # the first round is not counted: handshakes happen in it
        for length in LENGTHS:
            prompt = [chance.randrange(3, 1000) for _ in range(length)]
            ways = [OURS, IN_TURN, THEIRS]
            # Ours have one prefix cache, which must not have the prompt.
            prompts = {way: [3 + place, *prompt[1:]] for place, way in enumerate(ways)}
            chance.shuffle(ways)
            for way in ways:
                sample = await ask(session, way, *servers[way], prompts[way])
                right = await servers[way][1].ask(session, prompts[way], NUM_TOKENS, salt="alone")
                assert right == (200, sample.tokens), f"{way}, {length} tokens: {sample.tokens}, not {right}"
                if number >= 0:
                    found[length].samples[way].append(sample)
    return found


def try_pipeline(source: str, target: str, model: Path, folder: Path, venv: Path) -> str:
    """What NixlConnector makes of a pair: an empty text if it serves it right, else its message."""
    prefill = nixl_server(source, model, folder, venv, "kv_producer")
    decode = nixl_server(target, model, folder, venv, "kv_consumer")
    prompt = [5 + number % 900 for number in range(700)]

    async def ask_once(session: aiohttp.ClientSession) -> str:
        sample = await ask(session, THEIRS, prefill, decode, prompt)
        right = await decode.ask(session, prompt, NUM_TOKENS, salt="alone")
        return "" if right == (200, sample.tokens) else f"wrong tokens: {sample.tokens}, not {right}"

    try:
        with running(prefill, decode):
            return str(run_client(ask_once))
    except (AssertionError, TimeoutError, aiohttp.ClientError) as error:
        logs = prefill.log.read_text(errors="replace") + decode.log.read_text(errors="replace")
        said = re.findall(r"(?:NotImplementedError|AssertionError|ValueError|RuntimeError): .+", logs)
        return said[0] if said else f"{type(error).__name__}: {str(error)[:200]}"


def show(found: dict[str, dict[str, Any]], refused: dict[str, str]) -> None:
    table = Table("pair", "tokens", title="medians; ratios are ours over NixlConnector's, lower is better")
    for head in ("ttft ms: baton", "in turn", "nixl", "ratio", "in turn", "processor s: baton", "in turn"):
        table.add_column(head, justify="right")
    for head in ("nixl", "ratio", "in turn"):
        table.add_column(head, justify="right")
    for pair, lengths in found.items():
        for length, figures in lengths.items():
            cells = [f"{figures['ttft_s'][way] * 1e3:.0f}" for way in (OURS, IN_TURN, THEIRS)]
            cells += [f"{figures['ttft_s_ratio'][way]:.2f}" for way in (OURS, IN_TURN)]
            cells += [f"{figures['processor_s'][way]:.2f}" for way in (OURS, IN_TURN, THEIRS)]
            cells += [f"{figures['processor_s_ratio'][way]:.2f}" for way in (OURS, IN_TURN)]
            table.add_row(pair, str(length), *cells)
    Console(width=150).print(table)
    for pair, text in refused.items():
        print(f"{pair}: NixlConnector {'serves it' if not text else 'does not serve it: ' + text}")
    for name in ("ttft_s", "processor_s"):
        worst = max(
            figures[f"{name}_ratio"][OURS]
            for lengths in found.values()
            for length, figures in lengths.items()
            if int(length) >= LENGTH_OF_TARGET
        )
        verdict = "met" if worst <= 1 else "MISSED"
        print(f"{name}: at most {worst:.2f} of NixlConnector's from {LENGTH_OF_TARGET} tokens on ({verdict})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=VENV, help="where vLLM and nixl are installed")
    parser.add_argument("--repeat", type=int, default=9, metavar="N", help="rounds (default: 9)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    default = RESULTS / f"vllm-nixl-{datetime.now(UTC):%Y-%m-%d}.json"
    parser.add_argument("--json", type=Path, default=default, metavar="FILE", help="file for the results")
    given = parser.parse_args()
    before = load_averages()
    with tempfile.TemporaryDirectory() as name:
        folder, model = given.logs or Path(name), Path(name) / "llama"
        folder.mkdir(parents=True, exist_ok=True)
        assert run("models.py", "llama", str(model)).wait() == 0
        ours = {layout: baton_server(layout, model, folder) for layout in ("tp1", "tp2")}
        theirs = {layout: nixl_server(layout, model, folder, given.venv) for layout in ("tp1", "tp2")}
        chance = random.Random(given.seed)
        found = {}
        with running(*ours.values(), *theirs.values()):
            for source, target in PAIRS:
                servers = dict.fromkeys((OURS, IN_TURN), (ours[source], ours[target]))
                servers[THEIRS] = theirs[source], theirs[target]
                measured = run_client(
                    lambda session, s=servers: measure_pair(session, s, given.repeat, chance)
                )
                found[f"{source} to {target}"] = {
                    str(length): each.figures() for length, each in measured.items()
                }
        refused = {
            f"{source} to {target}": try_pipeline(source, target, model, folder, given.venv)
            for source, target in PIPELINES
        }
    show(found, refused)
    loads = {"before": before, "after": load_averages()}
    write(given.json, {"rounds": given.repeat, "loadavg": loads, "figures": found, "pipelines": refused})


if __name__ == "__main__":
    main()
