"""The JSON contract, read by someone who knows nothing but the contract and the layout strings."""

from __future__ import annotations

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.plan.world import token_owners, unit_owners

from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.report import Report, pages_needed
from baton.plan.routes import Prompt
from baton.plan.steps import PackCost
from baton.plan.storage import parse_storage

EXAMPLE = {
    "version": 1,
    "model": "paged:layers=4,heads=4,dim=64",
    "tokens": 200,
    "skip_tokens": 0,
    "source": {"layout": "tp2", "ranks": 2, "page": 64, "dp": 0},
    "target": {"layout": "cp2:stripe64.tp1", "ranks": 2, "page": 64, "dp": 0},
    "components": [
        {"name": "k", "layers": [[0, 4]], "units": 4, "window": None, "bytes_per_unit": 128},
        {"name": "v", "layers": [[0, 4]], "units": 4, "window": None, "bytes_per_unit": 128},
    ],
    "token_sets": [[[0, 200, 64, 128]], [[64, 200, 64, 128]]],
    "bytes": {"total": 819200, "by_source": [409600, 409600], "by_target": [524288, 294912]},
    "copies": {"count": 80, "bytes_median": 16384, "packed_pairs": 0},
    "idle_sources": [],
}


def contract(
    model: str, ends: tuple[str, str], tokens: int, *, pages=(64, 64), dps=(0, 0), skip: int = 0
) -> dict:
    cache = load_cache(model)
    groups = sorted({part.group for part in cache.components if part.extent.has_tokens})
    prompt = Prompt(tokens, dict.fromkeys(groups, skip) if skip else {})
    specs = []
    for layout, page in zip(ends, pages, strict=True):
        bare = Spec(parse_layout(layout), cache, parse_storage("hnd", page, "bf16"))
        specs.append(Spec(bare.layout, cache, bare.storage.with_pages(pages_needed(bare, prompt))))
    return json.loads(json.dumps(Report(model, plan(*specs, *dps), prompt, PackCost()).as_json()))


def test_the_documented_example() -> None:
    found = contract("paged:layers=4,heads=4,dim=64", ("tp2", "cp2:stripe64.tp1"), 200)
    assert found["routes"][0] == {
        "source": 0, "target": 0, "component": "k",
        "layers": [[0, 4]], "units": [0, 2], "tokens": 0, "bytes": 131072
    }  # fmt: skip
    assert len(found["routes"]) == 8
    assert {key: value for key, value in found.items() if key != "routes"} == EXAMPLE
    assert list(found) == [*list(EXAMPLE)[:8], "routes", *list(EXAMPLE)[8:]]


def ids(ranges: list[list[int]]) -> list[int]:
    return [i for a, b in ranges for i in range(a, b)]


def tokens_of(items: list[list[int]]) -> list[int]:
    found = []
    for start, stop, *rest in items:
        block, period = rest or (1, 1)
        found += [t for t in range(start, stop) if (t - start) % period < block]
    return found


