"""What is kept of requests: stages in seconds, timelines, metrics; and events that cross from a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import pytest
from tests.serving.parsed import asked

from baton.engine.commands import CopyRecord, LayerGroupTiming
from baton.engine.requests import EngineRequest, InboundHandoff, OutboundHandoff, OutputChunk, RequestFinished
from baton.engine.trace import RequestTrace
from baton.serving.metrics import ServerMetrics
from baton.serving.observing import NUM_TIMELINES_MAX, RecordedRequest, RequestObserver, Side
from baton.serving.openai import ParsedRequest
from baton.serving.openapi import description
from baton.serving.server import EventBridge


def story() -> RequestTrace:
    """Two copies side by side on one rank, one second of them behind the end of compute."""
    return RequestTrace(
        arrived_s=10.0,
        begun_s=11.0,
        prompt_s=14.0,
        token_s=14.5,
        settled_s=15.5,
        stepped_s=16.0,
        ended_s=20.0,
        groups={0: [LayerGroupTiming((0, 2), 11.0, 12.5), LayerGroupTiming((2, 4), 12.5, 14.0)]},
        copies={0: [CopyRecord(0, 0, 100, 12.5, 13.5), CopyRecord(1, 1, 50, 13.0, 15.0)]},
        unpipelined=["cost: 3 groups", "cost: 3 groups"],
    )


def test_each_side_tells_what_it_knows():
    source = Side.of(EngineRequest((1,), handoff=OutboundHandoff("7"))).figures(story())
    assert source == pytest.approx(
        {
            **{"queue_s": 1.0, "compute_s": 3.0, "exposed_s": 1.0, "admission_s": 0.5, "ttft_s": 4.5},
            **{"total_s": 10.0, "efficiency": 1 - 1.0 / 2.5},
        }
    )
    target = Side.of(EngineRequest((1,), handoff=InboundHandoff("7", "x:1"))).figures(story())
    assert (target["tth_s"], target["first_step_s"]) == (5.5, 0.5)
    assert "exposed_s" not in target
    assert "tth_s" not in Side.of(EngineRequest((1,))).figures(story())
    assert Side.SOURCE.figures(RequestTrace(5.0)) == {}


def test_a_timeline_has_stages_groups_and_copies():
    intervals = Side.SOURCE.timeline("x", story()).intervals
    found = {(each.track.name, each.name): (each.start_s, each.stop_s) for each in intervals}
    assert found["exposed transfer", "exposed transfer"] == (4.0, 5.0)
    assert found["compute", "layers 2-4"] == (2.5, 4.0)
    assert found["copy to 1", "0 to 1"] == (3.0, 5.0)


def test_metrics_of_a_handoff():
    metrics = ServerMetrics("some/model")
    metrics.add_handoff(story(), Side.SOURCE.figures(story()))
    metrics.add_copies(story())
    text = metrics.text().decode()
    assert 'baton_route_bytes_total{model_name="some/model",source_rank="0",target_rank="1"} 50.0' in text
    assert 'baton_unpipelined_total{model_name="some/model",reason="cost: N groups"} 1.0' in text
    assert 'baton_handoff_seconds_sum{model_name="some/model",stage="exposed"} 1.0' in text
    assert 'baton_exposed_seconds_total{model_name="some/model"} 1.0' in text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.count('model_name="some/model"') == 1 for line in samples), "also when read again"
    assert metrics.text() == text.encode()


def handed(transfer: str, source: str | None) -> ParsedRequest:
    parsed = asked({"prompt": "a", "baton": {"id": "cmpl-1"}})
    handoff = OutboundHandoff(transfer) if source is None else InboundHandoff(transfer, source)
    (job,) = parsed.jobs
    return replace(parsed, jobs=(replace(job, request=replace(job.request, handoff=handoff)),))


def test_a_handoff_is_a_line_on_each_side(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="baton.serving.handoff"):
        RequestObserver("p", "prefill", "pp2", "m").traced(RecordedRequest(handed("7", None)), 0, story())
        target = RequestObserver("d", "decode", "tp3", "m")
        target.traced(RecordedRequest(handed("7", "p:1")), 0, story())
        target.failed(RecordedRequest(handed("8", "p:1")), 0, "DEADLINE", "no progress for 30 s")
        target.traced(RecordedRequest(asked({"prompt": "a"})), 0, story())  # nothing was handed over
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "INFO",
            "hand-over 7 done: request cmpl-1, layout pp2, side source, bytes 150 B, groups 2, exposed 1 s, "
            "efficiency 0.6, not_pipelined cost: 3 groups",
        ),
        (
            "INFO",
            "hand-over 7 done: request cmpl-1, layout tp3, side target, source p:1, tth 5.5 s, held_tokens 0",
        ),
        (
            "WARNING",
            "hand-over 8 failed: request cmpl-1, layout tp3, side target, source p:1, "
            "cause DEADLINE: no progress for 30 s",
        ),
    ]
    assert caplog.records[0].fields["bytes"] == 150
    assert caplog.records[0].fields["exposed_s"] == pytest.approx(1.0)


def test_a_handoff_that_failed_is_not_done_when_its_pages_are_free(caplog: pytest.LogCaptureFixture):
    observer = RequestObserver("d", "decode", "tp3", "m")
    recorded = RecordedRequest(handed("8", "p:1"))
    with caplog.at_level(logging.INFO, logger="baton.serving.handoff"):
        observer.started(recorded)
        observer.failed(recorded, 0, "DEADLINE", "no progress for 30 s", replace(story(), settled_s=0.0))
        observer.traced(recorded, 0, replace(story(), failure="no progress"))
    assert [record.fields["state"] for record in caplog.records] == ["failed"]
    assert 'baton_tth_seconds_count{model_name="m"} 0.0' in observer.metrics.text().decode()


def test_a_request_that_fails_after_its_handoff_leaves_the_handoff_done(caplog: pytest.LogCaptureFixture):
    """Prefill has logged it as done; decode lost a rank while it decoded."""
    observer = RequestObserver("d", "decode", "tp3", "m")
    recorded = RecordedRequest(handed("8", "p:1"))
    with caplog.at_level(logging.INFO, logger="baton.serving.handoff"):
        observer.failed(recorded, 0, "PEER_LOST", "rank 1 ended", story())
        observer.traced(recorded, 0, story())
    assert [record.fields["state"] for record in caplog.records] == ["done"]
    text = observer.metrics.text().decode()
    assert 'baton_tth_seconds_count{model_name="m"} 1.0' in text
    assert 'baton_failures_total{cause="PEER_LOST",model_name="m"} 1.0' in text


@pytest.mark.parametrize("source", [None, "p:1"])
@pytest.mark.parametrize(
    ("settled_s", "failure"), [(15.5, "aborted by the source: the client left"), (0.0, "")]
)
def test_an_aborted_handoff_is_not_done(
    caplog: pytest.LogCaptureFixture, settled_s: float, failure: str, source: str | None
):
    """The client left: nothing failed, but no cache was handed over."""
    observer = RequestObserver("d", "decode", "tp3", "m")
    trace = replace(story(), settled_s=settled_s, failure=failure)
    with caplog.at_level(logging.INFO, logger="baton.serving.handoff"):
        observer.traced(RecordedRequest(handed("8", source)), 0, trace)
    (record,) = caplog.records
    assert (record.levelname, record.fields["state"]) == ("INFO", "aborted")
    assert record.fields["cause"] == (failure or "the request ended before its hand-over began")
    assert not {"tth_s", "exposed_s", "efficiency"} & record.fields.keys()
    text = observer.metrics.text().decode()
    assert 'baton_tth_seconds_count{model_name="m"} 0.0' in text
    assert 'baton_exposed_seconds_total{model_name="m"} 0.0' in text
    assert "baton_unpipelined_total{" not in text
    assert 'baton_route_bytes_total{model_name="m",source_rank="0",target_rank="1"} 50.0' in text


def test_only_the_latest_timelines_are_kept():
    observer = RequestObserver("here", "both", "tp1", "m")
    requests = [
        RecordedRequest(asked({"prompt": "a", "baton": {"id": f"cmpl-{number}"}}))
        for number in range(NUM_TIMELINES_MAX + 3)
    ]
    for recorded in requests:
        observer.started(recorded)
        observer.traced(recorded, 0, story())
    assert observer.timeline("cmpl-2") is None
    assert observer.timeline("cmpl-3")["jobs"][0]["trace"]["arrived_s"] == 10.0
    assert len(observer.timelines()["data"]) == NUM_TIMELINES_MAX
    # The rest of a former attempt under the same id does not spoil the story of the latest.
    observer.started(RecordedRequest(asked({"prompt": "a", "baton": {"id": "cmpl-9"}})))
    observer.failed(requests[9], 0, "PEER_LOST", "it left")
    assert observer.timeline("cmpl-9")["failure"] is None


def test_events_cross_in_order_and_none_is_left_behind():
    num_events, num_sinks = 5000, 4

    async def play() -> list[list[int]]:
        heard: list[list[int]] = [[] for _ in range(num_sinks)]
        done = asyncio.Event()
        bridge = EventBridge(asyncio.get_running_loop())

        def receive(place: int, event: object) -> None:
            if isinstance(event, OutputChunk):
                heard[place].append(event.index)
            if all(len(each) == num_events for each in heard):
                done.set()

        sinks = [bridge.sink(lambda event, place=place: receive(place, event)) for place in range(num_sinks)]

        def tell() -> None:
            for number in range(num_events):
                for sink in sinks:
                    sink(OutputChunk(number, (), ""))
            sinks[0](RequestFinished(RequestTrace(0.0)))

        threading.Thread(target=tell).start()
        async with asyncio.timeout(120):
            await done.wait()
        return heard

    assert asyncio.run(play()) == [list(range(num_events))] * num_sinks


def test_the_description_names_what_is_refused():
    schemas = description()["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["modalities"]["enum"] == [None, [], ["text"]]
    assert "RouterHints" in schemas
    assert set(description()["paths"]) >= {"/v1/completions", "/v1/timelines/{id}", "/drain"}
