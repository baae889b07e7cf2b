"""How an instance ends, without workers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.engine.tiny import tiny

from baton.engine import sizes
from baton.engine.config import EngineConfig
from baton.engine.gpu_memory import GpuMemory
from baton.engine.instance import Instance
from baton.engine.requests import EngineRequest, RequestError, RequestEvent
from baton.errors import EngineError


def test_requests_fail_before_the_callbacks_and_no_more_come_in() -> None:
    instance = Instance(EngineConfig(str(tiny("llama"))))
    instance.core.set_running()
    events: list[RequestEvent | str] = []
    instance.on_end(lambda: events.append("first"))
    instance.core.submit(EngineRequest((1, 2, 3)), events.append)
    instance._calls.run()
    instance.core.submit(EngineRequest((1, 2, 3)), events.append)
    instance._end("rank 0 ended")
    assert [event.text for event in events[:2] if isinstance(event, RequestError)] == ["rank 0 ended"] * 2
    assert events[2:] == ["first"]
    with pytest.raises(EngineError, match="is not running: rank 0 ended"):
        instance.core.submit(EngineRequest((1, 2, 3)), events.append)
    instance.on_end(lambda: events.append("late"))
    assert events[2:] == ["first", "late"]
    instance.close()


def test_sampling_defaults_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": 3}')
    for choice, temperature in (("auto", 0.25), ("none", 1.0)):
        instance = Instance(EngineConfig(str(folder), generation_config=choice))
        assert instance.sampling_defaults.temperature == temperature
        assert 3 in instance.eos_ids
        instance.close()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_an_automatic_device_is_the_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(sizes, "read_gpus", lambda: [GpuMemory("0", 24 << 30, 24 << 30)])
    instance = Instance(EngineConfig(str(tiny("llama")), device="auto"))
    assert (instance.config.device, instance.config.is_offloaded) == (("cpu", "cuda")[has_gpu], has_gpu)
    instance.close()
