"""The registry: instances register their ranks and find each other's coordinators."""

from __future__ import annotations

from baton.session.registry.client import Registration, RegistryClient
from baton.session.registry.messages import (
    Change,
    ChangeKind,
    Member,
    Missing,
    Refusal,
    RegistryError,
    Role,
    Roster,
    Topology,
    check_instance,
    check_url,
)
from baton.session.registry.server import RegistryConfig, RegistryServer

__all__ = [
    "Change",
    "ChangeKind",
    "Member",
    "Missing",
    "Refusal",
    "Registration",
    "RegistryClient",
    "RegistryConfig",
    "RegistryError",
    "RegistryServer",
    "Role",
    "Roster",
    "Topology",
    "check_instance",
    "check_url",
]
