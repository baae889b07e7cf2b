"""Kinds of cache, one file each."""

from baton.plan.kinds.base import Kind
from baton.plan.kinds.draft import Draft
from baton.plan.kinds.index import Index
from baton.plan.kinds.latent import Latent
from baton.plan.kinds.paged import Paged
from baton.plan.kinds.recurrent import Conv, Recurrent

__all__ = ["Conv", "Draft", "Index", "Kind", "Latent", "Paged", "Recurrent"]
