"""What `baton up` does once its options are read: it checks them, then serves until it is interrupted."""

from __future__ import annotations

import json
import shlex
import signal
from contextlib import suppress
from types import FrameType

from rich.console import Console
from rich.text import Text

from baton import settings
from baton.cli.deployment import Deployment, DeploymentOptions, pair_line, plan_instances, plan_pairs
from baton.cli.vllm_servers import VllmServer, plan_servers
from baton.errors import ConfigError

BATON_ONLY = (
    *("link", "first_token", "dtype", "device", "page_tokens", "pool_tokens", "chunk_tokens"),
    "gpu_memory_utilization",
    *("max_model_len", "max_num_seqs", "queue", "transfer_timeout", "served_model_name", "local_prefill_max"),
    *("no_prefix_caching", "draft", "generation_config"),
)
"""Options that vLLM has by other names, or not at all."""
EXAMPLE = "Explain in one sentence what a relay race is."


def start(options: DeploymentOptions) -> None:
    """With Baton's own engine."""
    with suppress(KeyboardInterrupt):  # the usual way to end it, also before it is up
        _serve(options, _check(options), [])


def start_vllm(options: DeploymentOptions) -> None:
    """With vLLM servers."""
    with suppress(KeyboardInterrupt):
        servers = check_vllm(options)
        _serve(options, [f"{server.name} at {server.url}" for server in servers], servers)


def check_vllm(options: DeploymentOptions) -> list[VllmServer]:
    """Raises on what can be refused before a process starts; returns the servers."""
    if not options.decodes:
        raise ConfigError("--engine vllm needs --decode: without it there is nothing to hand over")
    for name in BATON_ONLY:
        if getattr(options, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for Baton's own engine; give vLLM's own options after --")
    if options.tls is not None:
        raise ConfigError(
            "--tls-cert: the servers of `baton up --engine vllm` speak plain HTTP on loopback; for TLS start "
            "`vllm serve` and `baton route` yourself"
        )
    _check_router(options)
    return plan_servers(options.instances, settings.gpus())


def _check(options: DeploymentOptions) -> list[str]:
    """Raises on what can be refused before a process starts; returns a line per planned pair."""
    _check_router(options)
    instances = plan_instances(options)
    pairs = [pair_line(*pair) for pair in plan_pairs(options, instances)]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in (*map(str, instances), *(f"planned {pair}" for pair in pairs)):
        console.print(Text(line, style="dim"))
    return pairs or [f"{each.name} ({each.spec.layout}) prefills and decodes by itself" for each in instances]


def _check_router(options: DeploymentOptions) -> None:
    keys = settings.api_keys(None if options.api_key_file is None else str(options.api_key_file))
    settings.check_binding(options.host, has_api_key=bool(keys), has_secret=True)


def _serve(options: DeploymentOptions, lines: list[str], servers: list[VllmServer]) -> None:
    with Deployment(options) as deployment:
        is_interrupted = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            """The first signal ends the deployment in order, the second at once."""
            nonlocal is_interrupted
            if is_interrupted:
                deployment.hurry()
                return
            is_interrupted = True
            raise KeyboardInterrupt

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        try:
            deployment.start(servers)
            print(f"serving {options.model_name} at {deployment.url}")
            for line in lines:
                print(f"  {line}")
            print(f"ask it with: {chat_command(deployment.url, options)}")
            print(f"or with:     {curl_command(deployment.url, options)}", flush=True)
            deployment.wait_failure()
        finally:
            is_interrupted = True
            text = "finishing running requests; interrupt again to end at once"
            deployment.console.print(Text(text, style="dim"))


def chat_command(url: str, options: DeploymentOptions) -> str:
    """A `baton chat` command for this deployment."""
    key_file = options.api_key_file
    words = [f"baton chat --url {url}"]
    words += [f"--api-key-file {shlex.quote(str(key_file))}"] if key_file else []
    words += [f"--tls-ca {shlex.quote(options.tls.authority)}"] if options.tls else []
    return " ".join(words)


def curl_command(url: str, options: DeploymentOptions) -> str:
    """A curl command for this deployment."""
    body = {"model": options.model_name, "messages": [{"role": "user", "content": EXAMPLE}], "stream": True}
    ca = ["--cacert", shlex.quote(options.tls.authority)] if options.tls else []
    words = ["curl", *ca, "-N", f"{url}/v1/chat/completions", "-H", "'Content-Type: application/json'"]
    if options.api_key_file is not None:
        words += ["-H", f'"Authorization: Bearer $(head -n 1 {shlex.quote(str(options.api_key_file))})"']
    return " ".join([*words, "-d", shlex.quote(json.dumps(body))])
