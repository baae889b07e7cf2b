"""The handshake: every cell of its table, and what somebody in between or outside gets from it."""

from typing import Any

import msgspec
import pytest

from baton.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from baton.protocol.handshake import (
    HANDSHAKE,
    MEMBER,
    SESSION,
    BadMessage,
    Connected,
    Ended,
    Established,
    Handshake,
    HandshakeState,
    Party,
    Secure,
    accepting,
    dialling,
)
from baton.protocol.machine import Ticked, replace
from baton.protocol.messages import (
    VERSION_MAX,
    Accepted,
    Challenge,
    Hello,
    Introduction,
    Message,
    Proof,
    Refused,
)
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.wire import encode

S = HandshakeState
SECRET = b"a secret of the two instances"
CHANNEL = b"c" * 16
DEADLINE = 10.0
BOTH = frozenset({SESSION, MEMBER})
PRIVATE = ("fingerprint-of-decode", "spec-of-decode", "transport-of-decode")


def introduction(instance: str, rank: int = -1, epoch: int = 4) -> Introduction:
    return Introduction(
        instance=instance,
        epoch=epoch,
        fingerprint=f"fingerprint-of-{instance}",
        spec=f"spec-of-{instance}".encode(),
        transport=f"transport-of-{instance}",
        rank=rank,
    )


DIALLER = Party(introduction("prefill", epoch=9), SECRET)
ACCEPTOR = Party(introduction("decode"), SECRET, accepts=BOTH)


def ends(
    dialler: Party = DIALLER, acceptor: Party = ACCEPTOR, wanted: str = "decode"
) -> tuple[Handshake, Handshake]:
    return (
        dialling(dialler, wanted, b"d" * 32, DEADLINE),
        accepting(acceptor, b"a" * 32, CHANNEL, DEADLINE),
    )


def step(peer: Handshake, event: object, now: float = 0.0) -> tuple[Handshake, tuple[Any, ...]]:
    return HANDSHAKE.step(peer, event, now)


def sent(effects: tuple[Any, ...]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, Message)]


class Pair:
    """Both ends, with everything that crossed; `change` stands in between."""

    def __init__(
        self, dialler: Handshake, acceptor: Handshake, change: Any = lambda message: message
    ) -> None:
        self.at = {"dialler": dialler, "acceptor": acceptor}
        self.passed: list[tuple[str, Message]] = []
        self.effects: dict[str, list[Any]] = {"dialler": [], "acceptor": []}
        waiting: list[tuple[str, object]] = [("dialler", Connected())]
        while waiting:
            name, event = waiting.pop(0)
            self.at[name], effects = step(self.at[name], event)
            self.effects[name] += effects
            other = "acceptor" if name == "dialler" else "dialler"
            self.passed += [(name, message) for message in sent(effects)]
            waiting += [(other, change(message)) for message in sent(effects)]

    def one(self, name: str, kind: type) -> Any:
        (found,) = [effect for effect in self.effects[name] if isinstance(effect, kind)]
        return found

    @property
    def states(self) -> tuple[HandshakeState, HandshakeState]:
        return self.at["dialler"].state, self.at["acceptor"].state


def record_in(state: HandshakeState) -> Handshake:
    """A record that came into this state by the ordinary way."""
    dialler, acceptor = ends()
    seen = [dialler, acceptor]

    def note(before: Handshake, event: object) -> tuple[Handshake, Any]:
        after, effects = step(before, event)
        seen.append(after)
        return after, sent(effects)

    dialler, (hello,) = note(dialler, Connected())
    acceptor, (challenge,) = note(acceptor, hello)
    dialler, (proof,) = note(dialler, challenge)
    acceptor, (accepted, said) = note(acceptor, proof)
    dialler, _ = note(dialler, accepted)
    note(dialler, said)
    note(dialler, BadMessage(Why.REFUSED_VERSION, "a test"))
    return next(record for record in reversed(seen) if record.state is state)


def message(kind: type) -> Any:
    """What the peer of `record_in` would send."""
    return next(said for _, said in Pair(*ends()).passed if isinstance(said, kind))


