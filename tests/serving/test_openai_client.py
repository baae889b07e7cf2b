"""The official client, unchanged, against a running server; greedy answers are those of `transformers`."""

from __future__ import annotations

import json

import openai
import pytest
from openai import OpenAI
from tests.engine.tiny import oracle_logprobs
from tests.serve.speaking import chat_ids, encode, model, oracle_text, tokenizer
from tests.serving.live import CONTEXT, Live, until

from baton import __version__

pytestmark = pytest.mark.serve

FOX = "the quick brown fox"
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(served: Live) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=300)


def test_models(served: Live, client: OpenAI):
    (card,) = client.models.list().data
    assert card.id == served.model
    assert client.models.retrieve(served.model).max_model_len == CONTEXT
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("another")
    assert raised.value.code == "model_not_found"


def test_a_completion_is_the_oracles(served: Live, client: OpenAI):
    expected = oracle_text(FOX, 12)
    answer = client.completions.create(model=served.model, prompt=FOX, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish
    assert answer.usage.prompt_tokens == len(encode(FOX))
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.object == "text_completion"


def test_prompts_as_ids_and_in_batches(served: Live, client: OpenAI):
    prompts = [FOX, "hello", "na\u00efve caf\u00e9"]
    wishes = {"model": served.model, "max_tokens": 6, "temperature": 0}
    texts = [oracle_text(prompt, 6).text for prompt in prompts]
    batch = client.completions.create(prompt=prompts, n=2, **wishes)
    assert [choice.index for choice in batch.choices] == list(range(6))
    assert [choice.text for choice in batch.choices] == [text for text in texts for _ in range(2)]
    assert batch.usage.prompt_tokens == sum(len(encode(prompt)) for prompt in prompts)
    ids = client.completions.create(prompt=[encode(prompt) for prompt in prompts], **wishes)
    assert [choice.text for choice in ids.choices] == texts
    one = client.completions.create(prompt=encode(FOX), echo=True, **wishes)
    assert one.choices[0].text == FOX + texts[0]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_answer(served: Live, client: OpenAI, n: int):
    wishes = {"model": served.model, "prompt": FOX, "max_tokens": 10, "temperature": 0.9, "seed": 7, "n": n}
    whole = client.completions.create(**wishes)
    texts, finishes, usage = [""] * n, [None] * n, None
    for event in client.completions.create(**wishes, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    if n == 3:
        assert len(set(texts)) == 3


def test_chats_and_their_streams(served: Live, client: OpenAI):
    expected = oracle_text(chat_ids(CHAT), 8)
    wishes = {"model": served.model, "messages": CHAT, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**wishes)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(chat_ids(CHAT))
    roles, text = [], ""
    for event in client.chat.completions.create(**wishes, stream=True):
        assert event.usage is None
        for choice in event.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            text += choice.delta.content or ""
    assert (roles, text) == (["assistant"], expected.text)


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_log_probabilities_of_an_echoed_prompt(served: Live, client: OpenAI, max_tokens: int):
    wishes = {"model": served.model, "prompt": [encode(FOX), encode("hello")], "max_tokens": max_tokens}
    wishes |= {"temperature": 0, "echo": True, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**wishes)
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage.completion_tokens == 2 * max_tokens
    for choice, text in zip(whole.choices, (FOX, "hello"), strict=True):
        check_echo(choice, text, max_tokens)
    parts = [choice for event in client.completions.create(**wishes, stream=True) for choice in event.choices]
    for choice in whole.choices:
        own = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        for name in ("tokens", "text_offset"):
            joined = [value for part in own for value in getattr(part.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)
        # The others, with the rows of other batches, are the same but for rounding.
        values = [value for part in own for value in part.logprobs.token_logprobs]
        assert values[0] is None
        assert values[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
    until(served.is_idle, "nothing is left of it")


def check_echo(choice, text: str, max_tokens: int) -> None:
    """The prompt, then the answer, and what `transformers` gives each token but the first."""
    answer = oracle_text(text, max_tokens, ignore_eos=True) if max_tokens else None
    ids = [*encode(text), *(answer.tokens if answer else ())]
    found, expected = choice.logprobs, oracle_logprobs(model(), ids)
    assert choice.text == text + (answer.text if answer else "")
    names = [tokenizer().decode([token]) for token in encode(text)]
    assert found.tokens[: len(names)] == names
    assert found.text_offset[: len(names)] == [len("".join(names[:place])) for place in range(len(names))]
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    values = [expected[row, token].item() for row, token in enumerate(ids[1:])]
    assert found.token_logprobs[1:] == pytest.approx(values, abs=1e-4)
    for row, (value, top) in enumerate(zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True)):
        assert value in top.values()
        assert max(top.values()) == pytest.approx(expected[row].max().item(), abs=1e-4)


def test_log_probabilities_of_completions(served: Live, client: OpenAI):
    answer = client.completions.create(
        model=served.model,
        prompt=FOX,
        max_tokens=5,
        temperature=0,
        logprobs=3,
        extra_body={"ignore_eos": True},
    )
    found = answer.choices[0].logprobs
    expected = oracle_text(FOX, 5, ignore_eos=True)
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 5
    for token, name, logprob, top in zip(
        expected.tokens, found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert name == tokenizer().decode([token]) or name.startswith(("bytes:", "token_id:", "<"))
        assert 3 <= len(top) <= 4
        # Greedy: the token is the likeliest.
        assert top[name] == pytest.approx(logprob) == pytest.approx(max(top.values()))
    assert found.text_offset[0] == 0


def test_log_probabilities_of_chats(served: Live, client: OpenAI):
    wishes = {"model": served.model, "messages": CHAT, "max_tokens": 5, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**wishes, top_logprobs=2).choices[0].logprobs.content
    assert all(len(each.top_logprobs) == 2 for each in whole)
    assert all(each.logprob == each.top_logprobs[0].logprob for each in whole)
    streamed = [
        each
        for event in client.chat.completions.create(**wishes, top_logprobs=2, stream=True)
        for choice in event.choices
        for each in choice.logprobs.content
    ]
    assert [each.token for each in streamed] == [each.token for each in whole]
    assert all(
        not each.top_logprobs for each in client.chat.completions.create(**wishes).choices[0].logprobs.content
    )
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**wishes, "logprobs": False}, top_logprobs=2)
    assert raised.value.param == "top_logprobs"


def test_stops_and_other_wishes(served: Live, client: OpenAI):
    wishes = {"model": served.model, "prompt": FOX, "max_tokens": 24, "temperature": 0}
    plain = oracle_text(FOX, 24).text
    stop = plain[len(plain) // 2 :][:2]
    stopped = client.completions.create(**wishes, stop=[stop, "never"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (plain[: plain.index(stop)], "stop")
    first = oracle_text(FOX, 1, ignore_eos=True).tokens[0]
    biased = client.completions.create(
        **{**wishes, "max_tokens": 1}, logit_bias={str(first): -100}, extra_body={"return_token_ids": True}
    )
    assert biased.choices[0].token_ids != [first]
    extra = {"stop_token_ids": [first], "return_token_ids": True}
    ended = client.completions.create(**wishes, extra_body=extra).choices[0]
    assert (ended.text, ended.finish_reason, ended.token_ids) == ("", "stop", [first])
    fixed = [
        client.completions.create(**{**wishes, "temperature": 1.0}, seed=3).choices[0].text for _ in range(2)
    ]
    assert fixed[0] == fixed[1]


def test_cached_tokens_are_told(served: Live, client: OpenAI):
    prompt = "the lazy dog jumps over " * 20
    wishes = {"model": served.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    client.completions.create(**wishes)
    until(served.is_idle, "the first one is over")
    again = client.completions.create(**wishes)
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < again.usage.prompt_tokens


def test_errors_are_the_clients_own(served: Live, client: OpenAI):
    good = {"model": served.model, "prompt": FOX}
    for wrong, param in (
        ({"max_tokens": CONTEXT}, "max_tokens"),
        ({"prompt": [9999]}, "prompt"),
        (
            {
                "extra_body": {
                    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
                }
            },
            "response_format",
        ),
        ({"extra_body": {"lora_path": "x"}}, "lora_path"),
        ({"suffix": "end"}, "suffix"),
        ({"temperature": -1}, "temperature"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(**{**good, **wrong})
        assert raised.value.param == param
        assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=served.model, prompt="the dog " * 600)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-4", prompt=FOX)
    assert served.model in raised.value.message
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=served.model, messages=CHAT, tools=tools, tool_choice="required")
    assert raised.value.param == "tools"  # which the model's chat template does not take


def test_generate_speaks_its_own_dialect(served: Live):
    params = {"max_new_tokens": 6, "temperature": 0}
    expected = oracle_text(FOX, 6)
    whole = served.ask("/generate", {"text": FOX, "sampling_params": params}).json
    assert (whole["text"], whole["output_ids"]) == (expected.text, list(expected.tokens))
    assert whole["meta_info"]["prompt_tokens"] == len(encode(FOX))
    assert whole["meta_info"]["finish_reason"]["type"] == expected.finish
    several = served.ask(
        "/generate", {"input_ids": [encode(FOX), encode("hello")], "sampling_params": params}
    ).json
    assert [each["text"] for each in several] == [expected.text, oracle_text("hello", 6).text]
    stream = served.ask("/generate", {"text": FOX, "sampling_params": params, "stream": True}).text
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["text"] == expected.text


def test_tokens_of_a_text_and_back(served: Live):
    told = served.ask("/tokenize", {"model": served.model, "prompt": FOX}).json
    assert told == {
        "count": len(encode(FOX)),
        "max_model_len": CONTEXT,
        "tokens": encode(FOX),
        "token_strs": None,
    }
    assert served.ask("/tokenize", {"messages": CHAT}).json["tokens"] == chat_ids(CHAT)
    assert served.ask("/detokenize", {"tokens": told["tokens"]}).json == {"prompt": FOX}
    assert served.ask("/tokenize", {"model": "another", "prompt": FOX}).status == 404
    assert served.ask("/version").json == {"version": __version__}


def test_the_responses_api_is_refused_with_what_to_use(client: OpenAI):
    with pytest.raises(openai.NotFoundError, match="use POST /v1/chat/completions") as raised:
        client.responses.create(model="x", input="hello")
    assert raised.value.code == "unknown_url"
