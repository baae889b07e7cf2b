"""When unlike layers were computed, and what each of them had to send."""

from __future__ import annotations

import pytest

from baton.engine.rank.readiness import ends_of, shares_of, with_dues
from baton.engine.steps import CopyRecord, Due, Group

KINDS = (0, 0, 1, 0)


def test_layers_of_a_kind_share_what_the_kind_takes() -> None:
    # 1 s for kind 0, 4 s for kind 1; what the first layer took does not show.
    assert shares_of([10.5, 11.5, 15.5, 16.5], KINDS) == pytest.approx([4 / 7, 4 / 7, 16 / 7, 4 / 7])


def test_a_kind_that_only_the_first_layer_has_is_taken_for_average() -> None:
    assert shares_of([10.0, 11.0, 14.0], (0, 1, 2)) == pytest.approx([1.0, 0.5, 1.5])
    assert shares_of([10.0], (0,)) == (1.0,)


def test_a_group_is_shared_out_by_its_own_layers() -> None:
    groups = [Group((4, 6), 10.0, 12.0), Group((6, 8), 12.0, 17.0)]
    assert ends_of(groups, (1.0, 1.0, 4.0, 1.0)) == pytest.approx([11.0, 12.0, 16.0, 17.0])
    assert ends_of(groups, None) == pytest.approx([11.0, 12.0, 14.5, 17.0])


def test_what_was_copied_is_dealt_to_layers() -> None:
    """Chunk 1 went in two copies, and is half of what is kept: the other half was another mirror's."""
    sent = ((0, 70), (1, 120), (1, 80), (2, 0))
    copies = [CopyRecord(0, chunk, num_bytes, 1.0, 2.0) for chunk, num_bytes in sent]
    dues = {1: [Due(2.0, 100), Due(2.5, 300, 200)], 3: [Due(3.0, 50)]}
    found = with_dues(copies, dues, {1: 2.5})
    assert [copy.dues for copy in found] == [[Due(0.0, 70)], [Due(2.0, 50), Due(2.5, 150, 100)], [], []]
    assert [(copy.chunk, copy.num_bytes) for copy in found] == list(sent)
    assert with_dues(copies[:1], {}, {0: 1.5})[0].dues == [Due(1.5, 70)]
