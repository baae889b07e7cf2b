"""Policies, the prefix index and conditional disaggregation, as functions of what is known."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.serving.fleet import Fleet, FleetInstance, InstanceLoad, InstanceRates, ServerInfo, UpstreamError
from baton.serving.http import ApiError
from baton.serving.policies import (
    Policy,
    PrefixIndex,
    RawPrompt,
    TokenSize,
    local_reason,
    local_threshold,
    policy_names,
)
from baton.serving.router import (
    AllFull,
    ChosenRoute,
    LocalMode,
    NoInstance,
    RouteChooser,
    RouteConstraints,
    RouterConfig,
    RouterLimits,
    UpstreamRequest,
)
from baton.serving.wire import read_routable
from baton.session.registry import Role, Roster


@dataclass
class Candidate:
    """What policies look at of an instance."""

    name: str
    load_tokens: int = 0
    new: int = 100
    num_in_flight: int = 0


def chosen_by(policy: Policy, *candidates: Candidate) -> str:
    return policy.choose(candidates, lambda candidate: candidate.new).name  # type: ignore


def given_to(route: ChosenRoute) -> UpstreamRequest:
    """The request to the instance that answers, while it runs."""
    tokens = route.server_tokens, route.local_tokens
    return UpstreamRequest(None, route.server, RouterLimits(), (), *tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_uses_equals_alike(name: str):
    policy = Policy(name)
    chosen = Counter(chosen_by(policy, Candidate("a"), Candidate("b"), Candidate("c")) for _ in range(30))
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_unknown_policy_names_those_there_are():
    with pytest.raises(ConfigError, match="least_loaded, prefix_aware, round_robin"):
        Policy("fastest")


def test_round_robin_goes_on_when_instances_come_and_go():
    policy = Policy("round_robin")
    a, b, c = Candidate("a"), Candidate("b"), Candidate("c")
    assert [chosen_by(policy, a, b) for _ in range(3)] == ["a", "b", "a"]
    assert [chosen_by(policy, a, b, c) for _ in range(4)] == ["c", "b", "a", "c"]
    assert chosen_by(policy, a, c) == "a"


def test_least_loaded_looks_at_tokens():
    policy = Policy("least_loaded")
    assert chosen_by(policy, Candidate("a", 500), Candidate("b", 20), Candidate("c", 21)) == "b"


def test_prefix_aware_prefers_the_cache_until_the_load_outweighs_it():
    policy = Policy("prefix_aware")
    assert chosen_by(policy, Candidate("a", 900, new=10), Candidate("b", 0, new=1000)) == "a"
    assert chosen_by(policy, Candidate("a", 1100, new=10), Candidate("b", 0, new=1000)) == "b"


def names(index: PrefixIndex, text: str) -> tuple[int, ...]:
    return index.hashes(RawPrompt(text.encode()))


@settings(max_examples=100, deadline=None)
@given(st.text("ab", max_size=60), st.text("ab", max_size=60))
def test_match_is_the_common_beginning_in_whole_blocks(first: str, second: str):
    index = PrefixIndex(block_bytes=4)
    index.add("i", names(index, first))
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    assert index.matched_bytes("i", names(index, second)) == common // 4 * 4


def test_index_is_bounded_and_forgets_ends_before_beginnings():
    index = PrefixIndex(num_hashes_max=8, block_bytes=4)
    index.add("i", names(index, "a" * 40))
    assert index.matched_bytes("i", names(index, "a" * 40)) == 32
    index.add("i", names(index, "b" * 16))
    assert index.matched_bytes("i", names(index, "b" * 16)) == 16
    assert index.matched_bytes("i", names(index, "a" * 40)) == 16
    index.drop("i")
    assert index.matched_bytes("i", names(index, "b" * 16)) == 0


def test_what_goes_before_a_dialogue_counts():
    index = PrefixIndex(block_bytes=4)
    index.add("i", index.hashes(RawPrompt(b"x" * 40, seed=b"tools")))
    assert index.matched_bytes("i", index.hashes(RawPrompt(b"x" * 40))) == 0
    assert index.matched_bytes("i", index.hashes(RawPrompt(b"x" * 40, seed=b"tools"))) == 40


def instance(name: str, role: Role, fingerprint: str = "f", **told: Any) -> FleetInstance:
    found = FleetInstance(
        Roster(
            instance=name,
            role=role,
            epoch=1,
            layout="tp1",
            coordinator="127.0.0.1:7000",
            fingerprint=fingerprint,
            transport="tcp",
            url="http://127.0.0.1:9",
            ranks=(0,),
            is_complete=True,
        )
    )
    found.health.is_healthy = True
    found.health.info = ServerInfo(**{"name": name, "model": "m", "epoch": 1, "is_ready": True, **told})
    return found


def fleet_of(*instances: FleetInstance) -> Fleet:
    fleet = Fleet()
    fleet.is_registry_known = True
    fleet.instances = {each.name: each for each in instances}
    return fleet


def choosing(*instances: FleetInstance, mode: LocalMode = LocalMode.NEVER, **limits: Any) -> RouteChooser:
    config = RouterConfig("http://127.0.0.1:1", local=mode, limits=RouterLimits(**limits))
    return RouteChooser(fleet_of(*instances), config)


def asked(num_bytes: int = 400, **more: Any) -> Any:
    return read_routable("/v1/completions", json.dumps({"prompt": "x" * num_bytes, **more}).encode())


RATES = InstanceRates(prefill_tokens_per_s=1000.0, handoff_s=0.1)
P = Role.PREFILL
D = Role.DECODE


def test_only_instances_of_one_model_are_paired():
    found = choosing(instance("p", P, "f1"), instance("d", D, "f2"), instance("e", D, "f1"))
    for _ in range(4):
        route = found.choose(asked(), RouteConstraints())
        assert route.names == ("e", "p")


def test_what_instances_are_matched_by_is_made_once_for_each_report():
    found = instance("p", P)
    first = found.identity
    assert found.identity is first
    found.health.info = msgspec.structs.replace(found.health.info, has_draft=True)
    drafted = found.identity
    assert drafted.gives[0] == first.gives[0] != drafted.gives[1] == found.needs
    found.roster = msgspec.structs.replace(found.roster, fingerprint="g")
    assert found.identity.gives != drafted.gives


def test_models_are_routed_by_name():
    found = choosing(
        instance("p", P, "f1"), instance("d", D, "f1"), instance("b", Role.BOTH, "f2", model="/models/other")
    )
    assert found.choose(asked(model="m"), RouteConstraints()).names == ("d", "p")
    assert found.choose(asked(model="other"), RouteConstraints()).names == ("b",)
    with pytest.raises(ApiError) as refused:
        found.choose(asked(model="third"), RouteConstraints())
    assert (refused.value.status, refused.value.param) == (404, "model")
    with pytest.raises(ApiError) as refused:
        found.choose(asked(), RouteConstraints())
    assert refused.value.status == 400


def test_a_dp_rank_is_for_instances_that_have_it():
    instances = [instance("p", P), instance("q", P), instance("d", D), instance("e", D)]
    for each, layout in ((instances[1], "dp3"), (instances[3], "tp1.dp2")):
        each.roster = msgspec.structs.replace(each.roster, layout=layout)
    found = choosing(*instances, mode=LocalMode.AUTO)
    ranks = {"data_parallel_rank": 1, "disagg_prefill_dp_rank": 2}
    for _ in range(3):
        assert found.choose(asked(**ranks), RouteConstraints()).names == ("e", "q")
    assert found.choose(asked(routed_dp_rank=1), RouteConstraints()).server.name == "e"
    for name, rank, most in (("data_parallel_rank", 2, 1), ("disagg_prefill_dp_rank", 3, 2)):
        with pytest.raises(ApiError, match=f"{name} is {rank}: give a DP group from 0 to {most}") as refused:
            found.choose(asked(**{**ranks, name: rank}), RouteConstraints())
        assert refused.value.status == 400
    with pytest.raises(ApiError, match="routed_dp_rank is 2"):
        found.choose(asked(routed_dp_rank=2), RouteConstraints())


def test_one_token_is_for_prefill_alone():
    found = choosing(instance("p", P), instance("d", D))
    route = found.choose(asked(max_tokens=1), RouteConstraints())
    assert (route.names, route.local_reason) == (("p",), "one_token")
    route = found.choose(asked(max_tokens=0, echo=True), RouteConstraints())
    assert (route.names, route.local_reason) == (("p",), "one_token")


def test_one_instance_computes_the_log_probabilities_of_a_prompt():
    found = choosing(instance("p", P), instance("d", D))
    route = found.choose(asked(max_tokens=5, echo=True, logprobs=0), RouteConstraints())
    assert (route.names, route.local_reason) == (("d",), "form")
    for fields in ({"echo": True}, {"logprobs": 1}, {"echo": False, "logprobs": 1}):
        assert found.choose(asked(max_tokens=5, **fields), RouteConstraints()).names == ("d", "p")


def test_draining_and_unready_instances_get_nothing():
    found = choosing(instance("p", P), instance("d", D, is_draining=True), instance("e", D, is_ready=False))
    with pytest.raises(NoInstance, match=r"no decode instance is able: .*d is draining.*e is loading"):
        found.choose(asked(), RouteConstraints())


def test_what_failed_is_avoided_while_there_is_another():
    found = choosing(instance("p", P), instance("q", P), instance("d", D))
    for _ in range(3):
        assert found.choose(asked(), RouteConstraints(frozenset({"p"}))).names == ("d", "q")
    assert found.choose(asked(), RouteConstraints(frozenset({"p", "q", "d"}))).server.name == "d"
    with pytest.raises(AllFull):
        found.choose(asked(), RouteConstraints(frozenset({"d"}), is_strict=True))


def test_in_flight_is_bounded():
    found = choosing(instance("p", P), instance("d", D), num_in_flight_max=2)
    requests = [given_to(found.choose(asked(), RouteConstraints())) for _ in range(2)]
    with pytest.raises(AllFull):
        found.choose(asked(), RouteConstraints())
    requests[0].close()
    assert found.choose(asked(), RouteConstraints()).names == ("d", "p")


class Ended:
    """An upstream request as an instance ends it."""

    def __init__(self) -> None:
        self.cause: UpstreamError | None = None

    def fail(self, cause: UpstreamError) -> None:
        self.cause = cause


def told(epoch: int, *, is_ready: bool = True) -> ServerInfo:
    return ServerInfo(epoch=epoch, is_ready=is_ready, model="m")


def test_a_new_epoch_ends_the_requests_of_the_former_and_no_others():
    one, old, new = instance("d", D), Ended(), Ended()
    one.update_info(told(1))
    one.upstreams = {old}  # type: ignore[arg-type]
    one.update_info(told(0, is_ready=False))
    assert old.cause is None  # its server says so itself
    assert one.update_info(told(2))
    assert old.cause is not None
    one.upstreams = {new}  # type: ignore[arg-type]
    assert not one.update_roster(
        msgspec.structs.replace(one.roster, epoch=2)
    )  # the registry comes later with the same news
    assert new.cause is None
    assert one.update_roster(msgspec.structs.replace(one.roster, epoch=3))
    assert new.cause is not None
    assert not one.is_able
    assert not one.update_roster(msgspec.structs.replace(one.roster, epoch=2))
    assert one.roster.epoch == 3


@pytest.mark.parametrize(
    ("is_healthy", "absent_s", "unheard_s", "is_kept"),
    [
        (False, 4.0, 4.0, True),  # the registry has just been started again, and a poll was slow
        (False, 20.0, 4.0, True),
        (False, 4.0, 20.0, True),
        (False, 20.0, 20.0, False),
        (True, 30.0, 1.0, True),
        (True, 61.0, 1.0, False),
    ],
)
def test_instance_that_the_registry_forgot_stays_while_it_may_be_there(
    is_healthy: bool, absent_s: float, unheard_s: float, is_kept: bool
):
    one, leg = instance("d", D), Ended()
    one.upstreams = {leg}  # type: ignore[arg-type]
    fleet = fleet_of(one)
    fleet.apply([])
    assert one.absent_s is not None
    one.absent_s -= absent_s
    one.health.heard_s -= unheard_s
    one.health.is_healthy = is_healthy
    fleet.sweep()
    assert ("d" in fleet.instances, leg.cause is None) == (is_kept, is_kept)


def test_load_is_what_was_given_and_what_others_gave():
    one = instance("d", D)
    one.num_tokens = 50
    one.update_info(ServerInfo(epoch=1, is_ready=True, load=InstanceLoad(num_tokens=120)))
    assert one.load_tokens == 120  # 70 of somebody else
    one.num_tokens = 80
    assert one.load_tokens == 150
    one.update_info(ServerInfo(epoch=1, is_ready=True, load=InstanceLoad(num_tokens=10)))
    assert one.load_tokens == 80  # what was given a moment ago is not in its count yet


@pytest.mark.parametrize(
    ("decode_rate", "load", "tokens"),
    [
        (500.0, 0, 100),  # t/500 = t/1000 + 0.1
        (500.0, 50, 150),  # and 50 tokens wait at prefill
        (100.0, 0, 11),
        (1000.0, 0, 512),  # as fast itself: a chunk
        (None, 0, 512),
        (990.0, 0, 512),  # 9900, if it were not for running streams
    ],
)
def test_threshold_follows_the_rates(decode_rate: float | None, load: int, tokens: int):
    prefill = instance("p", P, rates=RATES, load=InstanceLoad(num_tokens=load))
    decode = instance("d", D, rates=InstanceRates(prefill_tokens_per_s=decode_rate), chunk_tokens=512)
    assert local_threshold(prefill, decode) == tokens


def test_nothing_is_local_before_anything_was_measured():
    assert local_threshold(instance("p", P), instance("d", D)) == 0


def test_short_and_cached_prompts_stay_on_decode():
    slow = InstanceRates(prefill_tokens_per_s=500.0)
    found = choosing(
        instance("p", P, rates=RATES), instance("d", D, rates=slow, chunk_tokens=512), mode=LocalMode.AUTO
    )
    assert found.choose(asked(200), RouteConstraints()).local_reason == "short"
    assert found.choose(asked(40_000), RouteConstraints()).local_reason == ""
    again = found.choose(asked(40_100), RouteConstraints())
    assert (again.local_reason, again.names) == ("cached", ("d",))


@pytest.mark.parametrize(("most", "stays"), [(None, 100), (40, 40), (0, 0)])
def test_an_operator_bounds_what_decode_prefills(most: int | None, stays: int):
    slow = InstanceRates(prefill_tokens_per_s=500.0)
    prefill, decode = instance("p", P, rates=RATES), instance("d", D, rates=slow, chunk_tokens=512)
    assert local_threshold(prefill, decode, most) == stays
    config = RouterConfig("http://127.0.0.1:9", local_prefill_max=most)
    found = RouteChooser(fleet_of(prefill, decode), config)
    reasons = {found.choose(asked(4 * num), RouteConstraints()).local_reason for num in (1, 20, 60)}
    assert reasons == {None: {"short"}, 40: {"short", ""}, 0: {""}}[most]


def test_prompt_that_prefill_has_cached_is_handed_over():
    slow = InstanceRates(prefill_tokens_per_s=500.0)
    prefill = instance("p", P, rates=RATES)
    decode = instance("d", D, rates=slow, chunk_tokens=512)
    assert local_reason(prefill, decode, 90, 90, 90) == "short"
    assert local_reason(prefill, decode, 90, 1, 90) == ""
    assert local_reason(prefill, decode, 900, 1, 50) == "cached"


def test_local_prefills_under_way_are_one_chunk_at_most():
    slow = InstanceRates(prefill_tokens_per_s=500.0)
    found = choosing(
        instance("p", P, rates=RATES), instance("d", D, rates=slow, chunk_tokens=45), mode=LocalMode.AUTO
    )
    first = found.choose(asked(96), RouteConstraints())
    request = given_to(first)
    assert first.local_reason == "short"
    assert found.choose(asked(100), RouteConstraints()).local_reason == ""
    request.release_local()
    assert found.choose(asked(96), RouteConstraints()).local_reason == "short"


def test_answers_under_way_wait_for_short_prompts_alone():
    """500 tokens/s are 50 in a tenth of a second, though decode would have up to 100 of them sooner."""
    slow = InstanceRates(prefill_tokens_per_s=500.0)
    prefill, decode = instance("p", P, rates=RATES), instance("d", D, rates=slow, chunk_tokens=512)
    found = choosing(prefill, decode, mode=LocalMode.AUTO)
    first = found.choose(asked(340), RouteConstraints())
    requests = [given_to(first)]
    requests[0].release_local()
    assert (first.local_reason, local_threshold(prefill, decode)) == ("short", 50)
    assert found.choose(asked(240), RouteConstraints()).local_reason == ""
    second = found.choose(asked(120), RouteConstraints())
    requests.append(given_to(second))
    assert second.local_reason == "short"
    assert found.choose(asked(120), RouteConstraints()).local_reason == ""  # both together are too many
    for request in requests:
        request.close()
    assert local_threshold(prefill, decode) == 100


def test_answers_of_other_routers_wait_too():
    told = {"rates": RATES, "chunk_tokens": 512}
    busy = instance("d", D, load=InstanceLoad(num_running=1, num_tokens=300), **told)
    assert local_threshold(instance("p", P, rates=RATES), busy) == 100
    assert local_threshold(instance("p", P, rates=RATES), instance("d", D, **told)) == 512


@pytest.mark.parametrize(("mode", "why"), [(LocalMode.NEVER, ""), (LocalMode.ALWAYS, "always")])
def test_local_can_be_switched(mode: LocalMode, why: str):
    found = choosing(instance("p", P, rates=RATES), instance("d", D), mode=mode)
    assert found.choose(asked(100), RouteConstraints()).local_reason == why


def test_one_side_alone_serves_where_it_may():
    assert (
        choosing(instance("d", D), mode=LocalMode.AUTO).choose(asked(), RouteConstraints()).local_reason
        == "no_prefill"
    )
    assert (
        choosing(instance("p", P), mode=LocalMode.AUTO).choose(asked(), RouteConstraints()).local_reason
        == "no_decode"
    )
    with pytest.raises(NoInstance):
        choosing(instance("d", D)).choose(asked(), RouteConstraints())


@pytest.mark.parametrize(("name", "role", "why"), [("p", P, "no_decode"), ("d", D, "no_prefill")])
def test_the_last_instance_is_tried_again_although_it_failed(name: str, role: Role, why: str):
    """A hand-over that is lost with one end may be blamed on the other."""
    avoid = frozenset({"p", "d"})
    found = choosing(instance(name, role), mode=LocalMode.AUTO)
    assert found.choose(asked(), RouteConstraints(avoid)).local_reason == why
    with pytest.raises(AllFull):
        found.choose(asked(), RouteConstraints(avoid, is_strict=True))


def test_prefill_is_found_by_its_fingerprint_and_decode_by_its_name():
    copies = [instance("p", P, model="a"), instance("d", D, model="b"), instance("e", D, model="c")]
    found = choosing(*copies, instance("q", P, "f2", model="b"))
    assert found.choose(asked(model="b"), RouteConstraints()).names == ("d", "p")
    assert found.choose(asked(model="c"), RouteConstraints()).names == ("e", "p")
    assert found.choose(asked(model="a"), RouteConstraints()).prefill is copies[0]
    adapters = choosing(instance("p", P, models=("a",)), instance("d", D, models=("a", "lora")))
    with pytest.raises(NoInstance):
        adapters.choose(asked(model="lora"), RouteConstraints())


def test_bytes_per_token_are_learned():
    sizes = TokenSize()
    for _ in range(100):
        sizes.add(600, 300)
    assert 1.9 < sizes.bytes_per_token < 2.1
    sizes.add(0, 0)
    assert RawPrompt(b"x" * 600).num_tokens(sizes.bytes_per_token) == pytest.approx(300, abs=15)
