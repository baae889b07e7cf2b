"""How an instance ends, without workers."""

from __future__ import annotations

import pytest
from tests.engine.tiny import tiny

from baton.engine.config import EngineConfig
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