REFUSAL = Cause(Why.REFUSED_LAYOUT, Stage.HANDSHAKE, text="no")
EVENTS: dict[type, Any] = {
    Connected: Connected(),
    Ticked: Ticked(),
    BadMessage: BadMessage(Why.REFUSED_VERSION, "unreadable"),
    Refused: Refused(cause=REFUSAL),
    Hello: message(Hello),
    Challenge: message(Challenge),
    Proof: message(Proof),
    Accepted: message(Accepted),
    # The last record in `introducing` is the dialler's.
    Introduction: introduction("decode"),
}
# state, event -> state, effects; what is not here has no cell.
EXPECTED: dict[tuple[HandshakeState, type], tuple[HandshakeState, list[type]]] = {
    (S.CALLING, Connected): (S.GREETING, [Hello]),
    (S.GREETING, Challenge): (S.PROVING, [Proof]),
    (S.PROVING, Accepted): (S.INTRODUCING, [Secure, Introduction]),
    (S.LISTENING, Hello): (S.CHALLENGING, [Challenge]),
    (S.CHALLENGING, Proof): (S.INTRODUCING, [Accepted, Secure, Introduction]),
    (S.INTRODUCING, Introduction): (S.STANDING, [Established]),
    (S.GREETING, Refused): (S.ENDED, [Ended]),
    (S.PROVING, Refused): (S.ENDED, [Ended]),
    (S.CHALLENGING, Refused): (S.ENDED, [Ended]),
    (S.INTRODUCING, Refused): (S.ENDED, [Ended]),
    (S.STANDING, Refused): (S.ENDED, [Ended]),
    **{(state, Ticked): (state, []) for state in S},
    **{(state, BadMessage): (S.ENDED, [Refused, Ended]) for state in S},
    (S.ENDED, BadMessage): (S.ENDED, []),
    (S.ENDED, Hello): (S.ENDED, []),
    (S.ENDED, Challenge): (S.ENDED, []),
    (S.ENDED, Proof): (S.ENDED, []),
    (S.ENDED, Accepted): (S.ENDED, []),
    (S.ENDED, Refused): (S.ENDED, []),
    (S.ENDED, Introduction): (S.ENDED, []),
}


def test_expectations_cover_the_table_and_every_event_has_a_sample():
    assert set(EXPECTED) == set(HANDSHAKE.cells)
    assert set(EVENTS) == set(HANDSHAKE.events)


@pytest.mark.parametrize("event", EVENTS.values(), ids=lambda event: type(event).__name__)
@pytest.mark.parametrize("state", S, ids=lambda state: state.value)
def test_every_cell(state: HandshakeState, event: Any):
    record = record_in(state)
    expected = EXPECTED.get((state, type(event)))
    if expected is None:
        kind: type[ProtocolError] = RemoteProtocolError if isinstance(event, Message) else LocalProtocolError
        with pytest.raises(kind, match=f"{type(event).__name__} has no place in state {state.value}"):
            step(record, event)
        assert record == record_in(state)
        return
    after, effects = step(record, event)
    assert (after.state, list(map(type, effects))) == expected
    if expected == (state, []):
        assert after == record


@pytest.mark.parametrize("state", [s for s in S if s not in (S.STANDING, S.ENDED)])
def test_deadline_ends_every_unfinished_handshake_with_a_reason(state: HandshakeState):
    record = record_in(state)
    assert step(record, Ticked(), DEADLINE - 0.01) == (record, ())
    after, effects = step(record, Ticked(), DEADLINE)
    assert after.state is S.ENDED
    assert effects[0].cause.why is Why.DEADLINE
    assert state.value in effects[0].cause.text
    assert effects[1] == Ended(effects[0].cause)


def test_deadline_means_nothing_to_a_link_that_stands():
    record = record_in(S.STANDING)
    assert step(record, Ticked(), DEADLINE + 100) == (record, ())


def test_both_ends_come_to_the_same_channel_and_key_and_know_each_other():
    pair = Pair(*ends())
    assert pair.states == (S.STANDING, S.STANDING)
    assert pair.one("dialler", Established) == Established(ACCEPTOR.introduction, CHANNEL)
    assert pair.one("acceptor", Established) == Established(DIALLER.introduction, CHANNEL)
    secured = pair.one("dialler", Secure), pair.one("acceptor", Secure)
    assert secured[0].key == secured[1].key
    assert [one.channel for one in secured] == [CHANNEL, CHANNEL]
    assert [one.is_dialler for one in secured] == [True, False]


