"""Pairs that cannot be handed over are refused with component, sides and reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.world import make_cache

from baton.errors import LayoutError
from baton.plan.cache import Cache
from baton.plan.kinds import Draft, Latent, Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec, by_layer
from baton.plan.planner import plan
from baton.plan.routes import Prompt, resolve
from baton.plan.storage import Storage, parse_storage

BASE = make_cache(4, (Paged(4, 8), ((0, 4),)))
HND = parse_storage("hnd", 16, "bf16")


def refusal(
    source: Cache, target: Cache, storages: tuple[Storage, Storage] = (HND, HND), to: str = "tp1"
) -> str:
    sides = zip(("tp2", to), (source, target), storages, strict=True)
    with pytest.raises(LayoutError) as caught:
        plan(*(Spec(parse_layout(layout), cache, storage) for layout, cache, storage in sides))
    assert caught.value.component is not None
    assert caught.value.sides is not None
    return str(caught.value)


def test_caches_that_differ() -> None:
    def cache(kind, layers=((0, 4),)):
        return make_cache(4, (kind, layers))

    assert "component k" in (text := refusal(BASE, cache(Paged(4, 16))))
    assert "sizes of one unit differs: source 8 channel, target 16 channel" in text
    assert "source tp2 and target tp1" in text
    assert "component v" in refusal(BASE, cache(Paged(4, 8, 6)))
    assert "number of units differs: source 4, target 2" in refusal(BASE, cache(Paged(2, 8)))
    assert "does not cache it" in refusal(BASE, cache(Latent(8)))
    assert "needs layers 0-3, the source has 0-2" in refusal(cache(Paged(4, 8), ((0, 3),)), BASE)
    window = cache(Paged(4, 8, window=8))
    renamed = Cache(4, tuple(replace(part, name=part.name[0]) for part in window.components))
    assert "window differs: source None, target 8" in refusal(BASE, renamed)
    assert "component draft.0.k" in refusal(
        BASE, make_cache(4, (Paged(4, 8), ((0, 4),)), (Draft(Paged(4, 8)), ((4, 5),)))
    )


def test_a_source_may_have_more_than_the_target_wants() -> None:
    more = make_cache(4, (Paged(4, 8), ((0, 4),)), (Draft(Paged(4, 8)), ((4, 5),)))
    found = plan(*(Spec(parse_layout("tp2"), cache, HND) for cache in (more, BASE)))
    assert {route.component for route in resolve(found, Prompt(8))} == {"k", "v"}


def test_a_component_for_each_layer_meets_one_for_all_of_them() -> None:
    """Engines that allocate each layer by itself declare `k.0`, `k.1`; others have one `k`."""
    spec = Spec(parse_layout("pp2.tp2"), BASE, HND)
    split = by_layer(spec, "source")
    assert split.cache.by_name["k.3"].layers == ((3, 4),)
    assert by_layer(split, "source").cache == split.cache
    for ends in ((split, spec), (spec, split)):
        names = {route.component for route in plan(*ends).routes}
        assert names == {f"{name}.{layer}" for name in "kv" for layer in range(4)}
    less = replace(spec, cache=make_cache(4, (Paged(4, 8), ((0, 3),))))
    with pytest.raises(LayoutError, match=r"component k\.3, .*the source does not cache it"):
        plan(by_layer(less, "source"), spec)
    wide = replace(spec, cache=make_cache(4, (Paged(4, 16), ((0, 4),))))
    with pytest.raises(LayoutError, match=r"component k\.0, .*sizes of one unit differs: source 8 channel"):
        plan(split, wide)


def test_granules() -> None:
    def storage(words: str, page: int = 16, dtype: str = "bf16") -> Storage:
        return parse_storage(words, page, dtype)

    whole = storage("hnd.granule16")
    assert "granules differ: source 1, target 16" in refusal(BASE, BASE, (HND, whole))
    assert "page sizes differ: 16 and 32" in refusal(BASE, BASE, (whole, storage("hnd.granule16", 32)))
    assert "dtypes differ: bf16 and fp32" in refusal(
        BASE, BASE, (whole, storage("hnd.granule16", 16, "fp32"))
    )
    assert "layout inside a granule differs" in refusal(BASE, BASE, (whole, storage("nhd.granule16")))
    inner = storage("nhd.granule16")
    assert "layout inside a granule differs" in refusal(BASE, BASE, (inner, inner))
    assert "stripes of 24 tokens cut through granules of 16" in refusal(
        BASE, BASE, (whole, whole), "cp2:stripe24"
    )
    plan(*(Spec(parse_layout(layout), BASE, whole) for layout in ("tp2", "tp4")))
    plan(*(Spec(parse_layout(layout), BASE, inner) for layout in ("pp2.tp2", "tp2")))


def test_units_inside_a_granule_cannot_be_cut() -> None:
    # Over five heads rank 0 has two on both sides, so strides agree there, but other pairs share only one.
    cache = make_cache(1, (Paged(5, 8), ((0, 1),)))
    inner = parse_storage("nhd.granule16", 16, "bf16")
    with pytest.raises(LayoutError, match="granule"):
        plan(*(Spec(parse_layout(layout), cache, inner) for layout in ("tp3", "tp4")))


def test_plans_are_cached_by_value() -> None:
    first, again = (
        plan(
            *(
                Spec(parse_layout(layout), make_cache(4, (Paged(4, 8), ((0, 4),))), Storage(32))
                for layout in ("tp2", "tp4")
            )
        )
        for _ in range(2)
    )
    assert first is again


def test_a_stage_without_a_kind_holds_nothing_of_it() -> None:
    cache = make_cache(4, (Paged(2, 8), ((0, 2),)), (Recurrent(2, 8), ((2, 4),)))
    found = plan(*(Spec(parse_layout(layout), cache, HND) for layout in ("pp2", "pp4")))
    by_component = {(route.component, route.source, route.target) for route in resolve(found, Prompt(20))}
    assert by_component == {("k", 0, 0), ("k", 0, 1), ("v", 0, 0), ("v", 0, 1), ("ssm", 1, 2), ("ssm", 1, 3)}


def test_drafts_live_on_the_last_stage() -> None:
    cache = make_cache(4, (Paged(2, 8), ((0, 4),)), (Draft(Paged(2, 8)), ((4, 6),)))
    found = resolve(plan(*(Spec(parse_layout(layout), cache, HND) for layout in ("pp2", "pp3"))), Prompt(20))
    assert {(r.component, r.source, r.target, r.layers) for r in found if "draft" in r.component} == {
        (f"draft.{i}.{part}", 1, 2, ((4 + i, 5 + i),)) for i in range(2) for part in "kv"
    }
