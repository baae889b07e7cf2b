"""What the connector's class refuses of vLLM's configuration; modules of its own stand for vLLM."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from baton.errors import ConfigError

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CONNECTOR = "baton.adapters.vllm.connector"


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, imported without vLLM."""
    parents = [BASE.rsplit(".", depth)[0] for depth in range(BASE.count(".") + 1)]
    for name in (*parents, "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("KVConnectorBase_V1", "KVConnectorRole", "KVConnectorTransferResults", "SupportsHMA"):
        setattr(sys.modules[BASE], name, type(name, (), {}))
    for name in ("get_pp_group", "get_tp_group"):
        setattr(sys.modules["vllm.distributed.parallel_state"], name, None)
    sys.modules.pop(CONNECTOR, None)
    yield importlib.import_module(CONNECTOR)
    sys.modules.pop(CONNECTOR, None)


def configuration(**parallel: Any) -> SimpleNamespace:
    """Of one rank, except for what is given."""
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    ubatching = {"use_ubatching": False, "enable_dbo": False, "ubatch_size": 0}
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes | ubatching | parallel))


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        ({"use_ubatching": True, "ubatch_size": 2}, "--ubatch-size 2"),
        ({"use_ubatching": True, "enable_dbo": True}, "--enable-dbo"),
        ({"decode_context_parallel_size": 2}, "decode context parallel of size 2"),
    ],
)
def test_parallelism_that_cannot_be_handed_over_is_refused(
    connector: Any, parallel: dict[str, Any], problem: str
) -> None:
    connector._check_supported(configuration())
    with pytest.raises(ConfigError, match=problem):
        connector._check_supported(configuration(**parallel))
