"""The names of `baton.session`: everything that an engine needs."""

from baton.plan import DeclaredPlacement, Spec, Storage, TensorView, declare, load_cache, parse_layout
from baton.plan.ownership import buffers
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
    CheckedPages,
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
from baton.session.process import TransportConfig
from baton.session.remote import EndpointProcess, RemoteEndpoint
from baton.transport import NOW, CudaFence, HostFence, open_transport

__all__ = [
    "NOW",
    "Aux",
    "Cause",
    "CheckedPages",
    "CoordinatorDriver",
    "CudaFence",
    "DeclaredPlacement",
    "Digest",
    "Endpoint",
    "EndpointConfig",
    "EndpointProcess",
    "Failed",
    "Finished",
    "Handle",
    "HostFence",
    "Outcome",
    "Pages",
    "Ready",
    "Receiving",
    "RemoteEndpoint",
    "Request",
    "Sending",
    "SocketConfig",
    "Spec",
    "Stage",
    "State",
    "Storage",
    "TensorView",
    "Timings",
    "TransportConfig",
    "Waiting",
    "Why",
    "Withdrawal",
    "buffers",
    "declare",
    "exit_loudly",
    "load_cache",
    "open_transport",
    "parse_layout",
    "prompt_digest",
]
