"""An answer's text: detokenized, cut at its stop string or at the token that ended it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.text.vocabularies import fallback_tokenizer, tokenizer

from baton.engine.sampling_params import SamplingParams
from baton.engine.tokenizer import AnswerText

(EOS,) = tokenizer().encode("<|endoftext|>")
TEXT = "the quick brown fox\u4f60\u597d jumps"


def told(params: SamplingParams, tokens: list[int]) -> tuple[list[str], bool]:
    one = AnswerText(tokenizer(), params, (EOS,))
    parts = []
    for token in tokens:
        parts.append(one.push(token))
        if one.has_stop_string:
            break
    return [*parts, one.finish()], one.has_stop_string


@given(st.text(max_size=40), st.text(min_size=1, max_size=3))
def test_an_answer_ends_right_before_its_stop_string(text: str, stop: str):
    parts, has_stop_string = told(SamplingParams(stop=(stop,)), tokenizer().encode(text))
    assert "".join(parts) == text.partition(stop)[0]
    assert has_stop_string == (stop in text)


@pytest.mark.parametrize("stop", ["ick br", "x\u4f60", "x\u4f60\u597d j", "the q"])
def test_stop_strings_lie_across_tokens(stop: str):
    tokens = tokenizer().encode(TEXT)
    assert not any(tokenizer().decode([token]) == stop for token in tokens)
    assert "".join(told(SamplingParams(stop=(stop,)), tokens)[0]) == TEXT.partition(stop)[0]


def test_special_tokens_are_shown_where_the_request_wants_them():
    tokens = tokenizer().encode("<|im_start|>fox<|im_end|>")
    start, end = tokens[0], tokens[-1]
    for params, text in (
        (SamplingParams(), "fox"),
        (SamplingParams(skip_special_tokens=False), "<|im_start|>fox<|im_end|>"),
        (SamplingParams(shown_special_ids=(end,)), "fox<|im_end|>"),
        (SamplingParams(skip_special_tokens=False, stop_ids=(end,)), "<|im_start|>fox"),
        (SamplingParams(shown_special_ids=(start,), stop=("<|im_st",)), ""),
    ):
        assert "".join(told(params, tokens)[0]) == text, params
    assert "".join(told(SamplingParams(skip_special_tokens=False), [*tokens, EOS])[0]).endswith("<|im_end|>")


def test_the_token_that_ends_an_answer_is_not_shown():
    fox, dog = tokenizer().encode(" fox"), tokenizer().encode("<tool>")
    params = SamplingParams(stop_ids=tuple(dog))
    assert "".join(told(params, [*fox, *dog])[0]) == " fox"
    assert "".join(told(SamplingParams(), [*fox, *dog, EOS])[0]) == " fox<tool>"
    early = SamplingParams(stop_ids=tuple(dog), min_tokens=len(fox) + 1)
    assert "".join(told(early, [*fox, *dog])[0]) == " fox<tool>"


def test_an_end_flushes_what_a_stop_string_might_have_needed():
    parts, has_stop_string = told(SamplingParams(stop=("jumps over",)), tokenizer().encode(TEXT))
    assert "".join(parts) == TEXT
    assert parts[-1] == "jumps"
    assert not has_stop_string


def test_the_first_min_tokens_are_not_searched():
    tokens = tokenizer().encode("fox. the fox")
    num_first = len(tokenizer().encode("fox"))
    params = SamplingParams(stop=("fox",), min_tokens=num_first)
    parts, has_stop_string = told(params, tokens)
    assert "".join(parts) == "fox. the "
    assert has_stop_string
    assert told(SamplingParams(stop=("fox",)), tokens)[0] == [""] * num_first + [""]


def test_a_stop_string_in_an_incomplete_end():
    """What the end of the answer makes of half a character is searched too."""
    tokens = tokenizer().encode("\U0001f987")
    assert len(tokens) > 1
    parts, has_stop_string = told(SamplingParams(stop=("\ufffd",)), tokens[:-1])
    assert "".join(parts) == ""
    assert has_stop_string


def test_context_is_passed_on():
    one = fallback_tokenizer()
    text = AnswerText(one, SamplingParams(), (2,), context=one.encode("\u2581the"))
    assert "".join([*map(text.push, one.encode("\u2581fox")), text.finish()]) == " fox"
