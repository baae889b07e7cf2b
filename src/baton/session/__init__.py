"""The one place where protocol meets transport; what engines use of it is here."""

from baton.protocol.outcomes import (
    Aux,
    Cause,
    Failed,
    Finished,
    Outcome,
    Ready,
    Stage,
    State,
    Waiting,
    Why,
)
from baton.protocol.timings import Timings
from baton.session.coordinator import CoordinatorDriver
from baton.session.endpoint import Endpoint, EndpointConfig
from baton.session.handles import Handle, Pages, Receiving, Sending
from baton.session.link_sockets import SocketConfig
from baton.session.loop import exit_loudly
from baton.session.requests import Digest, Request, prompt_digest

__all__ = [
    "Aux",
    "Cause",
    "CoordinatorDriver",
    "Digest",
    "Endpoint",
    "EndpointConfig",
    "Failed",
    "Finished",
    "Handle",
    "Outcome",
    "Pages",
    "Ready",
    "Receiving",
    "Request",
    "Sending",
    "SocketConfig",
    "Stage",
    "State",
    "Timings",
    "Waiting",
    "Why",
    "exit_loudly",
    "prompt_digest",
]
