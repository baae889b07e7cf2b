"""A transfer backend for SGLang: `--disaggregation-transfer-backend baton`, without a change to SGLang.

SGLang finds `register` as a plug-in (the entry point `baton` of `sglang.srt.plugins`) and calls it in each of
its processes, before it reads its command line. `backend` has the classes and hooks that SGLang calls and is
the one module that imports SGLang. `transfers` has the senders and receivers that its schedulers poll, and
the layer-wise offers. `cache` turns SGLang's KV pool into a spec and pools.
"""

from __future__ import annotations

import importlib

from baton.errors import ConfigError

VERSIONS = ("0.5.23",)
"""Releases of SGLang that the tests run."""


def register() -> None:
    """Adds the backend to SGLang."""
    importlib.import_module(f"{__name__}.backend").register()


def check_version(version: str) -> None:
    """Raises ConfigError unless it is a version of SGLang that the backend knows."""
    if version not in VERSIONS:
        raise ConfigError(
            f"SGLang {version}: this Baton knows the transfer backends of SGLang {', '.join(VERSIONS)}; "
            "install one of these"
        )
