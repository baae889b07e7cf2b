"""The names of `baton.session`."""

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
from baton.session.handles import (
    Digest,
    Handle,
    Pages,
    Receiving,
    Request,
    Sending,
    Withdrawal,
    prompt_digest,
)
from baton.session.links import SocketConfig
from baton.session.loop import exit_loudly

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
    "Withdrawal",
    "exit_loudly",
    "prompt_digest",
]
