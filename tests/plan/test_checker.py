"""The checkers catch corrupted plans: one hole, overlap, wrong owner or lost token each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.plan.world import make_cache

from baton.errors import PlanError
from baton.plan.checker import check, prove
from baton.plan.kinds import Latent, Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.routes import BoundRoute, Plan, Prompt, RoundRobin, Route, resolve
from baton.plan.storage import Storage
from baton.plan.tokens import TokenSet, set_runs

CACHE = make_cache(
    6,
    (Paged(4, 2), ((0, 2),)),
    (Paged(4, 2, window=100), ((2, 4),)),
    (Latent(3), ((4, 5),)),
    (Recurrent(4, 5), ((5, 6),)),
)
PROMPT = Prompt(500, {"tokens": 128})


def make_plan() -> Plan:
    layouts = ("pp2.tp4.dp2", "dp2.cp2.tp2")
    return plan(*(Spec(parse_layout(layout), CACHE, Storage(page_tokens=32)) for layout in layouts), 1, 0)


Corruption = Callable[[list[BoundRoute]], list[BoundRoute]]


def of(routes: list[BoundRoute], component: str) -> int:
    return next(i for i, route in enumerate(routes) if route.component == component)


def edit(which: str, **changes: object) -> Corruption:
    def corrupt(routes: list[BoundRoute]) -> list[BoundRoute]:
        at = of(routes, which)
        routes[at] = replace(routes[at], **changes)
        return routes

    return corrupt


def resized(route: BoundRoute, tokens: TokenSet) -> BoundRoute:
    """The route with other tokens and the byte count that goes with them, so that only its cover is wrong."""
    per_token = route.num_bytes // set_runs(route.tokens).num_tokens
    return replace(route, tokens=tokens, num_bytes=per_token * set_runs(tokens).num_tokens)


def hole(routes: list[BoundRoute]) -> list[BoundRoute]:
    return routes[1:]


def overlap(routes: list[BoundRoute]) -> list[BoundRoute]:
    return [*routes, routes[3]]


def swapped_components(routes: list[BoundRoute]) -> list[BoundRoute]:
    at = of(routes, "k")
    routes[at] = replace(routes[at], component="v")
    return routes


def wrong_owner(routes: list[BoundRoute]) -> list[BoundRoute]:
    at = of(routes, "k")
    other = next(r.source for r in routes if r.component == "k" and r.units != routes[at].units)
    routes[at] = replace(routes[at], source=other)
    return routes


def wrong_target(routes: list[BoundRoute]) -> list[BoundRoute]:
    at = of(routes, "v")
    other = next(r.target for r in routes if r.component == "v" and r.target != routes[at].target)
    routes[at] = replace(routes[at], target=other)
    return routes


def shifted_head(routes: list[BoundRoute]) -> list[BoundRoute]:
    at = of(routes, "k")
    low, high = routes[at].units
    routes[at] = replace(routes[at], units=(low + 1, high + 1))
    return routes


def lost_token(component: str) -> Corruption:
    def corrupt(routes: list[BoundRoute]) -> list[BoundRoute]:
        at = of(routes, component)
        first, *rest = routes[at].tokens
        last = int(set_runs([first]).stops[-1]) - 1
        routes[at] = resized(routes[at], ((first[0], last, *first[2:]), *rest))
        return routes

    return corrupt


def late_window(routes: list[BoundRoute]) -> list[BoundRoute]:
    at = of(routes, "k.w100")
    first, *rest = routes[at].tokens
    later = (first[0] + 1, *first[1:])
    routes[at] = resized(routes[at], (later, *rest))
    return routes


def sent_though_held(routes: list[BoundRoute]) -> list[BoundRoute]:
    at = of(routes, "latent")
    first, *rest = routes[at].tokens
    earlier = (first[0] - first[3], *first[1:])
    routes[at] = resized(routes[at], (earlier, *rest))
    return routes


def lost_layer(routes: list[BoundRoute]) -> list[BoundRoute]:
    at = of(routes, "v")
    (start, stop), *_ = routes[at].layers
    routes[at] = replace(routes[at], layers=((start, stop - 1),), num_bytes=routes[at].num_bytes // 2)
    return routes


CORRUPTIONS: dict[str, Corruption] = {
    "hole": hole,
    "overlap": overlap,
    "swapped components": swapped_components,
    "wrong owner": wrong_owner,
    "wrong target": wrong_target,
    "off-by-one head": shifted_head,
    "lost window token": late_window,
    "lost token": lost_token("k"),
    "lost latent token": lost_token("latent"),
    "held token sent": sent_though_held,
    "lost layer": lost_layer,
    "wrong byte count": edit("ssm", num_bytes=1),
    "tokens for a state": edit("ssm", tokens=((0, 1),)),
    "no tokens for k": edit("k", tokens=None),
    "units for latent": edit("latent", units=(0, 1)),
    "token out of bounds": edit("latent", tokens=((128, 501),)),
    "token named twice": edit("latent", tokens=((128, 200), (150, 180))),
    "rank of another dp group": edit("k", source=0),
    "unknown component": edit("k", component="q"),
}


def test_an_honest_plan_passes() -> None:
    found = make_plan()
    prove(found)
    check(found, PROMPT, resolve(found, PROMPT))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_catches(name: str) -> None:
    found = make_plan()
    honest = list(resolve(found, PROMPT))
    corrupted = CORRUPTIONS[name](list(honest))
    assert corrupted != honest
    with pytest.raises(PlanError):
        check(found, PROMPT, corrupted)


RuleCorruption = Callable[[list[Route]], list[Route]]


def rule(component: str, **changes: object) -> RuleCorruption:
    def corrupt(routes: list[Route]) -> list[Route]:
        at = next(i for i, route in enumerate(routes) if route.component == component)
        routes[at] = replace(routes[at], **changes)
        return routes

    return corrupt


RULES: dict[str, RuleCorruption] = {
    "hole": lambda routes: routes[1:],
    "overlap": lambda routes: [*routes, routes[0]],
    "lost turn": rule("latent", turns=RoundRobin(0, 1, 3)),
    "doubled turn": rule("latent", turns=RoundRobin(0, 2, 2)),
    "wrong share of the target": rule("k", target_share=1),
    "wrong share of the source": rule("k", source_share=1),
    "wrong unit": rule("k", units=(1, 2)),
    "wrong layers": rule("v", layers=((0, 1),)),
    "another dp group": rule("k", source=0),
    "another target": rule("k", target=3),
}


@pytest.mark.parametrize("name", RULES)
def test_proof_catches(name: str) -> None:
    found = make_plan()
    corrupted = tuple(RULES[name](list(found.routes)))
    assert corrupted != found.routes
    with pytest.raises(PlanError):
        prove(replace(found, routes=corrupted))
