"""A KV connector for vLLM: prompts leave prefill layer by layer and are pushed into decode's blocks.

vLLM loads it by name, without a change to vLLM:

    --kv-transfer-config '{"kv_role": "kv_producer", "kv_connector": "BatonConnector",
                           "kv_connector_module_path": "baton.adapters.vllm"}'

`connector` has the class that vLLM calls and is the one module that imports vLLM. It passes calls on to
`scheduler` in the scheduler's process, which decides what is sent and loaded and has no endpoint, and to
`worker` in each worker process, which has one. `metadata` is what goes from the one to the other with each
step. `cache` turns vLLM's cache into a spec and pools.
"""

from __future__ import annotations

import importlib
from typing import Any

from baton.errors import ConfigError

VERSIONS = ("0.31", "0.32")
"""Releases of vLLM that the tests run."""


def __getattr__(name: str) -> Any:
    """The connector's class, imported when vLLM asks for it; the rest of the package works without vLLM."""
    if name != "BatonConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    return importlib.import_module(f"{__name__}.connector").BatonConnector


def check_version() -> None:
    """Raises ConfigError unless vLLM is there in a version that the connector knows."""
    try:
        version = str(importlib.import_module("vllm").__version__)
    except ImportError as cause:
        raise ConfigError(
            f"vLLM cannot be imported: {cause}; install vLLM {VERSIONS[-1]} beside Baton"
        ) from None
    if not any(version == known or version.startswith(f"{known}.") for known in VERSIONS):
        raise ConfigError(
            f"vLLM {version}: this Baton knows the connector API of vLLM {', '.join(VERSIONS)}; "
            f"install one of these"
        )
