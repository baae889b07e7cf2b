"""The links of a coordinator to other instances.

A target dials the source of its first transfer and keeps the link. A link that is lost takes the transfers on
it along; the next transfer dials anew, after a pause that grows with every failure and is forgotten with the
first success. Nothing is blacklisted for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from baton.plan import Spec
from baton.protocol.messages import AnyMessage, Beat, Path
from baton.protocol.outcomes import Cause, Stage, Why

if TYPE_CHECKING:
    from baton.session.coordinator import CoordinatorDriver


@dataclass(slots=True)
class Session:
    """One standing link to another instance; it goes one way, from the source to the target that dialled."""

    number: int
    link: int
    instance: str
    epoch: int
    spec: Spec
    channel: bytes
    is_target: bool
    """Whether the peer is the target."""
    heard: float
    paths: dict[tuple[int, int], Path] = field(default_factory=dict)
    """At the target: the newest path of every pair of ranks."""
    asked: set[tuple[int, int]] = field(default_factory=set)
    """At the target: pairs whose paths have been asked for."""
    unchecked: set[tuple[int, int]] = field(default_factory=set)
    """At the target: ranks and numbers of paths over which no opening keeps a source from writing."""


@dataclass(slots=True)
class Dialling:
    """A source that is to be reached."""

    name: str
    link: int | None = None
    number: int | None = None
    """The session, once there is one."""
    is_looking: bool = False
    looked_since: float | None = None
    """When it was first looked for and not found."""
    num_failures: int = 0
    not_before: float = 0.0
    is_wanted: bool = False


class Sessions:
    """Every session of a coordinator, and every source it tries to reach."""

    def __init__(self, owner: CoordinatorDriver) -> None:
        self.owner = owner
        self.standing: dict[int, Session] = {}
        self.diallings: dict[str, Dialling] = {}
        self.on_failed: Callable[[str, Cause], None] = lambda name, cause: None
        self._num_sessions = 0

    def to(self, name: str) -> Session | None:
        """The session with a source, if it stands; else one is being made."""
        dialling = self.diallings.setdefault(name, Dialling(name))
        if dialling.number is not None:
            return self.standing[dialling.number]
        dialling.is_wanted = True
        self._dial(dialling)
        return None

    def is_accepted(self, link: int) -> bool:
        """Whether the other side dialled: it is the target then."""
        return self._dialling_of(link) is None

    def by_link(self, link: int) -> Session | None:
        """The session that uses a link."""
        return next((session for session in self.standing.values() if session.link == link), None)

    def add(self, link: int, spec: Spec, peer: tuple[str, int], channel: bytes) -> Session:
        """A link passed its handshake and the plan."""
        self._num_sessions += 1
        dialling = self._dialling_of(link)
        session = Session(
            number=self._num_sessions,
            link=link,
            instance=peer[0],
            epoch=peer[1],
            spec=spec,
            channel=channel,
            is_target=dialling is None,
            heard=self.owner.ports.now(),
        )
        self.standing[session.number] = session
        if dialling is not None:
            dialling.number, dialling.num_failures, dialling.is_wanted = session.number, 0, False
        return session

    def drop(self, link: int, cause: Cause) -> Session | None:
        """A link is gone; answers the session that it was, if it was one."""
        session = self.by_link(link)
        if session is not None:
            del self.standing[session.number]
        dialling = self._dialling_of(link)
        if dialling is not None:
            dialling.link = dialling.number = None
            self._failed(dialling, cause)
        return session

    def named(self, link: int, cause: Cause) -> Cause:
        """Why a link is gone, in words that say whose it was; sockets do not know."""
        session, dialling = self.by_link(link), self._dialling_of(link)
        name = session.instance if session is not None else dialling.name if dialling is not None else ""
        text = cause.text if name in cause.text else f"{name}: {cause.text}"
        return structs.replace(cause, stage=Stage.COPY if session is not None else cause.stage, text=text)

    def send(self, number: int, message: AnyMessage) -> None:
        """Sends by a session; if it is gone, the word is too."""
        if session := self.standing.get(number):
            self.owner.ports.send(session.link, message)

    def tick(self) -> tuple[Session, ...]:
        """Beats, and dials what waited long enough; answers the sessions that fell silent."""
        now, timings = self.owner.ports.now(), self.owner.config.timings
        for session in self.standing.values():
            self.owner.ports.send(session.link, Beat())
        for dialling in self.diallings.values():
            if dialling.is_wanted and dialling.number is None:
                self._dial(dialling)
        return tuple(s for s in self.standing.values() if now - s.heard > timings.silence_s)

    def _dialling_of(self, link: int) -> Dialling | None:
        return next((one for one in self.diallings.values() if one.link == link), None)

    def _dial(self, dialling: Dialling) -> None:
        if dialling.link is not None or dialling.is_looking:
            return
        if self.owner.ports.now() < dialling.not_before:
            return
        if ":" in dialling.name:
            dialling.link = self.owner.ports.dial(dialling.name, "")
            return
        dialling.is_looking = True
        self.owner.ports.look_up(dialling.name, lambda address, text: self._found(dialling, address, text))

    def _found(self, dialling: Dialling, address: str | None, text: str) -> None:
        dialling.is_looking = False
        if address is not None:
            dialling.looked_since = None
            dialling.link = self.owner.ports.dial(address, dialling.name)
            return
        now, timings = self.owner.ports.now(), self.owner.config.timings
        dialling.looked_since = now if dialling.looked_since is None else dialling.looked_since
        if now - dialling.looked_since < timings.look_up_s:
            dialling.not_before = now + timings.redial_s
            return
        dialling.looked_since = None
        self._failed(dialling, self.owner.cause(Why.PEER_LOST, Stage.HANDSHAKE, text))

    def _failed(self, dialling: Dialling, cause: Cause) -> None:
        timings = self.owner.config.timings
        pause = min(timings.redial_s * 2**dialling.num_failures, timings.redial_s_max)
        dialling.num_failures = min(dialling.num_failures + 1, 16)
        dialling.not_before = self.owner.ports.now() + pause
        dialling.is_wanted = False
        self.on_failed(dialling.name, cause)
