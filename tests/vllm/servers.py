"""vLLM servers as real processes, and clients that send both halves of a request."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from tests.ports import free_port
from tests.serve.parts import until

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-vllm"
START_S_MAX = 900.0
"""For several servers that start at once on two cores."""
END_S_MAX = 60.0
DEADLINES = {"offer_s": 90.0, "progress_s": 90.0, "silence_s": 60.0}
"""Long for a machine that runs several servers, short for a test that waits for one to pass."""
ANSWER_S_MAX = 300.0
CLIENT_S_MAX = 900.0
"""For all that one client asks, so that nothing hangs."""
FREE_S_MAX = 240.0
"""For blocks that a deadline frees, on a busy machine."""
FIRST_S = 0.3
"""How much earlier one half is sent than the other, where one comes first."""
NAME = "tiny"
LAYOUTS = {
    "tp1": (),
    "tp2": ("--tensor-parallel-size", "2"),
    "pp2": (
        *("--pipeline-parallel-size", "2", "--worker-cls"),
        "tests.vllm.pipeline_worker.PipelineWorker",
    ),
    "dp2": ("--data-parallel-size", "2", "--api-server-count", "1"),
}


def environment() -> dict[str, str]:
    return os.environ | {
        "BATON_SECRET": "a secret of the tests with vLLM",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def run(script: str, *args: str) -> subprocess.Popen[bytes]:
    """A script of this folder, with the Python that has vLLM."""
    command = [str(VENV / "bin/python"), str(ROOT / "tests/vllm" / script), *args]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)


NUM_GROUPS_MAX = 2
"""Data-parallel groups of a server: each has the port after the one before."""


@dataclass
class Server:
    """One vLLM server with Baton's connector, that prefills and decodes."""

    layout: str
    model: Path
    folder: Path
    cache_bytes: int = 192 << 20
    args: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)
    venv: Path = VENV
    env: dict[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    kv_port: int = field(default_factory=partial(free_port, NUM_GROUPS_MAX))
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.layout}.{self.port}.log"

    @property
    def source(self) -> str:
        """Where decode reaches it."""
        return f"{self.address}:{self.kv_port}"

    @property
    def trace(self) -> Path:
        return self.folder / f"trace.{self.port}"

    def start(self) -> None:
        self.trace.mkdir(exist_ok=True)
        transfer = {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.adapters.vllm",
            "kv_role": "kv_both",
            "kv_port": self.kv_port,
            "engine_id": f"{self.layout}-{self.port}",
            "kv_connector_extra_config": {
                "host": self.address,
                "trace": str(self.trace),
                **DEADLINES,
                **self.options,
            },
        } | self.transfer
        command = [
            *(str(self.venv / "bin/vllm"), "serve", str(self.model), "--served-model-name", NAME),
            *("--host", self.address, "--port", str(self.port), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "2048", "--max-num-seqs", "32"),
            *("--kv-cache-memory-bytes", str(self.cache_bytes)),
            *("--kv-transfer-config", json.dumps(transfer), *LAYOUTS[self.layout], *self.args),
        ]
        with self.log.open("ab") as log:
            self.process = self.spawn(command, stdout=log, stderr=log)

    def spawn(self, command: Sequence[str], **output: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment() | self.env, start_new_session=True, **output)

    def wait_ready(self) -> None:
        """Waits until it answers; its first step takes long, so that one is made here."""

        def is_up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.layout} ended:\n{self.tail()}"
            return bool(run_client(self._is_healthy))

        until(is_up, lambda: f"{self.layout} answers; its log ends:\n{self.tail()}", START_S_MAX, 1.0)
        status, answer = run_client(lambda session: self.ask(session, [5, 6, 7], 2))
        assert status == 200, answer

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def kill(self) -> None:
        """As a crash: all its processes at once."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """The ids of all its processes."""
        assert self.process is not None
        known = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
        return [process for process in known if _group(process) == self.process.pid]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Its engine and workers stand still; its API server goes on."""
        assert self.process is not None
        engine = [process for process in self.processes() if process != self.process.pid]
        assert engine, f"{self.layout} has no engine process"
        try:
            for process in engine:
                os.kill(process, signal.SIGSTOP)
            yield
        finally:
            for process in engine:
                os.kill(process, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()

    async def ask(
        self,
        session: aiohttp.ClientSession,
        prompt: list[int],
        num_tokens: int,
        params: dict[str, Any] | None = None,
        salt: str = "",
        **headers: str,
    ) -> tuple[int, Any]:
        """The status, and the answer's tokens or the error."""
        status, answer = await self.post(session, body(prompt, num_tokens, params, salt), headers)
        if status != 200 or (params and params.get("do_remote_decode")):
            return status, answer
        return 200, answer["choices"][0]["token_ids"]

    async def metric(self, session: aiohttp.ClientSession, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        _, text = await self.get(session, "/metrics")
        marks = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in samples if all(mark in line for mark in marks))

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            return (await self.get(session, "/health"))[0] == 200
        except OSError:
            return False

    async def post(
        self, session: aiohttp.ClientSession, asked: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, Any]:
        """A completion: the status and the JSON of the response."""
        async with session.post(f"{self.url}/v1/completions", json=asked, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
        async with session.get(f"{self.url}{path}") as response:
            return response.status, await response.text()

    @asynccontextmanager
    async def stream(
        self,
        session: aiohttp.ClientSession,
        prompt: list[int],
        num_tokens: int,
        params: dict[str, Any] | None = None,
        salt: str = "",
    ) -> AsyncIterator[Stream]:
        """A streaming client, that closes its connection at the end of the block."""
        asked = body(prompt, num_tokens, params, salt) | {"stream": True}
        async with session.post(f"{self.url}/v1/completions", json=asked) as response:
            stream = Stream(response)
            try:
                yield stream
            finally:
                stream.close()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def traces(self) -> list[dict[str, Any]]:
        """What its workers wrote of the prompts that they sent."""
        files = sorted(self.trace.iterdir())
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def _group(process: int) -> int:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return 0


@dataclass
class Stream:
    """What a streaming client reads."""

    response: aiohttp.ClientResponse

    def close(self) -> None:
        """The client leaves."""
        self.response.close()

    async def tokens(self) -> list[int]:
        """Those of the next event; empty at the end."""
        async for line in self.response.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return []
            if data:
                event = json.loads(data)
                assert "error" not in event, event
                return list(event["choices"][0]["token_ids"])
        return []


def body(prompt: list[int], num_tokens: int, params: dict[str, Any] | None, salt: str) -> dict[str, Any]:
    """A completion that is asked for."""
    asked = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return asked | ({"kv_transfer_params": params} if params else {}) | ({"cache_salt": salt} if salt else {})


@contextmanager
def running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Servers that start at the same time; they are warm when the block begins and stop at its end."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def run_client(call: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    """What a client with connections of its own returns."""

    async def main() -> Any:
        async with client() as session:
            return await asyncio.wait_for(call(session), CLIENT_S_MAX)

    return asyncio.run(main())


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(ANSWER_S_MAX), connector=aiohttp.TCPConnector(limit=0, force_close=True)
    )


def new_transfer(source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of both halves."""
    name = uuid.uuid4().hex
    return (
        {"do_remote_decode": True, "transfer_id": name},
        {"do_remote_prefill": True, "transfer_id": name, "source": source},
    )


async def hand_off(
    session: aiohttp.ClientSession,
    prefill: Server,
    decode: Server,
    prompt: list[int],
    num_tokens: int,
    *,
    salt: str = "",
    first: str = "",
) -> tuple[int, Any]:
    """Decode's answer; `first` is the half that is sent earlier, if one is."""

    async def later(half: Coroutine[Any, Any, Any]) -> Any:
        await asyncio.sleep(FIRST_S)
        return await half

    sent, wanted = new_transfer(prefill.source)
    halves = {
        "prefill": prefill.ask(session, prompt, 1, sent, salt),
        "decode": decode.ask(session, prompt, num_tokens, wanted, salt),
    }
    calls = [later(half) if first and name != first else half for name, half in halves.items()]
    prefilled, decoded = await asyncio.gather(*calls)
    assert prefilled[0] == 200, prefilled
    return decoded


def random_prompts(count: int, length: int) -> list[list[int]]:
    chance = random.Random(count * length)
    return [[chance.randrange(3, 1000) for _ in range(length)] for _ in range(count)]


async def until_blocks(session: aiohttp.ClientSession, server: Server) -> None:
    """A request has blocks, so that it is past the queue."""
    async with asyncio.timeout(FREE_S_MAX):
        while not await server.metric(session, "kv_cache_usage_perc"):
            await asyncio.sleep(0.05)


async def pass_on(session: aiohttp.ClientSession, server: Server) -> None:
    """The API server has passed on what came before: its event loop has gone round."""
    for _ in range(5):
        status, _ = await server.get(session, "/v1/models")
        assert status == 200


async def check_free(session: aiohttp.ClientSession, *servers: Server) -> None:
    """Every block comes back, and nothing runs or waits."""
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    limit_s = asyncio.get_running_loop().time() + FREE_S_MAX
    while True:
        used = {
            (server.layout, name): value
            for server in servers
            for name in names
            if (value := await server.metric(session, name))
        }
        if not used:
            return
        assert asyncio.get_running_loop().time() < limit_s, f"in use although nothing runs: {used}"
        await asyncio.sleep(0.2)


async def check_right(
    session: aiohttp.ClientSession, prefill: Server, decode: Server, num_tokens: int = 8
) -> None:
    """A new hand-over between the two gives what decode answers by itself."""
    (prompt,) = random_prompts(1, 300)
    right = await decode.ask(session, prompt, num_tokens, salt="alone")
    got = await hand_off(session, prefill, decode, prompt, num_tokens, salt=uuid.uuid4().hex)
    assert got == right
    assert right[0] == 200