def test_session_key_depends_on_everything():
    def key(pair: Pair) -> bytes:
        return bytes(pair.one("dialler", Secure).key)

    dialler, acceptor = ends()
    others = [
        Pair(replace(dialler, nonce=b"x" * 32), acceptor),
        Pair(dialler, replace(acceptor, nonce=b"x" * 32)),
        Pair(dialler, replace(acceptor, channel=b"x" * 16)),
        Pair(*ends(replace(DIALLER, secret=b"x" * 32), replace(ACCEPTOR, secret=b"x" * 32))),
        Pair(*ends(replace(DIALLER, introduction=introduction("prefill", epoch=10)))),
    ]
    keys = {key(pair) for pair in [Pair(dialler, acceptor), *others]}
    assert len(keys) == 1 + len(others)


def test_member_link_of_a_rank():
    rank = Party(introduction("decode", rank=3), SECRET, dials=MEMBER)
    pair = Pair(*ends(rank))
    assert pair.states == (S.STANDING, S.STANDING)
    assert pair.one("acceptor", Established).introduction.rank == 3


def refusal(pair: Pair, name: str) -> Cause:
    """Why an end refused; the other end heard the same and nobody is left standing."""
    cause = pair.one(name, Ended).cause
    other = "acceptor" if name == "dialler" else "dialler"
    assert pair.states == (S.ENDED, S.ENDED)
    assert pair.one(other, Ended).cause == cause
    return cause


@pytest.mark.parametrize(
    ("ours", "theirs", "taken"), [((1, 3), (2, 5), 3), ((1, 1), (1, 9), 1), ((4, 6), (2, 5), 5)]
)
def test_highest_common_version_is_taken(ours: tuple[int, int], theirs: tuple[int, int], taken: int):
    pair = Pair(*ends(replace(DIALLER, versions=ours), replace(ACCEPTOR, versions=theirs)))
    assert pair.states == (S.STANDING, S.STANDING)
    assert next(m.version for _, m in pair.passed if isinstance(m, Challenge)) == taken


@pytest.mark.parametrize(("ours", "theirs"), [((1, 2), (3, 5)), ((7, 9), (3, 5)), ((9, 1), (3, 5))])
def test_no_common_version_is_refused_with_both_ranges(ours: tuple[int, int], theirs: tuple[int, int]):
    cause = refusal(
        Pair(*ends(replace(DIALLER, versions=ours), replace(ACCEPTOR, versions=theirs))), "acceptor"
    )
    assert cause.why is Why.REFUSED_VERSION
    assert f"{ours[0]} to {ours[1]}" in cause.text
    assert f"{theirs[0]} to {theirs[1]}" in cause.text


def test_version_outside_of_the_diallers_range_is_refused():
    def other(message: Message) -> Message:
        return (
            msgspec.structs.replace(message, version=VERSION_MAX + 1)
            if isinstance(message, Challenge)
            else message
        )

    cause = refusal(Pair(*ends(), other), "dialler")
    assert (cause.why, cause.instance) == (Why.REFUSED_VERSION, "prefill")


def test_wrong_secret_is_refused_without_a_word_under_the_secret():
    pair = Pair(*ends(replace(DIALLER, secret=b"another secret, as long")))
    cause = refusal(pair, "acceptor")
    assert cause.why is Why.REFUSED_AUTHENTICATION
    assert [type(m) for name, m in pair.passed if name == "acceptor"] == [Challenge, Refused]


def test_acceptor_is_no_oracle():
    """What it says to a stranger is the same under any secret."""

    def said(secret: bytes) -> list[bytes]:
        acceptor = ends(acceptor=replace(ACCEPTOR, secret=secret))[1]
        acceptor, first = step(acceptor, message(Hello))
        _, second = step(acceptor, Proof(mac=b"\0" * 32))
        return [encode(message) for message in sent(first + second)]

    assert said(SECRET) == said(b"x" * 40)


def test_stranger_learns_nothing_of_the_instance_but_name_epoch_and_version():
    heard = b""
    _, acceptor = ends()
    for event in (message(Hello), Proof(mac=b"\0" * 32)):
        acceptor, effects = step(acceptor, event)
        heard += b"".join(map(encode, sent(effects)))
    assert b"decode" in heard
    assert [text for text in PRIVATE if text.encode() in heard] == []
    # The dialler's side of it, towards an acceptor that knows no secret.
    dialler, _ = ends()
    dialler, greeting = step(dialler, Connected())
    dialler, proving = step(dialler, message(Challenge))
    dialler, ending = step(dialler, Accepted(mac=b"\0" * 32, channel=CHANNEL))
    assert dialler.state is S.ENDED
    said = b"".join(map(encode, sent(greeting + proving + ending)))
    assert b"-of-prefill" not in said


