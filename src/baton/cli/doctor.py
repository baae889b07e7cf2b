"""`baton doctor`: what works on this machine."""

from __future__ import annotations

from baton.cli.parser import command


@command
def doctor() -> None:
    """Show which transports, devices and kernel features work here; each is checked by a real transfer."""
    # It takes longer to import than --help may take.
    from baton.cli.doctor_checks import findings

    for finding in findings():
        print(finding, flush=True)
