"""Pieces of text as tokens come: together the whole, none of them half a character."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.text.vocabularies import byte_level, fallback_tokenizer, tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast

from baton.engine import tokenizer as detokenizing
from baton.engine.tokenizer import Detokenizer, Tokenizer

VOCAB_SIZE = len(byte_level())
BYTES = [
    byte_level().convert_tokens_to_ids(piece)
    for piece in sorted(byte_level().backend_tokenizer.get_vocab())
    if len(piece) == 1
]
# One number stands for a sequence: building it from its parts would take most of the search's time.
seeds = st.integers(0, 2**64 - 1)
RANGES = [(0x20, 0x7F), (0x20, 0x7F), (0, 0x2FF), (0x4E00, 0x4E20), (0xD000, 0xD7FF), (0x1F600, 0x1F640)]


def any_text(random: Random) -> str:
    return "".join(chr(random.randrange(*random.choice(RANGES))) for _ in range(random.randint(0, 50)))


def any_tokens(random: Random) -> list[int]:
    """Any ids, some of them unknown, or nothing but single bytes, which are mostly no UTF-8 at all."""
    ids = random.choice([range(VOCAB_SIZE + 3), BYTES])
    return random.choices(ids, k=random.randint(0, 80))


Pieces = Callable[[Tokenizer, list[int]], list[str]]


def pieces(one: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(one)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(seeds)
def test_pieces_of_text_make_the_text_and_none_is_half_a_character(seed: int):
    """The text has no U+FFFD, so a piece that has one was given out too early."""
    text = any_text(Random(seed))
    found = pieces(tokenizer(), tokenizer().encode(text))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


@given(seeds)
def test_pieces_of_any_tokens_make_what_decoding_all_makes(seed: int):
    tokens = any_tokens(Random(seed))
    assert "".join(pieces(tokenizer(), tokens)) == byte_level().decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@given(seeds)
def test_pieces_of_fallback_text_make_what_decoding_all_makes(seed: int):
    random, one = Random(seed), fallback_tokenizer()
    text = "".join(random.choices("ab.\u2581\u4f60\u597d\u00e9\U0001f600\n", k=random.randint(0, 50)))
    tokens = one.encode(text)
    assert "".join(pieces(one, tokens)) == one.decode(tokens)


def byte_tokens(text: str) -> list[int]:
    """Each byte its own token, as a model is free to write."""
    letters = byte_level().backend_tokenizer.pre_tokenizer
    spelled = "".join(piece for piece, _ in letters.pre_tokenize_str(text))
    return [byte_level().convert_tokens_to_ids(letter) for letter in spelled]


def test_a_character_comes_with_its_last_byte():
    found = pieces(tokenizer(), byte_tokens("a\u00e9\u4f60\U0001f600b"))
    assert found == ["a", "", "\u00e9", "", "", "\u4f60", "", "", "", "\U0001f600", "b", ""]


def test_text_is_not_held_longer_than_needed():
    """Every token of plain text gives its text at once, however long the text."""
    one = tokenizer()
    tokens = one.encode("the quick fox jumps over the lazy dog " * 20)
    assert pieces(one, tokens) == [*(one.decode([token]) for token in tokens), ""]


def test_an_incomplete_end_comes_when_finished():
    detokenizer = Detokenizer(tokenizer())
    assert [detokenizer.push(token) for token in byte_tokens("a\u4f60")[:-1]] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_a_genuine_replacement_character_comes_too():
    assert "".join(pieces(tokenizer(), byte_tokens("\ufffd" * 50 + "a\ufffd"))) == "\ufffd" * 50 + "a\ufffd"


def test_special_tokens_do_not_disturb_a_character():
    first, *rest = byte_tokens("\u4f60")
    (special,) = tokenizer().encode("<|im_end|>")
    assert pieces(tokenizer(), [first, special, *rest]) == ["", "", "", "\u4f60", ""]


@given(seeds)
def test_shown_special_tokens_are_part_of_the_text(seed: int):
    """Those of a prompt are not."""
    random, one = Random(seed), tokenizer()
    tokens = random.choices([*one.special, *any_tokens(random), *one.encode(" fox")], k=60)
    num_context = random.randint(0, 20)
    shown = random.choice([tuple(one.special), tuple(one.special)[:1]])
    visible = [token for token in tokens if token not in one.special or token in shown]
    num_visible = len([token for token in tokens[:num_context] if token in visible])
    before = one.decode(visible[:num_visible], has_special=True)
    if before.endswith("\ufffd"):
        return
    detokenizer = Detokenizer(one, tokens[:num_context], shown)
    found = [*map(detokenizer.push, tokens[num_context:]), detokenizer.finish()]
    assert before + "".join(found) == one.decode(visible, has_special=True)


def test_context_keeps_the_space_of_the_first_word():
    """A tokenizer that drops a text's first space must not drop the one between prompt and answer."""
    one = fallback_tokenizer()
    prompt, answer = one.encode("\u2581the"), one.encode("\u2581fox\u2581the")
    assert "".join(pieces(one, answer)) == "fox the"
    continued = Detokenizer(one, context=prompt)
    assert "".join([*(continued.push(token) for token in answer), continued.finish()]) == " fox the"


