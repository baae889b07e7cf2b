"""What every HTTP server of Baton's shares: credentials, refusals, the edge, server-sent events."""

from baton.web.binding import check_binding, is_loopback
from baton.web.credentials import Caller, Credentials, router_key
from baton.web.edge import Edge, EdgeConfig, application, caller_of
from baton.web.entry import Patience
from baton.web.events import DONE, EventReader, Note, SentEvent, data_event, note_line
from baton.web.lane import Lane
from baton.web.plain import Outlet, Reply
from baton.web.private import Private, Resumed
from baton.web.problems import RETRIABLE, STATUSES, Problem, failure, read_problem
from baton.web.site import Site
from baton.web.writing import ID_HEADER, WebOutlet

__all__ = [
    "DONE",
    "ID_HEADER",
    "RETRIABLE",
    "STATUSES",
    "Caller",
    "Credentials",
    "Edge",
    "EdgeConfig",
    "EventReader",
    "Lane",
    "Note",
    "Outlet",
    "Patience",
    "Private",
    "Problem",
    "Reply",
    "Resumed",
    "SentEvent",
    "Site",
    "WebOutlet",
    "application",
    "caller_of",
    "check_binding",
    "data_event",
    "failure",
    "is_loopback",
    "note_line",
    "read_problem",
    "router_key",
]
