"""`baton drain`: an instance finishes its requests and takes no new ones."""

from __future__ import annotations

from pathlib import Path

from baton import settings
from baton.cli.client import ApiClient
from baton.cli.options import SECRET_FILE, URL_TLS_CA
from baton.cli.parser import argument, command


@command
def drain(
    url: str = argument("URL"),
    secret_file: Path | None = SECRET_FILE,
    tls_ca: Path | None = URL_TLS_CA,
) -> None:
    """Make an instance refuse new requests and finish those it has; SIGTERM ends it."""
    secret = settings.secret(secret_file)
    # It takes longer to import than a mistake, or --help, may take.
    from baton.serving.http import router_key

    answer = ApiClient(url, router_key(secret), tls_ca).post("/drain", {})
    print(f"{url} takes no new requests; {answer['num_open']} are running")
