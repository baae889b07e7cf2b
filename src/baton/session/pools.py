"""A rank's memory as its driver knows it: named buffers, staging, and their registrations."""

from __future__ import annotations

from collections.abc import Mapping

from baton.errors import ConfigError
from baton.plan import Spec
from baton.plan.ownership import buffers
from baton.plan.steps import STAGING
from baton.session.staging import Staging
from baton.transport import Bytes, Region, Transport


class Pools:
    """Buffers registered with a transport, staging among them."""

    def __init__(
        self, buffers_by_name: Mapping[str, Bytes], transport: Transport, staging_bytes: int = 0
    ) -> None:
        self.buffers = dict(buffers_by_name)
        self.staging = Staging(staging_bytes)
        if staging_bytes:
            self.buffers[STAGING] = transport.allocate(staging_bytes)
        self.regions: dict[str, Region] = {
            name: transport.register(buffer) for name, buffer in self.buffers.items()
        }

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """A piece of staging."""
        return self.buffers[STAGING][offset : offset + num_bytes]


def check_buffers(spec: Spec, rank: int, found: Mapping[str, Bytes]) -> None:
    """Raises ConfigError unless these are the buffers that a rank has."""
    wanted = buffers(spec, rank, "pool")
    if set(found) != set(wanted):
        raise ConfigError(
            f"rank {rank} of {spec.layout} needs the buffers {', '.join(sorted(wanted))}; got "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    for name, num_bytes in wanted.items():
        if found[name].nbytes != num_bytes:
            raise ConfigError(
                f"buffer {name!r} of rank {rank} has to have {num_bytes} bytes, got {found[name].nbytes}"
            )