def test_acceptor_without_the_secret_is_refused():
    pair = Pair(
        *ends(), lambda m: Accepted(mac=b"\0" * 32, channel=CHANNEL) if isinstance(m, Accepted) else m
    )
    assert pair.one("dialler", Ended).cause.why is Why.REFUSED_AUTHENTICATION
    assert not [effect for effect in pair.effects["dialler"] if isinstance(effect, Secure)]


def test_wrong_instance_is_refused_before_anything_is_proven():
    pair = Pair(*ends(wanted="decode-2"))
    cause = refusal(pair, "dialler")
    assert cause.why is Why.REFUSED_AUTHENTICATION
    assert "'decode-2'" in cause.text
    assert [type(m) for name, m in pair.passed if name == "dialler"] == [Hello, Refused]


def test_dialler_may_take_whoever_is_there():
    assert Pair(*ends(wanted="")).states == (S.STANDING, S.STANDING)


CHANGES = [
    (Hello, "version_min", 1),
    (Hello, "version_max", 2),
    (Hello, "nonce", b"x" * 32),
    (Hello, "purpose", MEMBER),
    (Hello, "instance", "other"),
    (Hello, "epoch", 10),
    (Hello, "rank", 0),
    (Challenge, "version", 2),
    (Challenge, "nonce", b"x" * 32),
    (Challenge, "instance", "other"),
    (Challenge, "epoch", 5),
    (Proof, "mac", b"x" * 32),
    (Proof, "mac", b""),
    (Accepted, "mac", b"x" * 32),
    (Accepted, "channel", b"x" * 16),
]


def test_changes_name_every_field_of_the_first_two_messages():
    done = {(kind, name) for kind, name, _ in CHANGES}
    for kind in (Hello, Challenge):
        assert {name for of, name in done if of is kind} == set(kind.__struct_fields__) - {"needs"}


@pytest.mark.parametrize(("kind", "name", "value"), CHANGES)
def test_nothing_can_be_changed_on_the_way(kind: type, name: str, value: object):
    changed = []

    def change(message: Message) -> Message:
        if isinstance(message, kind):
            changed.append(message)
            return msgspec.structs.replace(message, **{name: value})
        return message

    wide = (0, 3)
    dialler, acceptor = ends(replace(DIALLER, versions=wide), replace(ACCEPTOR, versions=wide), wanted="")
    pair = Pair(dialler, acceptor, change)
    assert len(changed) == 1
    assert pair.at["dialler"].state is S.ENDED
    assert not [effect for effect in pair.effects["dialler"] if isinstance(effect, Established)]
    assert not [effect for effect in pair.effects["acceptor"] if isinstance(effect, Established)]


def test_downgrade_is_noticed():
    """Both speak 1 to 3; somebody in between makes them believe that the other speaks 1 alone."""

    def lower(message: Message) -> Message:
        return msgspec.structs.replace(message, version_max=1) if isinstance(message, Hello) else message

    pair = Pair(*ends(replace(DIALLER, versions=(1, 3)), replace(ACCEPTOR, versions=(1, 3))), lower)
    assert refusal(pair, "acceptor").why is Why.REFUSED_AUTHENTICATION


def test_proofs_of_the_two_roles_and_of_two_handshakes_differ():
    first = Pair(*ends())
    proof, accepted = (next(m for _, m in first.passed if isinstance(m, kind)) for kind in (Proof, Accepted))
    assert proof.mac != accepted.mac
    _, acceptor = ends()
    acceptor = replace(acceptor, nonce=b"z" * 32)
    acceptor, _ = step(acceptor, message(Hello))
    acceptor, effects = step(acceptor, proof)  # heard on another link
    assert acceptor.state is S.ENDED
    assert sent(effects)[0].cause.why is Why.REFUSED_AUTHENTICATION


@pytest.mark.parametrize("nonce", [b"", b"x" * 31, b"x" * 33])
def test_nonce_of_another_length_is_refused(nonce: bytes):
    for kind, name in ((Hello, "acceptor"), (Challenge, "dialler")):
        pair = Pair(
            *ends(), lambda m, kind=kind: msgspec.structs.replace(m, nonce=nonce) if type(m) is kind else m
        )
        assert f"nonce of {len(nonce)} bytes" in refusal(pair, name).text


