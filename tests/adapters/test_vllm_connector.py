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


class ConnectorBase:
    """As vLLM's, as far as the connector reads it."""

    def __init__(self, vllm_config: Any, role: int, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._kv_transfer_config = vllm_config.kv_transfer_config


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, imported without vLLM."""
    parents = [BASE.rsplit(".", depth)[0] for depth in range(BASE.count(".") + 1)]
    for name in (*parents, "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("KVConnectorTransferResults", "SupportsHMA"):
        setattr(sys.modules[BASE], name, type(name, (), {}))
    monkeypatch.setattr(sys.modules[BASE], "KVConnectorBase_V1", ConnectorBase, raising=False)
    roles = SimpleNamespace(SCHEDULER=0, WORKER=1)
    monkeypatch.setattr(sys.modules[BASE], "KVConnectorRole", roles, raising=False)
    for name in ("get_pp_group", "get_tp_group"):
        setattr(sys.modules["vllm.distributed.parallel_state"], name, None)
    sys.modules.pop(CONNECTOR, None)
    yield importlib.import_module(CONNECTOR)
    sys.modules.pop(CONNECTOR, None)


def configuration(**parallel: Any) -> SimpleNamespace:
    """Of one rank, except for what is given."""
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    ubatching = {"use_ubatching": False, "enable_dbo": False, "ubatch_size": 0}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | ubatching | parallel),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        speculative_config=None,
    )


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


@pytest.mark.parametrize(("num_guesses", "num_hooks"), [(0, 1), (1, 1), (3, 0)])
def test_layers_leave_at_the_end_of_a_step_in_which_drafts_run_again(
    connector: Any, num_guesses: int, num_hooks: int
) -> None:
    config, hooks = configuration(), list[str]()
    if num_guesses:
        config.speculative_config = SimpleNamespace(num_speculative_tokens=num_guesses)
    worker = connector.BatonConnector(config, 1, SimpleNamespace(transfer_group_ids=(0,)))
    worker._worker = SimpleNamespace(layer_done=hooks.append)
    worker.save_kv_layer("model.layers.0.self_attn.attn", None, None)
    assert len(hooks) == num_hooks
