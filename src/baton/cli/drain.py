"""`baton drain`: an instance finishes what it has and takes nothing new."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton import settings
from baton.cli.deployment.talking import Voice
from baton.serving.http import router_key


def drain(
    url: Annotated[str, typer.Argument(help="of the instance, as http://10.0.0.1:8100")],
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="shared by all instances; default: BATON_SECRET")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM authority of an https URL; default: the system's")
    ] = None,
) -> None:
    """Tells an instance to take no new requests; it ends with a signal, once those under way are through."""
    secret = settings.secret(None if secret_file is None else str(secret_file))
    found = Voice(url, router_key(secret), tls_ca).post("/drain", {})
    print(f"{url} takes no new requests; {found['num_open']} are under way")
