"""`baton drain`: an instance finishes its requests and takes no new ones."""

from __future__ import annotations

from typing import Annotated

import typer

from baton import settings
from baton.cli.client import ApiClient
from baton.cli.options import SecretFile, UrlTlsCa


def drain(
    url: Annotated[str, typer.Argument(metavar="URL", hidden=True)],
    secret_file: SecretFile = None,
    tls_ca: UrlTlsCa = None,
) -> None:
    """Make an instance refuse new requests and finish those it has; SIGTERM ends it."""
    secret = settings.secret(None if secret_file is None else str(secret_file))
    # It takes longer to import than a mistake, or --help, may take.
    from baton.serving.http import router_key

    answer = ApiClient(url, router_key(secret), tls_ca).post("/drain", {})
    print(f"{url} takes no new requests; {answer['num_open']} are running")
