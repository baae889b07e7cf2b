"""An answer that goes on elsewhere: at every cut the same text, the same end and the same usage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.serve.speaking import oracle_text
from tests.serving.live import Live
from tests.serving.streams import listen

from baton.serving.http import EventSplitter

pytestmark = pytest.mark.serve

FOX = "the quick brown fox"
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 11, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"temperature": 0, "ignore_eos": True, "stop": "STOP"},
    ],
    ids=["greedy", "drawn", "stopped"],
)
def test_every_cut_goes_on_as_if_nothing_had_happened(served: Live, wishes):
    body = {"prompt": FOX, "max_tokens": 14, **USAGE, **wishes}
    if "stop" in body:
        plain = oracle_text(FOX, 14, ignore_eos=True).text
        body["stop"] = plain[-4:-1]
    whole = listen(served, COMPLETIONS, body)
    answer = whole.choices[0]
    assert len(answer.tokens) > 4
    for cut in range(1, len(answer.tokens)):
        before = answer.text_at(cut)
        if before is None:
            continue  # no event ended here, so no router would go on from here
        rest = listen(
            served, COMPLETIONS, body, resume=[{"index": 0, "tokens": answer.tokens[:cut]}], id="cmpl-a"
        )
        assert rest.is_done
        assert before + rest.choices[0].text == answer.text, cut
        assert answer.tokens[:cut] + rest.choices[0].tokens == answer.tokens
        assert rest.choices[0].finish == answer.finish
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert rest.usage[name] == whole.usage[name], (cut, name)


def test_some_of_several_choices_go_on(served: Live):
    body = {"prompt": [FOX, "hello"], "n": 2, "max_tokens": 8, "temperature": 0.9, "seed": 5, **USAGE}
    whole = listen(served, COMPLETIONS, body)
    assert sorted(whole.choices) == [0, 1, 2, 3]
    cut = whole.choices[3].texts[1][0]
    resume = [{"index": 3, "tokens": whole.choices[3].tokens[:cut]}, {"index": 0, "tokens": []}]
    done = {str(index): len(whole.choices[index].tokens) for index in (1, 2)}
    rest = listen(served, COMPLETIONS, body, resume=resume, done=done)
    assert sorted(rest.choices) == [0, 3]
    assert rest.choices[0].text == whole.choices[0].text
    assert whole.choices[3].text_at(cut) + rest.choices[3].text == whole.choices[3].text
    assert rest.usage["completion_tokens"] == whole.usage["completion_tokens"]
    assert rest.usage["prompt_tokens"] == whole.usage["prompt_tokens"]


def test_a_chat_has_one_role(served: Live):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    whole = listen(served, CHAT, body)
    assert whole.roles == {0: 1}
    rest = listen(served, CHAT, body, resume=[{"index": 0, "tokens": whole.choices[0].tokens[:3]}])
    assert rest.roles == {0: 0}
    # Nothing had been said of it, so the role had not either.
    fresh = listen(served, CHAT, body, resume=[{"index": 0, "tokens": []}])
    assert (fresh.roles, fresh.choices[0].text) == ({0: 1}, whole.choices[0].text)


def generated(served: Live, body: dict[str, Any], **private: Any) -> list[tuple[list[int], dict[str, Any]]]:
    """The events of a stream of /generate: the tokens that each brings, and its data."""
    answer = served.ask(GENERATE, {**body, "stream": True, "baton": {"tokens": True, **private}})
    assert answer.status == 200, answer.text
    *events, end = EventSplitter().feed(answer.body)
    assert end.is_done
    return [(list(event.note.tokens), json.loads(event.data)) for event in events]


@pytest.mark.parametrize("has_stop", [False, True])
def test_each_event_of_generate_has_the_whole_text_at_every_cut(served: Live, has_stop: bool):
    stops = [oracle_text(FOX, 14, ignore_eos=True).text[-4:-1]] if has_stop else []
    params = {"max_new_tokens": 14, "temperature": 0, "ignore_eos": True, "stop": stops}
    body = {"text": FOX, "sampling_params": params}
    events = generated(served, body)
    assert len(events) > 4
    sent: list[int] = []
    for place, (tokens, data) in enumerate(events[:-1], start=1):
        sent += tokens
        assert data["output_ids"] == sent
        rest = generated(served, body, resume=[{"index": 0, "tokens": sent}], id="gen-a")
        assert rest[-1][1]["text"] == events[-1][1]["text"], place
        assert rest[-1][1]["output_ids"] == events[-1][1]["output_ids"]
        for name in ("finish_reason", "completion_tokens", "prompt_tokens"):
            assert rest[-1][1]["meta_info"][name] == events[-1][1]["meta_info"][name]
        assert rest[0][1]["text"].startswith(data["text"])


def test_what_cannot_go_on_is_refused(served: Live):
    whole = listen(
        served, COMPLETIONS, {"prompt": FOX, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    )
    tokens = whole.choices[0].tokens
    body = {"prompt": FOX, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = served.ask(COMPLETIONS, {**body, "baton": {"resume": [{"index": 0, "tokens": tokens}]}})
    assert answer.status == 400
    assert "complete" in answer.text
    assert answer.json["error"]["code"] == "invalid_value"
