"""Stop strings, wherever the text is cut."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.tokenizer import StopStrings

# One number stands for stop strings and text: building them from parts would take most of the search's time.
seeds = st.integers(0, 2**64 - 1)


def any_search(random: Random) -> tuple[list[str], list[str]]:
    """Few letters, so that stop strings overlap each other, themselves and the text."""

    def word(letters: str, num_min: int, num_max: int) -> str:
        return "".join(random.choices(letters, k=random.randint(num_min, num_max)))

    stops = [word("ab", 1, 4) for _ in range(random.randint(1, 3))]
    return stops, [word("abc", 0, 5) for _ in range(random.randint(0, 8))]


def passed(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, bool]:
    one = StopStrings(stops)
    found = "".join([*(one.push(part) for part in parts), one.finish()])
    return found, one.is_found


def naive(stops: Sequence[str], text: str) -> tuple[str, bool]:
    for length in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:length].endswith(stop)]
        if completed:
            return text[: length - max(map(len, completed))], True
    return text, False


@given(seeds)
def test_text_ends_before_the_first_stop_string(seed: int):
    stops, parts = any_search(Random(seed))
    assert passed(stops, parts) == naive(stops, "".join(parts))


@given(seeds)
def test_just_what_may_begin_a_stop_string_is_held(seed: int):
    stops, parts = any_search(Random(seed))
    one, text, given_out = StopStrings(stops), "", ""
    for part in parts:
        text += part
        given_out += one.push(part)
        if one.is_found:
            break
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert given_out == text[: len(text) - held]


def test_nothing_follows_a_stop_string():
    one = StopStrings(["stop"])
    assert one.push("it st") == "it "
    assert one.push("op it st") == ""
    assert one.is_found
    assert one.push("more") == ""
    assert one.finish() == ""


def test_what_was_held_in_vain_comes_out():
    one = StopStrings(["\n\nUser:"])
    assert [one.push(part) for part in ["a\n", "\nUs", "e", " it\n"]] == ["a", "", "", "\n\nUse it"]
    assert one.finish() == "\n"
    assert not one.is_found


@pytest.mark.parametrize("parts", [["xab c"], ["x", "a", "b", " ", "c"], ["xab", " c"]])
def test_the_stop_string_that_is_complete_first_counts(parts: list[str]):
    assert passed(["ab c", "b"], parts) == ("xa", True)


def test_searching_each_part_alone_would_show():
    parts = ["one st", "op two"]
    assert all("stop" not in part for part in parts)
    assert passed(["stop"], parts) == ("one ", True)
