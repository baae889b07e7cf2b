"""Text and chats to tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.text.vocabularies import byte_level, fallback_tokenizer, tokenizer
from tokenizers import Tokenizer as Fast
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from baton.engine.tokenizer import Tokenizer
from baton.errors import ConfigError

MESSAGES = [{"role": "user", "content": "the fox?"}]


@given(st.text(max_size=60))
def test_text_comes_back(text: str):
    one = tokenizer()
    assert one.decode(one.encode(text)) == text


def test_a_chat_is_what_its_template_writes():
    one = tokenizer()
    start, end = byte_level().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    asked = [start, *one.encode("user\nthe fox?"), end, *one.encode("\n")]
    assert one.chat(MESSAGES, add_generation_prompt=False) == asked
    assert one.chat(MESSAGES) == [*asked, start, *one.encode("assistant\n")]
    assert one.chat(MESSAGES, options={"speaker": "fox"}) == [*asked, start, *one.encode("fox\n")]


def test_a_chat_is_the_same_as_the_backends_own():
    whole = byte_level().apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert tokenizer().chat(MESSAGES) == whole["input_ids"]


def test_messages_that_the_template_refuses():
    with pytest.raises(ConfigError, match="no such role"):
        tokenizer().chat([{"role": "nobody", "content": "x"}])


def test_a_model_without_a_template_has_no_chat():
    with pytest.raises(ConfigError, match="no chat template"):
        fallback_tokenizer().chat(MESSAGES)


def test_special_tokens_and_unknown_ids_have_no_text():
    one = tokenizer()
    tokens = one.encode("<|im_start|>fox<tool><|im_end|>")
    assert one.decode(tokens) == "fox<tool>"
    assert one.decode([*tokens, 10**6]) == "fox<tool>"
    assert [one.has_text(token) for token in (tokens[0], tokens[-1], 10**6, tokens[1])] == [False] * 3 + [
        True
    ]


def test_what_surrounds_a_text_is_not_put_around_a_chat():
    fast = Fast.from_str(byte_level().backend_tokenizer.to_str())
    fast.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend = PreTrainedTokenizerFast(tokenizer_object=fast)
    backend.chat_template = byte_level().chat_template
    one = Tokenizer(backend)
    assert one.encode("fox") == [0, *tokenizer().encode("fox")]
    assert one.encode("fox", add_special=False) == tokenizer().encode("fox")
    assert one.chat(MESSAGES) == tokenizer().chat(MESSAGES)