@given(seeds)
def test_context_gives_no_text_of_its_own(seed: int):
    """The pieces after a context are the whole less the context's own text, where that ends cleanly."""
    random = Random(seed)
    tokens = any_tokens(random)
    num_context = random.randint(0, len(tokens))
    context, answer = tokens[:num_context], tokens[num_context:]
    before = tokenizer().decode(context)
    if before.endswith("\ufffd"):
        return
    detokenizer = Detokenizer(tokenizer(), context)
    found = "".join([*(detokenizer.push(token) for token in answer), detokenizer.finish()])
    assert before + found == tokenizer().decode(tokens)


@pytest.mark.parametrize("text", ["the quick fox ", "\u4f60\u597d", "\U0001f600", "\ufffd"])
@pytest.mark.parametrize("spell", [tokenizer().encode, byte_tokens])
def test_work_per_token_does_not_grow(text: str, spell: Callable[[str], list[int]]):
    one, decoded = tokenizer(), []
    counted = Tokenizer(byte_level())
    counted.decode = lambda tokens, has_special: (
        decoded.append(len(tokens)) or one.decode(tokens, has_special)
    )
    tokens = spell(text * 1000)
    assert "".join(pieces(counted, tokens)) == text * 1000
    assert max(decoded) <= 64
    assert sum(decoded) <= 40 * len(tokens)


@pytest.mark.parametrize("text", ["\u00e9\u4f60\u597da", "\U0001f600\u00e9", "\n\n"])
def test_characters_in_byte_tokens_come_with_their_last_byte(text: str):
    tokens = [3 + byte for byte in text.encode()]
    found = pieces(fallback_tokenizer(), tokens)
    ends = {len(text[:count].encode()): text[count - 1] for count in range(1, len(text) + 1)}
    assert found == [*(ends.get(place, "") for place in range(1, len(tokens) + 1)), ""]


def test_byte_tokens_keep_the_space_of_the_next_word():
    one = fallback_tokenizer()
    newline, fox = [3 + 10], one.encode("\u2581fox")
    assert pieces(one, [*newline, *fox])[0] == "\n"
    for tokens in ([*newline, *fox], [*fox, *newline, *fox, *newline, *newline, *fox]):
        assert "".join(pieces(one, tokens)) == one.decode(tokens)
    assert "".join(pieces(one, newline)) == "\n"
    after = Detokenizer(one, context=newline)
    assert "".join(after.push(token) for token in fox) == " fox"


def test_bad_bytes_do_not_spoil_good_ones():
    tokens = [3 + byte for byte in "\u4f60".encode() + b"\xff\xe4" + b"a"]
    assert "".join(pieces(fallback_tokenizer(), tokens)) == "\u4f60\ufffd\ufffda"


def test_a_token_spelled_like_a_byte_is_none_elsewhere():
    """In byte-level vocabularies there are no byte tokens of this form; here is one that looks like it."""
    backend = PreTrainedTokenizerFast(tokenizer_object=Fast.from_str(byte_level().backend_tokenizer.to_str()))
    backend.add_tokens([AddedToken("<0x41>", special=False, normalized=False)])
    one = Tokenizer(backend)
    assert "".join(pieces(one, one.encode("a<0x41>b"))) == "a<0x41>b"


def each_alone(one: Tokenizer, tokens: list[int]) -> list[str]:
    return [one.decode([token]) for token in tokens]


def until_complete(one: Tokenizer, tokens: list[int]) -> list[str]:
    """Gives text out when it does not end in U+FFFD, and starts afresh."""
    found, window = [], []
    for token in tokens:
        window.append(token)
        text = one.decode(window)
        found.append("" if text.endswith("\ufffd") else text)
        window = window if text.endswith("\ufffd") else []
    return found


SPLIT = byte_tokens("a\u4f60")
CASES = [
    (tokenizer(), SPLIT),
    (tokenizer(), SPLIT[:-1]),
    (fallback_tokenizer(), fallback_tokenizer().encode("\u2581the\u2581fox")),
]


@pytest.mark.parametrize("variant", [each_alone, until_complete])
def test_simpler_ways_would_show(variant: Pieces):
    assert all("".join(pieces(one, tokens)) == one.decode(tokens) for one, tokens in CASES)
    assert not all("".join(variant(one, tokens)) == one.decode(tokens) for one, tokens in CASES)


def cut_blindly(one: Detokenizer, text: str) -> None:
    one._window = one._window[-detokenizing._NUM_CONTEXT :]
    one._num_given = len(one._tokenizer.decode(one._window)) - (len(text) - one._num_given)


def test_a_window_cut_too_short_would_show(monkeypatch: pytest.MonkeyPatch):
    """With no context kept, a character that a cut falls into is lost: the property above would find it."""
    monkeypatch.setattr(detokenizing, "_NUM_CONTEXT", 1)
    monkeypatch.setattr(detokenizing, "_NUM_WINDOW_MAX", 1)
    monkeypatch.setattr(Detokenizer, "_cut", cut_blindly)
    tokens = byte_tokens("\U0001f600\u4f60" * 20)
    assert "".join(pieces(tokenizer(), tokens)) != tokenizer().decode(tokens)
