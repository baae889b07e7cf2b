"""A KV connector for vLLM: prompts leave prefill layer by layer and are pushed into decode's blocks.

vLLM loads it by name, without a change to vLLM:

    --kv-transfer-config '{"kv_role": "kv_producer", "kv_connector": "BatonConnector",
                           "kv_connector_module_path": "baton.adapters.vllm"}'

`connector` has the class that vLLM calls and is the one module that imports vLLM. It passes calls on to
`scheduler` in the scheduler's process, which decides what is sent and loaded and has no endpoint, and to
`worker` in each worker process, which has one. `metadata` is what goes from the one to the other with each
step. `cache` turns vLLM's cache into a spec and pools, `config` reads the options.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The connector's class, imported when vLLM asks for it; the rest of the package works without vLLM."""
    if name != "BatonConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.config").check_version()
    return importlib.import_module(f"{__name__}.connector").BatonConnector