MISFITS = [
    (Party(introduction("decode", rank=0), SECRET, dials="cousin"), BOTH, "no links for 'cousin'"),
    (
        Party(introduction("decode", rank=0), SECRET, dials=MEMBER),
        frozenset({SESSION}),
        "no links for 'member'",
    ),
    (Party(introduction("prefill", rank=0), SECRET, dials=MEMBER), BOTH, "rank of another instance"),
    (
        Party(introduction("prefill", rank=0), SECRET, dials=SESSION),
        BOTH,
        "rank 0 cannot have a session link",
    ),
    (Party(introduction("decode"), SECRET, dials=MEMBER), BOTH, "rank -1 cannot have a member link"),
    (Party(introduction("prefill", epoch=0), SECRET), BOTH, "only a rank may leave its epoch out"),
]


@pytest.mark.parametrize(("dialler", "accepts", "text"), MISFITS, ids=[text for _, _, text in MISFITS])
def test_who_knows_the_secret_may_still_be_wrong_here(dialler: Party, accepts: frozenset[str], text: str):
    cause = refusal(Pair(*ends(dialler, replace(ACCEPTOR, accepts=accepts))), "acceptor")
    assert cause.why is Why.REFUSED_AUTHENTICATION
    assert text in cause.text


@pytest.mark.parametrize("change", [{"instance": "other"}, {"epoch": 77}, {"rank": 5}])
@pytest.mark.parametrize("name", ["dialler", "acceptor"])
def test_introduction_has_to_be_of_whom_the_handshake_was_with(name: str, change: dict[str, Any]):
    of = "decode" if name == "dialler" else "prefill"

    def lie(message: Message) -> Message:
        is_it = isinstance(message, Introduction) and message.instance == of
        return msgspec.structs.replace(message, **change) if is_it else message

    pair = Pair(*ends(), lie)
    assert "does not match the handshake" in pair.one(name, Ended).cause.text
    assert pair.states == (S.ENDED, S.ENDED)


# A rank that does not know the epoch of its coordinator.

EPOCHLESS = Party(introduction("decode", rank=3, epoch=0), SECRET, dials=MEMBER)


def test_rank_learns_the_epoch_of_its_coordinator():
    pair = Pair(*ends(EPOCHLESS))
    assert pair.states == (S.STANDING, S.STANDING)
    assert pair.one("dialler", Established).introduction.epoch == 4
    assert pair.one("acceptor", Established).introduction == introduction("decode", rank=3, epoch=4)


@pytest.mark.parametrize("kind", [Hello, Challenge])
def test_nobody_in_between_chooses_the_epoch_that_a_rank_learns(kind: type):
    """An epoch that was changed on the way breaks the proof."""

    def change(message: Message) -> Message:
        return msgspec.structs.replace(message, epoch=5) if type(message) is kind else message

    pair = Pair(*ends(EPOCHLESS), change)
    assert S.STANDING not in pair.states
    assert not any(
        isinstance(effect, Established) for effect in (*pair.effects["dialler"], *pair.effects["acceptor"])
    )
    assert "the proof does not hold" in refusal(pair, "acceptor").text


def test_epoch_is_not_taken_before_the_coordinator_has_proven_itself():
    stranger = replace(ACCEPTOR, secret=b"another secret")
    pair = Pair(*ends(EPOCHLESS, stranger))
    assert [type(message) for name, message in pair.passed if name == "dialler"] == [Hello, Proof]


@pytest.mark.parametrize("epoch", [0, 3, 5])
def test_rank_that_learned_an_epoch_has_to_introduce_itself_with_it(epoch: int):
    def lie(message: Message) -> Message:
        is_it = isinstance(message, Introduction) and message.rank == 3
        return msgspec.structs.replace(message, epoch=epoch) if is_it else message

    pair = Pair(*ends(EPOCHLESS), lie)
    assert "does not match the handshake" in pair.one("acceptor", Ended).cause.text


@pytest.mark.parametrize("epoch", [0, -7])
def test_coordinator_without_an_epoch_is_refused(epoch: int):
    pair = Pair(*ends(EPOCHLESS, replace(ACCEPTOR, introduction=introduction("decode", epoch=epoch))))
    assert f"has epoch {epoch}" in refusal(pair, "dialler").text


def test_secret_is_in_no_text():
    assert SECRET.decode() not in repr(record_in(S.STANDING))
    pair = Pair(*ends())
    assert repr(pair.one("dialler", Secure).key) not in repr(pair.one("dialler", Secure))
