"""SGLang servers as real processes, and clients that send both halves of a request as a router does."""

from __future__ import annotations

import asyncio
import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from tests.ports import free_port
from tests.serve.parts import until
from tests.vllm.servers import START_S_MAX, Server, run_client

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv-sglang"
DEADLINES = {"offer_s": 45.0, "progress_s": 45.0, "silence_s": 30.0}
CHUNK = 256
"""Tokens that a forward prefills at most; most prompts take several."""
FREE_S_MAX = 90.0
LAYOUTS = {
    "tp1": (),
    "tp2": ("--tp-size", "2"),
    "pp2": ("--pp-size", "2"),
    # Without --enable-prefill-cp, which attention on CPUs has no part in: each rank computes all tokens.
    "cp2": ("--tp-size", "2", "--attn-cp-size", "2"),
    "dp2": ("--dp-size", "2"),
}


def environment() -> dict[str, str]:
    return os.environ | {
        "BATON_SECRET": "a secret of the tests with SGLang",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }


@dataclass
class SglangServer(Server):
    """A server that prefills, decodes, or does both without a hand-over (mode null)."""

    mode: str = "null"
    module: str = "sglang.launch_server"
    venv: Path = VENV
    bootstrap_port: int = field(default_factory=free_port)

    def start(self) -> None:
        self.trace.mkdir(exist_ok=True)
        command = [
            *(str(self.venv / "bin/python"), "-m", self.module, "--model-path", str(self.model)),
            *("--host", self.address, "--port", str(self.port), "--device", "cpu", "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--disable-cuda-graph", "--disable-overlap-schedule"),
            *("--max-total-tokens", "16000", "--max-running-requests", "24", "--sleep-on-idle"),
            *("--chunked-prefill-size", str(CHUNK), "--watchdog-timeout", "900", "--enable-metrics"),
            *LAYOUTS[self.layout],
        ]
        if self.mode != "null":
            command += ["--disaggregation-mode", self.mode, "--disaggregation-transfer-backend", "baton"]
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if self.mode == "decode":
            # SGLang's default for retracted requests is memory that CUDA pins.
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        options = {"trace": str(self.trace), "port": self.kv_port, **DEADLINES, **self.options}
        cores = "|".join(["0"] * int(self.layout[-1]))
        self.env = environment() | {
            "BATON_SGLANG": json.dumps(options),
            "SGLANG_CPU_OMP_THREADS_BIND": cores,
        }
        with self.log.open("ab") as log:
            self.process = self.spawn([*command, *self.args], stdout=log, stderr=log)

    def wait_ready(self) -> None:
        """Waits until it answers; SGLang warms up by itself."""

        def is_up() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.mode} {self.layout} ended:\n{self.tail()}"
            return bool(run_client(self._is_healthy))

        until(
            is_up,
            lambda: f"{self.mode} {self.layout} answers; its log ends:\n{self.tail()}",
            START_S_MAX,
            1.0,
        )

    def bootstrap(self, room: int) -> dict[str, Any]:
        """What a router adds to a request for this prefill server."""
        return {
            "bootstrap_host": self.address,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": room,
        }

    async def generate(
        self,
        session: aiohttp.ClientSession,
        prompt: list[int],
        num_tokens: int,
        bootstrap: dict[str, Any] | None = None,
    ) -> tuple[int, Any]:
        return await generate(session, self.url, prompt, num_tokens, bootstrap)

    async def num_tokens_used(self, session: aiohttp.ClientSession) -> float:
        """Slots of the pool that requests hold."""
        _, text = await self.get(session, "/metrics")
        names = ("sglang:num_used_tokens{", "sglang:num_running_reqs{", "sglang:num_queue_reqs{")
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names))


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    num_tokens: int,
    bootstrap: dict[str, Any] | None = None,
) -> tuple[int, Any]:
    """What a server answers: the status, and tokens with their log-probabilities, or the error."""
    asked = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        **(bootstrap or {}),
    }
    async with session.post(f"{url}/generate", json=asked) as response:
        status, answer = response.status, await response.json()
    return status, answer if status != 200 else read_answer(answer)


def read_answer(answer: dict[str, Any]) -> list[tuple[int, float]]:
    """Tokens and log-probabilities; a short answer is one that failed after it began."""
    meta = answer["meta_info"]
    return [(token, round(value, 3)) for value, token, _ in meta["output_token_logprobs"]]


async def hand_off(
    session: aiohttp.ClientSession,
    prefill: SglangServer,
    decode: SglangServer,
    prompt: list[int],
    num_tokens: int,
) -> tuple[int, Any]:
    """Decode's answer; both halves are sent at once, as sglang-router and the mini load balancer do."""
    bootstrap = prefill.bootstrap(random.getrandbits(62))
    _, decoded = await asyncio.gather(
        prefill.generate(session, prompt, num_tokens, bootstrap),
        decode.generate(session, prompt, num_tokens, bootstrap),
    )
    return decoded


async def check_free(session: aiohttp.ClientSession, *servers: SglangServer) -> None:
    """Every page comes back, and nothing runs or waits."""
    limit_s = asyncio.get_running_loop().time() + FREE_S_MAX
    for server in servers:
        while used := await server.num_tokens_used(session):
            assert asyncio.get_running_loop().time() < limit_s, (
                f"{server.mode} {server.layout}: {used} in use"
            )
            await asyncio.sleep(0.5)
