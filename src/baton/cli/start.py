"""What `baton up` does once its options are read: it checks them, then serves until it is interrupted."""

from __future__ import annotations

import json
import shlex
import signal
from contextlib import suppress
from types import FrameType

from baton import settings
from baton.cli.deployment import (
    DeploymentProcesses,
    check_instances,
    fork_early,
    make_vllm_servers,
    plan_instances,
    plan_pairs,
)
from baton.cli.options import DeploymentOptions
from baton.cli.output import StatusLines
from baton.cli.vllm_servers import VllmServer

EXAMPLE = "Explain in one sentence what a relay race is."


def start(options: DeploymentOptions) -> None:
    """Serves until it is interrupted, which is the usual way to end it, also before it is up."""
    with suppress(KeyboardInterrupt):
        options.server.tls()  # raises where one of its files is not named
        keys = settings.api_keys(options.api_key_file)
        settings.check_binding(options.host, has_api_key=bool(keys), has_secret=True)
        servers = make_vllm_servers(options) if options.is_vllm else []
        lines = [f"{server.name} at {server.url}" for server in servers] or _plan(options)
        _serve(options, lines, servers)


def _plan(options: DeploymentOptions) -> list[str]:
    """Raises on what can be refused before a process starts; returns a line per planned pair."""
    check_instances(options)
    fork_early(options.instance.model)
    instances = plan_instances(options)
    pairs = plan_pairs(instances)
    status = StatusLines(options.server)  # after the fork: instances set up their own loggers
    for instance in instances:
        status.say(str(instance), service=instance.config.name)
    for pair in pairs:
        status.say(f"planned {pair}")
    return pairs or [f"{instance.title} prefills and decodes by itself" for instance in instances]


def _serve(options: DeploymentOptions, lines: list[str], servers: list[VllmServer]) -> None:
    with DeploymentProcesses(options) as deployment:
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
            deployment.status.say("finishing running requests; interrupt again to end at once")


def chat_command(url: str, options: DeploymentOptions) -> str:
    """A `baton chat` command for this deployment."""
    key_file = options.api_key_file
    words = [f"baton chat --url {url}"]
    words += [f"--api-key-file {shlex.quote(str(key_file))}"] if key_file else []
    words += [f"--tls-ca {shlex.quote(str(options.server.tls_ca))}"] if options.server.tls_ca else []
    return " ".join(words)


def curl_command(url: str, options: DeploymentOptions) -> str:
    """A curl command for this deployment."""
    body = {"model": options.model_name, "messages": [{"role": "user", "content": EXAMPLE}], "stream": True}
    ca = ["--cacert", shlex.quote(str(options.server.tls_ca))] if options.server.tls_ca else []
    words = ["curl", *ca, "-N", f"{url}/v1/chat/completions", "-H", "'Content-Type: application/json'"]
    if options.api_key_file is not None:
        words += ["-H", f'"Authorization: Bearer $(head -n 1 {shlex.quote(str(options.api_key_file))})"']
    return " ".join([*words, "-d", shlex.quote(json.dumps(body))])