def stage_of(text: str, num_layers: int, layer: int) -> int:
    stages = next((part for part in text.split(".") if part.startswith("pp")), "pp1")
    size, _, option = stages[2:].partition(":")
    count = int(size)
    sizes = [int(n) for n in option.split("-")] if option else None
    sizes = sizes or [num_layers // count + (i >= count - num_layers % count) for i in range(count)]
    bounds = [sum(sizes[: i + 1]) for i in range(count)]
    return next(i for i, bound in enumerate(bounds) if layer < bound or i == count - 1)


def holders(found: dict, side: str, num_layers: int, spec: Spec) -> dict:
    """(component, layer, unit, token) -> ranks of the chosen dp group that own it, from words alone."""
    layout, owned = spec.layout, {}
    for rank in range(layout.num_ranks):
        at = layout.coordinates(rank)
        if at["dp"] != found[side]["dp"]:
            continue
        for part in found["components"]:
            units = (
                [None] if part["units"] is None else unit_owners(part["units"], layout.size("tp"))[at["tp"]]
            )
            tokens = [None]
            if not part["name"].startswith(("ssm", "conv")):
                tokens = [
                    t for t in range(found["tokens"]) if at["cp"] in token_owners(spec, t, found["tokens"])
                ]
            for layer in ids(part["layers"]):
                if stage_of(layout.text, num_layers, layer) == at["pp"]:
                    for unit in units:
                        for token in tokens:
                            owned.setdefault((part["name"], layer, unit, token), set()).add(rank)
    return owned


def is_needed(found: dict, element: tuple) -> bool:
    name, _, _, token = element
    if token is None:
        return True
    window = next(part["window"] for part in found["components"] if part["name"] == name)
    first = max(found["skip_tokens"], found["tokens"] - window if window else 0)
    return token >= first


MODELS = [
    "paged:layers=3,heads=4,dim=2",
    "paged:layers=2,heads=2,dim=2,vdim=3+paged:layers=2,heads=6,dim=2,window=9",
    "latent:layers=3,dim=5,index=2",
    "paged:layers=2,heads=2,dim=2+recurrent:layers=3,heads=4,state=3",
    "latent:layers=2,dim=3+draft.paged:layers=1,heads=2,dim=2",
]
LAYOUTS = [
    "tp1",
    "tp2",
    "tp4",
    "pp2.tp2",
    "tp2.pp2:1-2",
    "cp2.tp2",
    "cp3:split",
    "cp2:mirror.tp2",
    "dp2.tp2",
    "cp2:stripe1.pp2",
]


@st.composite
def questions(draw):
    model = draw(st.sampled_from(MODELS))
    cache = load_cache(model)
    fits = [text for text in LAYOUTS if "1-2" not in text or cache.num_layers == 3]
    ends = (draw(st.sampled_from(fits)), draw(st.sampled_from(fits)))
    dps = tuple(draw(st.integers(0, parse_layout(text).size("dp") - 1)) for text in ends)
    pages = (draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([2, 3, 4])))
    skip = draw(st.sampled_from([0, 2 * pages[1] * 3 if "split" not in ends[1] else 0]))
    return model, ends, skip + draw(st.integers(1, 20)), pages, dps, skip


@given(questions())
def test_routes_cover_every_owned_element_once(question) -> None:
    model, ends, tokens, pages, dps, skip = question
    found = contract(model, ends, tokens, pages=pages, dps=dps, skip=skip)
    cache = load_cache(model)
    specs = [
        Spec(parse_layout(text), cache, parse_storage("hnd", page, "bf16"))
        for text, page in zip(ends, pages, strict=True)
    ]
    given_by, wanted_by = (
        holders(found, side, cache.num_layers, spec)
        for side, spec in zip(("source", "target"), specs, strict=True)
    )
    sizes = {part["name"]: part["bytes_per_unit"] for part in found["components"]}
    arrived: Counter = Counter()
    by_source, by_target = [0] * found["source"]["ranks"], [0] * found["target"]["ranks"]
    for route in found["routes"]:
        members = [None] if route["tokens"] is None else tokens_of(found["token_sets"][route["tokens"]])
        units = [None] if route["units"] is None else range(*route["units"])
        elements = [
            (route["component"], a, b, c) for a in ids(route["layers"]) for b in units for c in members
        ]
        assert elements
        assert route["bytes"] == len(elements) * sizes[route["component"]]
        by_source[route["source"]] += route["bytes"]
        by_target[route["target"]] += route["bytes"]
        for element in elements:
            assert route["source"] in given_by[element]
            assert route["target"] in wanted_by[element]
            arrived[route["target"], element] += 1
    wanted = {
        (rank, element) for element, ranks in wanted_by.items() for rank in ranks if is_needed(found, element)
    }
    assert set(arrived) == wanted
    assert set(arrived.values()) <= {1}
    assert found["bytes"] == {"total": sum(by_source), "by_source": by_source, "by_target": by_target}
    group = [r for r in range(found["source"]["ranks"]) if specs[0].layout.coordinates(r)["dp"] == dps[0]]
    assert found["idle_sources"] == [rank for rank in group if not by_source[rank]]
    keys = [
        (r["source"], r["target"], r["component"], r["units"] or [], r["tokens"] or 0)
        for r in found["routes"]
    ]
    assert keys == sorted(keys)
    assert len({json.dumps(key) for key in keys}) == len(keys)
    for items in found["token_sets"]:
        listed = tokens_of(items)
        assert listed
        assert items == sorted(items)
        assert len(listed) == len(set(listed))
