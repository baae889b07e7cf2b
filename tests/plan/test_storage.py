"""Storage declarations become strides."""

from __future__ import annotations

import pytest
from tests.plan.world import make_cache

from baton.errors import ConfigError, LayoutError
from baton.plan.cache import Units
from baton.plan.kinds import Conv, Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec, buffers, placements
from baton.plan.storage import Storage, parse_storage

KV = make_cache(3, (Paged(4, 8, 6), ((0, 3),)))


def at(storage: Storage, name: str, layout: str = "tp2"):
    spec = Spec(parse_layout(layout), KV, storage.with_pages({"tokens": 10}))
    return placements(spec, 0, "source")[name]


def test_hnd_and_nhd() -> None:
    hnd, nhd = at(parse_storage("hnd", 16, "bf16"), "k"), at(parse_storage("nhd", 16, "bf16"), "k")
    assert hnd.strides == {"channel": 2, "token": 16, "unit": 256, "page": 512, "layer": 5120}
    assert nhd.strides == {"channel": 2, "unit": 16, "token": 32, "page": 512, "layer": 5120}
    assert (hnd.buffer, hnd.buffer_bytes, hnd.offset) == ("k", 15360, 0)


def test_fused_puts_unequal_channels_side_by_side() -> None:
    k, v = (at(parse_storage("hnd.fused", 16, "bf16"), name) for name in ("k", "v"))
    assert (k.buffer, v.buffer) == ("kv", "kv")
    assert (k.offset, v.offset) == (0, 2 * 16 * 16)
    assert k.stride("page") == v.stride("page") == 2 * 16 * 16 + 2 * 16 * 12
    assert k.buffer_bytes == v.buffer_bytes == 3 * 10 * 896


def test_page_major() -> None:
    k = at(parse_storage("page.hnd", 16, "fp32"), "k")
    assert (k.stride("layer"), k.stride("page")) == (2 * 16 * 32, 3 * 2 * 16 * 32)


def test_packed_convolution_is_cut_by_each_parts_own_units() -> None:
    convs = tuple(Conv(p, Units(n, "head"), 4, 3) for p, n in (("q", 2), ("k", 2), ("v", 8)))
    cache = make_cache(1, (Recurrent(8, 5, convs), ((0, 1),)))
    for layout, sizes in (("tp1", (2, 2, 8)), ("tp2", (1, 1, 4)), ("tp4", (1, 1, 2))):
        spec = Spec(parse_layout(layout), cache, Storage())
        found = placements(spec, 0, "source")
        unit = 4 * 3 * 2
        assert [found[f"conv.{part}"].offset for part in "qkv"] == [
            0,
            sizes[0] * unit,
            (sizes[0] + sizes[1]) * unit,
        ]
        assert {found[f"conv.{part}"].buffer for part in "qkv"} == {"conv"}
        assert buffers(spec, 0, "source")["conv"] == sum(sizes) * unit


def test_components_that_cannot_share_a_pool_are_refused() -> None:
    convs = (Conv("q", Units(2, "head"), 4, 3), Conv("v", Units(8, "head"), 4, 3))
    cache = make_cache(1, (Recurrent(8, 5, convs), ((0, 1),)))
    spec = Spec(parse_layout("tp1"), cache, Storage(state_order=("layer", "page", "unit", "component")))
    with pytest.raises(LayoutError, match=r"conv\.q, conv\.v.*differ along unit"):
        placements(spec, 0, "source")


@pytest.mark.parametrize(
    "text", ["", "hnd.nhd", "HND", "hnd.hnd", "granule", "granule0", "granule08", "fast", "hnd."]
)
def test_malformed_storage_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_storage(text, 64, "bf16")
    assert repr(text) in str(caught.value)


def test_bad_numbers_are_refused() -> None:
    for page, storage in ((0, "hnd"), (-1, "hnd"), (1 << 21, "hnd"), (64, "granule48"), (16, "granule32")):
        with pytest.raises(ConfigError):
            parse_storage(storage, page, "bf16")
    with pytest.raises(ConfigError, match="int4"):
        Storage(dtype="int4")
    with pytest.raises(ConfigError, match="must name each of"):
        Storage(order=("layer", "page", "unit"))
