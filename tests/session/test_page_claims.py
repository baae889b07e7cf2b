"""Pages of groups that lie in the same memory belong to one group and one transfer at a time."""

from __future__ import annotations

import pytest
from tests.plan.world import make_cache

from baton.errors import ConfigError
from baton.plan import Spec, Storage, parse_layout
from baton.plan.kinds import Paged
from baton.plan.ownership import page_spaces
from baton.plan.storage import DeclaredPlacement
from baton.session.handles import Request, prompt_digest
from baton.session.memory import PageClaims, check_buffers

CACHE = make_cache(2, (Paged(1, 4), ((0, 1),)), (Paged(1, 4, 0, 8), ((1, 2),)))
PAGE_BYTES = 4 * 4 * 2
NUM_BYTES = 8 * 2 * PAGE_BYTES


def spec(window_offset: int = 0) -> Spec:
    """K beside V in each page, and the window's layer in the pages of the other or after them."""
    declared = [
        DeclaredPlacement(
            f"{part}{suffix}",
            "raw",
            2 * NUM_BYTES,
            at + i * PAGE_BYTES,
            (("page", 2 * PAGE_BYTES), ("token", 8)),
        )
        for suffix, at in (("", 0), (".w8", window_offset))
        for i, part in enumerate("kv")
    ]
    storage = Storage(4, "bf16").with_pages(dict.fromkeys(CACHE.groups, 8)).with_placements(declared)
    return Spec(parse_layout("tp1"), CACHE, storage)


def request(transfer: str, full: list[int], window: list[int], **changes) -> Request:
    digest = prompt_digest(range(8))
    return Request(transfer, "p0", digest, {0: {"tokens": full, "tokens.w8": window}}, **changes).checked(
        spec()
    )


def test_a_page_is_in_use_whatever_group_it_was_named_for() -> None:
    claims = PageClaims(spec())
    number = claims.take(request("t0", [0, 1], [2, 3]))
    with pytest.raises(ConfigError, match=r"t1: page 2 of group 'tokens' on rank 0 is in use by transfer t0"):
        claims.take(request("t1", [2, 4], [5, 6]))
    with pytest.raises(
        ConfigError, match=r"t1: page 1 of group 'tokens.w8' on rank 0 is in use by transfer t0"
    ):
        claims.take(request("t1", [4, 5], [6, 1]))
    claims.take(request("t1", [4, 5], [6, 7]))
    claims.give_back(number)
    claims.take(request("t2", [3, 2], [1, 0]))


def test_a_request_names_a_page_for_one_group() -> None:
    claims = PageClaims(spec())
    with pytest.raises(
        ConfigError, match=r"t0: page 1 on rank 0 is named for group 'tokens' and for .*'tokens.w8'"
    ):
        claims.take(request("t0", [0, 1], [1, 2]))
    with pytest.raises(ConfigError, match="page 1 on rank 0 is named for group"):
        claims.take(request("t0", [1, 0], [3, 1], held={"tokens": 4}))
    claims.take(request("t0", [0, 1], [2, 3]))


def test_groups_in_memory_of_their_own_do_not_share_pages() -> None:
    apart = spec(window_offset=NUM_BYTES)
    assert page_spaces(apart, 0) == {"tokens": "tokens", "tokens.w8": "tokens.w8"}
    claims = PageClaims(apart)
    claims.take(request("t0", [0, 1], [1, 0]))
    with pytest.raises(ConfigError, match="page 1 of group 'tokens' on rank 0 is in use by transfer t0"):
        claims.take(request("t1", [2, 1], [3, 4]))


def test_declared_memory_may_have_room_to_spare() -> None:
    for num_bytes in (2 * NUM_BYTES, 2 * NUM_BYTES + 100):
        check_buffers(spec(), 0, {"raw": memoryview(bytearray(num_bytes))})
    with pytest.raises(ConfigError, match=f"has to have {2 * NUM_BYTES} bytes or more, got {NUM_BYTES}"):
        check_buffers(spec(), 0, {"raw": memoryview(bytearray(NUM_BYTES))})
