"""The links of a coordinator to other instances.

A target dials the source of its first transfer and keeps the link. A link that is lost takes the transfers on
it along; the next transfer dials again, after a pause that grows with every failure and is reset by the first
success. Nothing is blacklisted for good.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from baton.plan import Spec
from baton.protocol.messages import Heartbeat, Introduction, Message, Path
from baton.protocol.outcomes import Cause, Stage, Why
from baton.session.config import DriverConfig
from baton.session.ports import Ports


@dataclass(slots=True)
class Session:
    """An established link to another instance. Transfers go one way, to the target that dialled."""

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
    """At the target: ranks and numbers of paths over which opening does not keep a source from writing."""


@dataclass(slots=True)
class Dialling:
    """A source that this coordinator tries to reach."""

    name: str
    link: int | None = None
    number: int | None = None
    """The session, once there is one."""
    is_looking: bool = False
    looked_since: float | None = None
    """When it was first looked up and not found."""
    num_failures: int = 0
    not_before: float = 0.0
    is_wanted: bool = False


class Sessions:
    """Every session of a coordinator, and every source it tries to reach."""

    def __init__(
        self, config: DriverConfig, ports: Ports, on_unreachable: Callable[[str, Cause], None]
    ) -> None:
        self.config = config
        self.ports = ports
        self.standing: dict[int, Session] = {}
        self.diallings: dict[str, Dialling] = {}
        self._on_unreachable = on_unreachable
        self._num_sessions = 0

    def to(self, name: str) -> Session | None:
        """The session with a source, if there is one; else it is dialled."""
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

    def names_of(self, session: Session) -> list[str]:
        """The names under which a source was dialled."""
        return [name for name, dialling in self.diallings.items() if dialling.number == session.number]

    def add(self, link: int, peer: Introduction, spec: Spec, channel: bytes) -> Session:
        """A link passed its handshake, and a plan with the peer exists."""
        self._num_sessions += 1
        dialling = self._dialling_of(link)
        session = Session(
            number=self._num_sessions,
            link=link,
            instance=peer.instance,
            epoch=peer.epoch,
            spec=spec,
            channel=channel,
            is_target=dialling is None,
            heard=self.ports.now(),
        )
        self.standing[session.number] = session
        if dialling is not None:
            dialling.number, dialling.num_failures, dialling.is_wanted = session.number, 0, False
        return session

    def drop(self, link: int, cause: Cause) -> Session | None:
        """A link is gone; returns its session, if it had one."""
        session = self.by_link(link)
        if session is not None:
            del self.standing[session.number]
        dialling = self._dialling_of(link)
        if dialling is not None:
            dialling.link = dialling.number = None
            self._failed(dialling, cause)
        return session

    def named(self, link: int, cause: Cause) -> Cause:
        """The cause of a lost link with the peer's name in it, which sockets do not know."""
        session, dialling = self.by_link(link), self._dialling_of(link)
        name = session.instance if session is not None else dialling.name if dialling is not None else ""
        text = cause.text if name in cause.text else f"{name}: {cause.text}"
        return structs.replace(cause, stage=Stage.COPY if session is not None else cause.stage, text=text)

    def send(self, number: int, message: Message) -> None:
        """Sends over a session; if it is gone, the message is dropped."""
        if session := self.standing.get(number):
            self.ports.send(session.link, message)

    def tick(self) -> list[Session]:
        """Sends heartbeats and dials again; returns the sessions that fell silent."""
        for session in self.standing.values():
            self.ports.send(session.link, Heartbeat())
        for dialling in self.diallings.values():
            if dialling.is_wanted and dialling.number is None:
                self._dial(dialling)
        limit = self.ports.now() - self.config.timings.silence_s
        return [session for session in self.standing.values() if session.heard < limit]

    def _dialling_of(self, link: int) -> Dialling | None:
        return next((dialling for dialling in self.diallings.values() if dialling.link == link), None)

    def _dial(self, dialling: Dialling) -> None:
        if dialling.link is not None or dialling.is_looking:
            return
        if self.ports.now() < dialling.not_before:
            return
        if ":" in dialling.name:
            dialling.link = self.ports.dial(dialling.name, "")
            return
        dialling.is_looking = True
        self.ports.look_up(dialling.name, lambda address, text: self._looked_up(dialling, address, text))

    def _looked_up(self, dialling: Dialling, address: str | None, text: str) -> None:
        dialling.is_looking = False
        if address is not None:
            dialling.looked_since = None
            dialling.link = self.ports.dial(address, dialling.name)
            return
        now, timings = self.ports.now(), self.config.timings
        dialling.looked_since = now if dialling.looked_since is None else dialling.looked_since
        if now - dialling.looked_since < timings.look_up_s:
            dialling.not_before = now + timings.redial_s
            return
        dialling.looked_since = None
        self._failed(dialling, self.config.cause(Why.PEER_LOST, Stage.HANDSHAKE, text))

    def _failed(self, dialling: Dialling, cause: Cause) -> None:
        timings = self.config.timings
        pause = min(timings.redial_s * 2**dialling.num_failures, timings.redial_s_max)
        dialling.num_failures = min(dialling.num_failures + 1, 16)
        dialling.not_before = self.ports.now() + pause
        dialling.is_wanted = False
        self._on_unreachable(dialling.name, cause)
