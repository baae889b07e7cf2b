"""Layout strings: what they mean, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest

from baton.errors import LayoutError
from baton.plan.layout import Mirror, Split, Stripe, parse_layout


def test_ranks_are_row_major_in_the_written_order() -> None:
    layout = parse_layout("pp2.cp3.tp4")
    for number, (pp, cp, tp) in enumerate(product(range(2), range(3), range(4))):
        assert layout.coordinates(number) == {"dp": 0, "pp": pp, "cp": cp, "tp": tp}
    other = parse_layout("tp2.dp3")
    assert [other.coordinates(rank)["dp"] for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert other.group(1) == (1, 4)
    assert parse_layout("dp3.tp2").group(1) == (2, 3)


def test_context_schemes() -> None:
    assert parse_layout("cp2:mirror").scheme == Mirror()
    assert parse_layout("cp2:split").scheme == Split()
    assert parse_layout("cp2:stripe16").scheme == Stripe(16)
    assert parse_layout("cp2").scheme == Stripe(0)
    assert Stripe(0).share(1, 2, 100, 8).block == 8


def test_split_gives_earlier_ranks_the_extra_page_and_later_ones_nothing() -> None:
    shares = [Split().share(i, 4, 600, 64) for i in range(4)]
    assert [(share.start, share.stop) for share in shares] == [(0, 192), (192, 384), (384, 512), (512, 600)]
    assert [Split().share(i, 3, 5, 64).stop for i in range(3)] == [5, 5, 5]


def blocks(num_units: int, num_ranks: int) -> list[tuple[int, int]]:
    layout = parse_layout(f"tp{num_ranks}")
    return list(layout.unit_blocks(num_units, component="k", unit="head", side="source"))


def test_units_are_cut_in_contiguous_blocks_or_mirrored() -> None:
    assert blocks(9, 3) == [(0, 3), (3, 6), (6, 9)]
    assert blocks(9, 4) == [(0, 3), (3, 5), (5, 7), (7, 9)]
    assert blocks(2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "tp", "8", "tp0", "tp08", "tp-1", "tp1.5", "TP8", "tp8 ", " tp8", "tp 8", "tp8.", ".tp8",
        "tp8..pp2", "tp8.tp2", "ep8", "tp8:2", "dp2:split", "cp2:", "cp2:stripe", "cp2:stripe0",
        "cp2:stripe01", "cp2:zigzag", "cp2:split:mirror", "pp2:12", "pp2:12-", "pp2:0-12", "pp2:1-2-3",
        "pp2:a-b", "pp2:012-20", "tp99999999999999999999", "tp256.pp128", "tp8\n", "tp\u0668", "tp8,pp2",
    ],
)  # fmt: skip
def test_malformed_layouts_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert repr(text) in str(caught.value)


def test_stages_must_fit_the_model() -> None:
    with pytest.raises(LayoutError, match=r"target pp3:1-1-1.*sum to 3.*4 layers"):
        parse_layout("pp3:1-1-1").stages(4, "target")
    with pytest.raises(LayoutError, match=r"source pp5.*5 pipeline stages for 4 layers"):
        parse_layout("pp5").stages(4, "source")
    assert parse_layout("pp2:12-20").stages(32, "source") == ((0, 12), (12, 32))


def test_more_ranks_than_units_must_be_a_multiple() -> None:
    with pytest.raises(
        LayoutError,
        match=r"component k, source tp6: the model has 4 heads; use tp up to 4, or a multiple of 4",
    ) as caught:
        blocks(4, 6)
    assert (caught.value.component, caught.value.sides) == ("k", "source tp6")
