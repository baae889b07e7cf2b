"""What a registry knows, on a virtual clock: epochs, completeness and expiry."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.session.registry_world import member

from baton.session.registry import ChangeKind, Member, Refusal, RegistryError, Role
from baton.session.registry.state import EPOCH_KEPT_S, Capacity, RegistryState


def told(state: RegistryState) -> list[tuple[str, int, int, bool]]:
    return [
        (change.what.value, change.member.rank, change.member.epoch, change.is_complete)
        for change in state.take_changes()
    ]


def refusal_of(call, *args) -> Refusal:
    with pytest.raises(RegistryError) as caught:
        call(*args)
    return caught.value.refusal


def test_registering_again_renews_and_changes_nothing() -> None:
    state = RegistryState("boot")
    assert state.register(member(ttl_s=10), 0.0)
    before = state.topology(0.0)
    told(state)
    assert not state.register(member(ttl_s=10), 8.0)
    assert told(state) == []
    assert state.topology(17.9) == before
    assert state.topology(18.0).instances == ()


def test_an_instance_is_complete_when_all_ranks_of_its_layout_are_there() -> None:
    state = RegistryState("boot")
    for rank in (3, 0, 2):
        state.register(member(rank=rank, layout="pp2.tp2"), 0.0)
    found = state.topology(0.0)
    assert [(gap.instance, gap.ranks) for gap in found.missing] == [("p0", (1,))]
    assert found.instances[0].ranks == (0, 2, 3)
    assert not found.instances[0].is_complete
    told(state)
    state.register(member(rank=1, layout="pp2.tp2"), 1.0)
    assert told(state) == [("registered", 1, 1, True)]
    assert state.topology(1.0).is_complete
    assert state.topology(1.0).instances[0].coordinator == "10.0.0.1:7000"


def test_nothing_is_not_complete() -> None:
    state = RegistryState("boot")
    assert not state.topology(0.0).is_complete
    assert [gap.instance for gap in state.topology(0.0, ["a", "b"]).missing] == ["a", "b"]


def test_one_incomplete_instance_makes_the_whole_incomplete_but_not_the_others() -> None:
    state = RegistryState("boot")
    state.register(member("a", layout="tp1"), 0.0)
    state.register(member("b", layout="tp2"), 0.0)
    assert not state.topology(0.0).is_complete
    assert state.topology(0.0, ["a"]).is_complete
    assert [roster.instance for roster in state.topology(0.0, ["a"]).instances] == ["a"]


def test_a_higher_epoch_displaces_the_lower_with_everything_it_had() -> None:
    state = RegistryState("boot")
    for rank in (0, 1):
        state.register(member(rank=rank), 0.0)
    told(state)
    state.register(member(rank=1, epoch=2, layout="dp2.tp1"), 1.0)
    assert told(state) == [
        ("displaced", 0, 1, False),
        ("displaced", 1, 1, False),
        ("registered", 1, 2, False),
    ]
    found = state.topology(1.0)
    assert (found.instances[0].epoch, found.instances[0].ranks) == (2, (1,))


def test_ranks_of_two_epochs_never_complete_each_other() -> None:
    state = RegistryState("boot")
    state.register(member(rank=0, epoch=1), 0.0)
    state.register(member(rank=1, epoch=2), 0.0)
    assert [gap.ranks for gap in state.topology(0.0).missing] == [(0,)]


def test_a_lower_epoch_is_refused_with_the_reason_also_after_the_higher_one_left() -> None:
    state = RegistryState("boot")
    state.register(member(epoch=7), 0.0)
    with pytest.raises(RegistryError, match=r"epoch 6 of instance 'p0' is over: epoch 7 has registered"):
        state.register(member(epoch=6), 0.0)
    assert state.unregister("p0", 0, 7, 1.0)
    assert refusal_of(state.register, member(epoch=6), EPOCH_KEPT_S) is Refusal.DISPLACED
    assert state.register(member(epoch=6), 1.0 + EPOCH_KEPT_S)


def test_the_dead_do_not_unregister_the_living() -> None:
    state = RegistryState("boot")
    state.register(member(epoch=1), 0.0)
    state.register(member(epoch=2), 0.0)
    assert not state.unregister("p0", 0, 1, 0.0)
    assert state.topology(0.0).instances[0].ranks == (0,)
    assert state.unregister("p0", 0, 2, 0.0)
    assert not state.unregister("p0", 0, 2, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layout", "tp4"),
        ("role", Role.DECODE),
        ("coordinator", "10.0.0.2:7000"),
        ("url", "http://10.0.0.2:8000"),
        ("fingerprint", "beef"),
        ("transport", "shm"),
    ],
)
def test_members_of_one_epoch_have_to_agree(name: str, value: object) -> None:
    state = RegistryState("boot")
    state.register(member(rank=0), 0.0)
    with pytest.raises(RegistryError, match=rf"^{name} of rank 1 is .* but rank 0 registered") as caught:
        state.register(member(rank=1, **{name: value}), 0.0)
    assert caught.value.refusal is Refusal.CONFLICT
    assert state.topology(0.0).instances[0].ranks == (0,)


def test_when_all_are_gone_the_epoch_may_be_another_layout() -> None:
    state = RegistryState("boot")
    state.register(member(layout="dp2"), 0.0)
    state.unregister("p0", 0, 1, 0.0)
    assert state.register(member(layout="tp1"), 0.0)
    assert state.topology(0.0).is_complete


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"rank": 2}, "rank must be 0 to 1, the ranks of layout tp2; found 2"),
        ({"rank": -1}, "rank must be a whole number from 0"),
        ({"layout": "tp0"}, "layout cannot be used: layout 'tp0'"),
        ({"layout": ""}, "layout must be"),
        ({"coordinator": "nowhere"}, "coordinator must be .* found 'nowhere'"),
        ({"coordinator": "host:0"}, "coordinator must be"),
        ({"coordinator": "host:65536"}, "coordinator must be"),
        ({"url": "host:80"}, "url must be .* found 'host:80'"),
        ({"url": "http://host:65536"}, "url must be"),
        ({"url": "http://host/" + "a" * 256}, "url must be"),
        ({"url": "http://host/\n"}, "url must be"),
        ({"instance": "a/b"}, "instance must be .* found 'a/b'"),
        ({"instance": ".."}, "instance must be"),
        ({"instance": "p\n"}, "instance must be"),
        ({"epoch": -1}, "epoch must be"),
        ({"epoch": 1 << 63}, "epoch must be"),
        ({"ttl_s": 0}, "ttl_s must be"),
        ({"ttl_s": float("inf")}, "ttl_s must be"),
        ({"ttl_s": float("nan")}, "ttl_s must be"),
        ({"fingerprint": ""}, "fingerprint must be"),
        ({"transport": "a\nb"}, "transport must be"),
    ],
)
def test_a_member_that_cannot_be_is_refused_by_field_and_value(fields: dict, names: str) -> None:
    state = RegistryState("boot")
    with pytest.raises(RegistryError, match=names) as caught:
        state.register(member(**fields), 0.0)
    assert caught.value.refusal is Refusal.INVALID
    assert state.next_expiry() is None


@pytest.mark.parametrize("address", ["a:1", "10.0.0.1:65535", "[::1]:80", "host-1.example.org:7000"])
def test_addresses_that_can_be(address: str) -> None:
    assert RegistryState("boot").register(member(coordinator=address), 0.0)


def test_what_an_instance_left_behind_is_forgotten_in_the_end() -> None:
    state = RegistryState("boot")
    state.register(member(ttl_s=1), 0.0)
    state.expire(1.0)
    assert state.next_expiry() == 1.0 + EPOCH_KEPT_S
    state.expire(1.0 + EPOCH_KEPT_S)
    assert state.next_expiry() is None
    assert state.register(member(epoch=0), 1.0 + EPOCH_KEPT_S)


def test_a_full_registry_says_so_and_still_renews() -> None:
    state = RegistryState("boot", Capacity(num_instances_max=2, num_members_max=2))
    state.register(member("a"), 0.0)
    state.register(member("b"), 0.0)
    assert refusal_of(state.register, member("b", rank=1), 0.0) is Refusal.FULL
    assert not state.register(member("a"), 1.0)
    state.unregister("b", 0, 1, 2.0)
    assert refusal_of(state.register, member("c"), 2.0) is Refusal.FULL  # b's epoch is remembered
    assert [roster.instance for roster in state.topology(2.0).instances] == ["a"]


NAMES = ("a", "b")
LAYOUT = "dp2.tp2"
TTLS = (1.0, 4.0, 30.0)


@dataclass
class Model:
    """The same rules, said as slowly and plainly as possible."""

    members: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)  # epoch, until
    epochs: dict[str, int] = field(default_factory=dict)

    def expire(self, now: float) -> None:
        self.members = {key: value for key, value in self.members.items() if value[1] > now}

    def register(self, value: Member, now: float) -> Refusal | bool:
        if value.epoch < self.epochs.get(value.instance, 0):
            return Refusal.DISPLACED
        if value.epoch > self.epochs.get(value.instance, 0):
            self.members = {key: held for key, held in self.members.items() if key[0] != value.instance}
        self.epochs[value.instance] = value.epoch
        is_new = (value.instance, value.rank) not in self.members
        self.members[value.instance, value.rank] = (value.epoch, now + value.ttl_s)
        return is_new

    def unregister(self, instance: str, rank: int, epoch: int) -> bool:
        if self.members.get((instance, rank), (None, 0.0))[0] != epoch:
            return False
        del self.members[instance, rank]
        return True


def answer(call, *args) -> object:
    try:
        return call(*args)
    except RegistryError as error:
        return error.refusal


names, ranks, epochs = st.sampled_from(NAMES), st.integers(0, 3), st.integers(1, 3)
ttls = st.sampled_from(TTLS)
steps = st.one_of(
    st.tuples(st.just("register"), names, ranks, epochs, ttls),
    st.tuples(st.just("unregister"), names, ranks, epochs),
    st.tuples(st.just("pass"), st.sampled_from((0.5, 1.0, 3.0, 20.0))),
)


@given(st.lists(steps, max_size=30))
def test_any_order_of_calls_gives_what_the_rules_say(calls: list[tuple]) -> None:
    state, model, now = RegistryState("boot"), Model(), 0.0
    seen: set[tuple[str, int, int]] = set()
    for name, *args in calls:
        model.expire(now)
        match name, args:
            case "pass", [seconds]:
                now += seconds
            case "register", [instance, rank, epoch, ttl_s]:
                value = member(instance, rank, epoch, LAYOUT, ttl_s=ttl_s)
                assert answer(state.register, value, now) == model.register(value, now)
            case "unregister", _:
                assert state.unregister(*args, now) == model.unregister(*args)
        check(state, model, now, seen)


def follow(state: RegistryState, seen: set[tuple[str, int, int]]) -> None:
    """Brings what a watcher believes up to date with the changes that it hears."""
    for change in state.take_changes():
        key = (change.member.instance, change.member.rank, change.member.epoch)
        if change.what is ChangeKind.REGISTERED:
            assert key not in seen
            seen.add(key)
        else:
            seen.remove(key)


def check(state: RegistryState, model: Model, now: float, seen: set[tuple[str, int, int]]) -> None:
    model.expire(now)
    found = state.topology(now)
    follow(state, seen)
    there = {(roster.instance, rank, roster.epoch) for roster in found.instances for rank in roster.ranks}
    assert there == seen == {(*key, epoch) for key, (epoch, _) in model.members.items()}
    assert [roster.is_complete for roster in found.instances] == [
        len(roster.ranks) == 4 for roster in found.instances
    ]
    times = [until for _, until in model.members.values()]
    due = state.next_expiry()
    assert not times or (due is not None and now < due <= min(times))
