"""What every HTTP server of Baton's shares: credentials, refusals, the edge, server-sent events."""

from baton.web.binding import check_binding, is_loopback
from baton.web.credentials import Caller, Credentials, router_key
from baton.web.edge import EdgeConfig, application, caller_of
from baton.web.events import DONE, EventReader, Note, SentEvent, data_event, note_line
from baton.web.private import Private, Resumed
from baton.web.problems import RETRIABLE, STATUSES, Problem, failure, read_problem
from baton.web.site import Site

__all__ = [
    "DONE",
    "RETRIABLE",
    "STATUSES",
    "Caller",
    "Credentials",
    "EdgeConfig",
    "EventReader",
    "Note",
    "Private",
    "Problem",
    "Resumed",
    "SentEvent",
    "Site",
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
