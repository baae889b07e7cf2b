"""Where a server may listen."""

from __future__ import annotations

import ipaddress
import socket
from functools import lru_cache

from baton.errors import ConfigError

HOST = "127.0.0.1"


@lru_cache(maxsize=1024)
def is_loopback(address: str | None) -> bool:
    """Whether an IP address is this machine's own; what cannot be read is not."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def check_binding(host: str, *, has_api_key: bool, has_secret: bool) -> None:
    """Refuses an address that others can reach, unless an API key and a control-plane secret are there."""
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} has no address: {error}; use {HOST} or an address here") from None
    outside = sorted({str(place[4][0]) for place in found if not is_loopback(str(place[4][0]))})
    absent = {"an API key (--api-key-file or BATON_API_KEY)": has_api_key}
    absent["the control-plane secret (--secret-file or BATON_SECRET)"] = has_secret
    wanted = [what for what, is_there in absent.items() if not is_there]
    if outside and wanted:
        raise ConfigError(
            f"host {host!r} ({', '.join(outside)}) can be reached from outside and there is no "
            f"{' and no '.join(what.removeprefix('an ').removeprefix('the ') for what in wanted)}; "
            f"give {' and '.join(wanted)}, or listen on {HOST}"
        )
