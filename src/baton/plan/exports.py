"""The names of `baton.plan`."""

from baton.plan.binding import bind
from baton.plan.cache import Cache, Component
from baton.plan.checker import check, prove
from baton.plan.chunks import Tables
from baton.plan.content import allocate, execute
from baton.plan.layout import Layout, parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.report import Report
from baton.plan.routes import BoundRoute, Chunk, Plan, Prompt, Route, resolve
from baton.plan.steps import Copy, Pack, PackCost, Spans, Step, Unpack
from baton.plan.storage import DeclaredPlacement, Storage, parse_storage
from baton.plan.views import TensorView, declare

__all__ = [
    "BoundRoute",
    "Cache",
    "Chunk",
    "Component",
    "Copy",
    "DeclaredPlacement",
    "Layout",
    "Pack",
    "PackCost",
    "Plan",
    "Prompt",
    "Report",
    "Route",
    "Spans",
    "Spec",
    "Step",
    "Storage",
    "Tables",
    "TensorView",
    "Unpack",
    "allocate",
    "bind",
    "check",
    "declare",
    "execute",
    "load_cache",
    "parse_layout",
    "parse_storage",
    "plan",
    "prove",
    "resolve",
]
