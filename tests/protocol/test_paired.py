"""Both sides of a transfer together, without drivers: random interleavings, broken machines, named races."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from tests.protocol.choices import Choices, choices
from tests.protocol.paired_setup import (
    DIGEST,
    NONE,
    BrokenError,
    Faults,
    Machines,
    Setup,
    faults_of,
    setup_of,
)
from tests.protocol.paired_variants import VARIANTS
from tests.protocol.paired_world import World
from tests.protocol.values import AUX

from baton.protocol.arrival import ReceiverState
from baton.protocol.departure import OfferState, Prefill
from baton.protocol.ledger import Need, Pair, Rectangle
from baton.protocol.messages import Abort, Commit, Grant, Landed, Offer, Quiet, Settled
from baton.protocol.outcomes import Cause, Failed, Finished, Outcome, Ready, Stage, Why
from baton.protocol.sender import Aborted, AnswerEnded, Chunk, ChunkReady, Sealed, SenderState

NUM_BYTES = 400
NUM_RUNS_MAX = 6000


@given(choices(NUM_BYTES))
def test_whatever_happens(found: Choices):
    World(setup_of(found, faults_of(found)), found).run()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant[0].__name__)
def test_a_machine_that_is_wrong_is_found_out(variant: tuple[Callable[[], Machines], Faults, str]):
    make, faults, word = variant
    machines, seeds = make(), random.Random(7)
    for _ in range(NUM_RUNS_MAX):
        found = Choices(seeds.randbytes(NUM_BYTES))
        try:
            World(setup_of(found, faults), found, machines).run()
        except BrokenError as broken:
            if word in str(broken):
                return
        except (AssertionError, LookupError):
            continue  # lost in a state that it should never have come to
    pytest.fail(f"{make.__name__} was not found out in {NUM_RUNS_MAX} runs")


# One transfer, step by step. Without bytes the choices always take the first of what can happen.

WHOLE = Rectangle((0, 2), (0, 4))
HALVES = (Rectangle((0, 2), (0, 2)), Rectangle((0, 2), (2, 4)))
GIVEN_UP = Aborted(Cause(Why.ABORTED, Stage.COPY, "prefill", 0, "given up"))
OFFERS = Prefill(4, DIGEST, 0)
ALL_OF_IT = {(0, 0): Need((0, 2), 0)}


def script(*boxes: Rectangle, aux: bool = True) -> tuple[object, ...]:
    ready = [ChunkReady(Chunk(index, box)) for index, box in enumerate(boxes)]
    return (OFFERS, *ready, Sealed(AUX if aux else None))


def world(
    *scripts: tuple[object, ...],
    needs: dict[Pair, Need] | None = None,
    worked: tuple[Pair, ...] = (),
    faults: Faults = NONE,
    num_targets: int = 1,
) -> World:
    setup = Setup(
        num_tokens=4,
        num_targets=num_targets,
        needs=ALL_OF_IT if needs is None else needs,
        worked=frozenset(worked),
        scripts=dict(enumerate(scripts)),
        knows_group=True,
        faults=faults,
    )
    return World(setup, Choices(b""))


def granted(*scripts: tuple[object, ...], **options: object) -> World:
    """A world in which the grant is on its way to the source."""
    one = world(*scripts, **options)  # type: ignore[arg-type]
    target = one.targets[0]
    target.begin()
    target.prepare()
    for rank in target.ranks.values():
        rank.hear()
        target.hear(rank.rank)
    return one


def deliver(one: World, index: int = 0) -> object:
    """Lets a message of the first target reach the source."""
    link = one.targets[0].link
    letter = link.to_source[index]
    del link.to_source[index]
    one.source.receive(link, letter.message)
    return letter.message


def bring(one: World, index: int = 0) -> object:
    """Lets a message of the source reach the first target."""
    link = one.targets[0].link
    letter = link.to_target[index]
    del link.to_target[index]
    one.targets[0].receive(letter.message)
    return letter.message


def pass_on(one: World, rank: int = 0) -> None:
    """Everything that a source rank has said reaches its coordinator."""
    while one.source.ranks[rank].outbox:
        one.source.hear(rank)


def finish(one: World) -> tuple[list[Outcome], Outcome | None]:
    """Everything else happens, nothing else goes wrong."""
    one.settle()
    one.check_over()
    return one.outcomes()


def whys(one: World) -> set[Why]:
    told, verdict = finish(one)
    assert all(isinstance(found, Failed) for found in [*told, verdict])
    return {found.cause.why for found in [*told, verdict] if isinstance(found, Failed)}


def sent(one: World) -> list[type]:
    """What is under way from the source to the first target."""
    return [type(letter.message) for letter in one.targets[0].link.to_target]


def test_the_fast_path_message_by_message():
    one = granted(script(WHOLE))
    rank, target = one.source.ranks[0], one.targets[0]
    rank.call()
    pass_on(one)
    assert isinstance(deliver(one), Grant)
    assert sent(one) == [Offer]
    rank.hear()
    rank.call()
    assert list(rank.last.flights) == [0]
    rank.end_flight(0, "done")
    rank.call()
    pass_on(one)
    assert sent(one)[:2] == [Offer, Landed]
    assert sent(one)[-1] is Commit
    for _ in range(4):
        bring(one)
    assert target.conclusions == [Ready(AUX)]
    assert target.memory.is_released
    assert isinstance(deliver(one), Settled)
    assert sent(one) == [Quiet]
    assert finish(one) == ([Ready(AUX)], Ready(AUX))


@pytest.mark.parametrize("scripts", [[script()], [script(WHOLE)], [script(), script(WHOLE, aux=False)]])
def test_a_hand_over_without_bytes(scripts: list[tuple[object, ...]]):
    """The target holds everything: no lanes, nothing expected, an empty ledger; chunks may come anyway."""
    one = world(*scripts, needs={})
    assert finish(one)[1] == Ready(AUX)
    assert one.targets[0].memory.written == {}


def test_a_hand_over_of_state_alone():
    one = world(script(*HALVES), needs={(0, 0): Need((1, 2), 3)})
    assert finish(one)[1] == Ready(AUX)
    assert one.targets[0].memory.written[0, 0] == {(1, 3): 1}


def test_ranks_that_have_nothing_to_send_or_to_get():
    scripts = [script(*HALVES), script(aux=False), script(WHOLE, aux=False)]
    one = world(*scripts, needs={(0, 0): Need((0, 2), 0), (2, 0): Need((0, 1), 2)}, num_targets=2)
    told, verdict = finish(one)
    assert verdict == Ready(AUX)
    assert told == [Ready(AUX)] * 3


def test_commit_overtakes_landed():
    one = granted(script(*HALVES))
    one.source.ranks[0].call()
    rank = one.source.ranks[0]
    pass_on(one)
    deliver(one)
    rank.hear()
    while rank.script:
        rank.call()
    for index in (0, 1):
        rank.end_flight(index, "done")
    pass_on(one)
    assert isinstance(bring(one, len(sent(one)) - 1), Commit)
    assert one.targets[0].record.state is ReceiverState.GRANTED
    while sent(one):
        bring(one, len(sent(one)) - 1)
    assert finish(one)[1] == Ready(AUX)


def test_abort_of_a_rank_crosses_the_grant():
    """The rank has ended when its grant comes: it never copies, and its quiet counts."""
    one = granted((OFFERS, ChunkReady(Chunk(0, WHOLE)), GIVEN_UP))
    rank = one.source.ranks[0]
    rank.call()
    pass_on(one)
    deliver(one)
    rank.call()
    rank.call()
    assert rank.last.record.state is SenderState.ENDED
    rank.hear()
    assert rank.last.record.state is SenderState.ENDED
    assert rank.last.flights == {}
    assert whys(one) == {Why.ABORTED}


def test_a_new_attempt_does_not_take_the_grant_of_the_old():
    """The engine gives up and begins anew under the same id while the first grant is on its way to it."""
    again = (OFFERS, ChunkReady(Chunk(0, WHOLE)), GIVEN_UP, *script(WHOLE))
    one = granted(again)
    rank = one.source.ranks[0]
    rank.call()
    pass_on(one)
    deliver(one)
    for _ in range(3):
        rank.call()
    assert rank.last.num_retired == 0, "the id is taken until the verdict has come"
    assert not rank.script, "so the second attempt was refused"
    assert whys(one) == {Why.ABORTED}


def test_abort_of_the_target_overtakes_its_grant():
    one = granted(script(WHOLE))
    one.source.ranks[0].call()
    pass_on(one)
    one.targets[0].abort()
    assert isinstance(deliver(one, 1), Abort)
    assert isinstance(deliver(one), Grant)
    assert one.source.record.state is OfferState.DECIDED
    assert one.source.ranks[0].last.flights == {}
    assert Quiet in sent(one)
    assert whys(one) == {Why.ABORTED}


def test_quiet_and_then_a_delayed_grant():
    """The source has said quiet of a grant that it never saw; when it comes, nobody takes it."""
    one = granted(script(WHOLE))
    link = one.targets[0].link
    held = link.to_source.popleft()
    one.targets[0].abort()
    deliver(one)
    one.tick(2.0)
    one.settle()
    assert one.targets[0].memory.is_released
    link.to_source.append(held)
    assert finish(one)[1] == Failed(one.targets[0].conclusions[0].cause)
    assert one.source.ranks[0].last.last_word == "Quiet"


def test_quiet_crosses_abort():
    """Quiet comes before the reason: nothing is decided by it, and nothing has to be asked for twice."""
    one = granted((OFFERS, ChunkReady(Chunk(0, WHOLE)), GIVEN_UP))
    rank, target = one.source.ranks[0], one.targets[0]
    rank.call()
    pass_on(one)
    deliver(one)
    rank.hear()
    rank.call()
    rank.call()
    rank.end_flight(0, "failed")
    pass_on(one)
    assert sent(one) == [Offer, Abort, Quiet]
    assert isinstance(bring(one, 2), Quiet)
    assert target.record.state is ReceiverState.GRANTED
    assert target.conclusions == []
    bring(one, 1)
    assert target.record.state is ReceiverState.QUARANTINED
    assert whys(one) == {Why.ABORTED}


@pytest.mark.parametrize("is_target", [True, False])
def test_verdict_crosses_abort(is_target: bool):
    """Whoever gives up when the target has admitted the cache hears that it was admitted."""
    calls = script(WHOLE) if is_target else (*script(WHOLE), GIVEN_UP)
    one = granted(calls)
    rank, target = one.source.ranks[0], one.targets[0]
    rank.call()
    pass_on(one)
    deliver(one)
    rank.hear()
    rank.call()
    rank.end_flight(0, "done")
    rank.call()
    pass_on(one)
    while sent(one):
        bring(one)
    assert target.conclusions == [Ready(AUX)]
    if is_target:
        target.abort()
    else:
        rank.call()
        pass_on(one)
        assert sent(one) == [Abort]
    assert finish(one) == ([Ready(AUX)], Ready(AUX))


def test_abort_after_the_commit_is_heard_where_it_still_counts():
    """The target still unpacks: it fails, says so at once, and the source keeps to that."""
    one = granted((*script(WHOLE), GIVEN_UP), worked=((0, 0),))
    rank, target = one.source.ranks[0], one.targets[0]
    rank.call()
    pass_on(one)
    deliver(one)
    rank.hear()
    rank.call()
    rank.end_flight(0, "done")
    rank.call()
    rank.call()
    assert rank.last.conclusions == []
    pass_on(one)
    while sent(one):
        bring(one)
    assert target.record.state is ReceiverState.QUARANTINED
    assert isinstance(deliver(one), Settled)
    assert whys(one) == {Why.ABORTED}


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_rank_joins_after_the_stop(is_forgotten: bool):
    one = granted(script(WHOLE), script(WHOLE, aux=False), needs={(0, 0): Need((0, 2), 0)})
    first, second = one.source.ranks.values()
    first.call()
    pass_on(one)
    deliver(one)
    one.targets[0].abort()
    deliver(one)
    if is_forgotten:
        while first.inbox:
            first.hear()
        pass_on(one)
        assert one.source.record is None
    else:
        assert one.source.record.state is OfferState.STOPPING
    second.call()
    pass_on(one, 1)
    assert [type(message) for message in second.inbox] == [Settled]
    assert whys(one) == {Why.ABORTED}


def test_a_second_grant_for_a_live_transfer():
    """Another target asks for the same transfer: it is refused, is quiet, and the first goes on."""
    one = granted(script(WHOLE), faults=Faults(has_rival=True))
    one.source.ranks[0].call()
    pass_on(one)
    deliver(one)
    assert finish(one) == ([Ready(AUX)], Ready(AUX))
    rival = one.targets[1]
    assert isinstance(rival.conclusions[0], Failed)
    assert rival.conclusions[0].cause.why is Why.REFUSED_LIVE_ID
    assert rival.num_releases == 1


def test_the_answer_ends_before_the_grant():
    one = granted((OFFERS, AnswerEnded(AUX)))
    one.source.ranks[0].call()
    pass_on(one)
    one.tick(45.0)
    one.source.ranks[0].call()
    pass_on(one)
    assert one.source.record.state is OfferState.DECIDED
    one.now += 45.0
    one.source.tick()
    assert finish(one) == ([Finished(AUX)], Finished(AUX))


def test_a_session_lost_after_any_step():
    """At whatever step the session goes, and however far each side is: all ends, and nobody writes late."""
    states: set[tuple[str, str]] = set()
    scripts = (script(*HALVES), script(HALVES[0], HALVES[1], aux=False))
    needs = {(0, 0): Need((0, 2), 0), (1, 0): Need((0, 1), 2)}
    for num_steps in range(60):
        found = Choices(random.Random(num_steps).randbytes(NUM_BYTES))
        setup = world(*scripts, needs=needs, worked=((1, 0),), faults=Faults(loses_session=True)).setup
        one = World(setup, found)
        one.due = []
        one.play(num_steps)
        offer = one.source.record.state.value if one.source.record else "none"
        receiver = one.targets[0].record.state.value if one.targets[0].record else "none"
        states.add((offer, receiver))
        one.lose(one.targets[0].link)
        finish(one)
    receivers, offers = {state[1] for state in states}, {state[0] for state in states}
    assert receivers >= {"preparing", "opening", "granted", "ready", "released"}
    assert offers >= {"open", "running", "committed", "none"}


def test_a_source_that_cannot_vouch_leaves_it_to_the_transport():
    one = granted(script(WHOLE))
    rank, target = one.source.ranks[0], one.targets[0]
    rank.call()
    pass_on(one)
    deliver(one)
    rank.hear()
    rank.call()
    rank.end_flight(0, "doubt")
    pass_on(one)
    while sent(one):
        bring(one)
    (place,) = target.ranks.values()
    place.hear()
    assert list(place.take_backs) == [True]
    place.take_back(is_still=False)
    target.hear(0)
    assert target.record.state is ReceiverState.QUARANTINED
    assert not target.memory.is_released
    one.land_stray()
    one.tick(1.0)
    place.hear()
    place.take_back(is_still=True)
    target.hear(0)
    assert target.memory.is_released
    one.land_stray()
    assert whys(one) == {Why.COPY_FAILED}
