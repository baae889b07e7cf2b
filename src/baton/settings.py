"""Settings beside the command line: environment variables, secret, API keys, addresses, certificates."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import shutil
import socket
import ssl
import stat
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.errors import ConfigError, EngineError

LOOPBACK = "127.0.0.1"
REGISTRY_PORT = 8400
SECRET_VARIABLE = "BATON_SECRET"
API_KEY_VARIABLE = "BATON_API_KEY"
CACHE_VARIABLE = "BATON_CACHE"
VLLM_VARIABLE = "BATON_VLLM"
LISTENER_VARIABLE = "BATON_LISTENER"
"""The number of a listening socket that `baton up` holds for its router."""
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
BACKLOG = 1024
"""Connections that wait to be accepted."""
SGLANG_VARIABLE = "BATON_SGLANG"
SECRET_BYTES_MIN = 16
API_KEY_CHARACTERS_MIN = 8
_MAKE_ONE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def secret(path: str | Path | None) -> bytes:
    """The secret that all instances share: from a file only its owner can read, else from BATON_SECRET."""
    if path is not None:
        return _long_enough(_read_private(path), f"secret file {path}")
    raw = os.environb.get(SECRET_VARIABLE.encode())
    if raw is None:
        raise ConfigError(
            f"no secret: name a file with --secret-file, or set {SECRET_VARIABLE}, the same everywhere; "
            f"{_MAKE_ONE}"
        )
    return _long_enough(raw, f"variable {SECRET_VARIABLE}")


def has_secret() -> bool:
    """Whether BATON_SECRET is set."""
    return SECRET_VARIABLE.encode() in os.environb


def api_keys(path: str | Path | None) -> tuple[str, ...]:
    """The API keys that are accepted: one per line of a file only its owner can read, else BATON_API_KEY.

    Empty if there is neither: then no key is required.
    """
    raw, where = os.environb.get(API_KEY_VARIABLE.encode(), b""), f"variable {API_KEY_VARIABLE}"
    if path is not None:
        raw, where = _read_private(path, "API key"), f"API key file {path}"
    keys = tuple(line.strip() for line in raw.decode("utf-8", "replace").splitlines() if line.strip())
    if path is not None and not keys:
        raise ConfigError(f"{where} is empty; {_MAKE_ONE}")
    for key in keys:
        if len(key) < API_KEY_CHARACTERS_MIN or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{where} has a key of {len(key)} characters that cannot be used: at least "
                f"{API_KEY_CHARACTERS_MIN}, printable ASCII, no spaces; {_MAKE_ONE}"
            )
    return keys


def vllm_key() -> str:
    """The API key of vLLM servers, in vLLM's own variable; empty: they need none."""
    return os.environ.get(VLLM_KEY_VARIABLE, "")


def sglang_options() -> dict[str, Any]:
    """Options of the transfer backend in an SGLang server: a JSON object in BATON_SGLANG."""
    text = os.environ.get(SGLANG_VARIABLE) or "{}"
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"variable {SGLANG_VARIABLE} is {text!r}; give a JSON object, for instance {{}}")
    return options


def vllm_command(given: str | None) -> str:
    """The `vllm` program: as given, or BATON_VLLM, or beside this Python, or on the path."""
    named = given or os.environ.get(VLLM_VARIABLE)
    beside = Path(sys.executable).parent / "vllm"
    command = shutil.which(named or (str(beside) if beside.exists() else "vllm"))
    if command is None:
        raise ConfigError(
            f"vLLM command {named or 'vllm'!r} does not exist; install vLLM beside Baton, or name its "
            f"program with --vllm or {VLLM_VARIABLE}"
        )
    return command


def gpus(count: int | None = None) -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; `count` are here."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name and name != "-1"]
    if count is None:
        count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return [str(index) for index in range(count)]


def vllm_environment() -> dict[str, str]:
    """Variables of vLLM servers on one machine: a key of their own, and collectives on loopback only."""
    defaults = {
        VLLM_KEY_VARIABLE: secrets.token_hex(16),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: os.environ.get(name) or value for name, value in defaults.items()}


@lru_cache(maxsize=1024)
def is_loopback(address: str | None) -> bool:
    """Whether an IP address is this machine's own; an unreadable one is not."""
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def check_binding(host: str, *, has_api_key: bool, has_secret: bool) -> None:
    """Refuses an address that others can reach, unless there are an API key and a control-plane secret."""
    outside = sorted({str(place[4][0]) for place in _places(host, 0) if not is_loopback(str(place[4][0]))})
    absent = {"an API key (--api-key-file or BATON_API_KEY)": has_api_key}
    absent["the control-plane secret (--secret-file or BATON_SECRET)"] = has_secret
    wanted = [name for name, is_there in absent.items() if not is_there]
    if outside and wanted:
        raise ConfigError(
            f"host {host!r} ({', '.join(outside)}) can be reached from outside; "
            f"give {' and '.join(wanted)}, or listen on {LOOPBACK}"
        )


def check_registry(url: str) -> None:
    """Raises ConfigError on what is not the address of a registry."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or too large, brackets that do not match
        is_address = False
    if not is_address or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(f"registry {url!r} is not an address; write http://host:port or https://host:port")


def open_listener(host: str, port: int) -> socket.socket | None:
    """Listens in the place of a service that may be restarted; None where the host has several addresses."""
    places = _places(host, port)
    if len(places) > 1:
        return None
    family, _, _, _, address = places[0]
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise _port_error(host, port, error) from None


def take_listener() -> socket.socket | None:
    """The listening socket that a supervisor holds for this process, if it does."""
    number = os.environ.pop(LISTENER_VARIABLE, "")
    return socket.socket(fileno=int(number)) if number else None


def check_port(host: str, port: int) -> None:
    """Raises EngineError if the port is in use, before anything takes its time to start."""
    if LISTENER_VARIABLE in os.environ:
        return
    for family, kind, protocol, _, address in _places(host, port):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise _port_error(host, port, error) from None


def _port_error(host: str, port: int, error: OSError) -> EngineError:
    return EngineError(
        f"cannot listen on {host}:{port}: {error.strerror}; name another port with --port, or 0 for a free "
        "one"
    )


def _places(host: str, port: int) -> list[tuple[Any, ...]]:
    try:
        return [*socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host {host!r} has no address: {error}; use {LOOPBACK} or an address here"
        ) from None


def cache_folder() -> Path:
    """The folder of downloaded models: BATON_CACHE, else below the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"


def _read_private(path: str | Path, kind: str = "secret") -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{kind} file {path} has mode {stat.S_IMODE(mode):04o}, so other users can read it; "
                    f"run: chmod 600 {path}"
                )
            return file.read()
    except OSError as cause:
        raise ConfigError(f"{kind} file {path}: {cause.strerror}; {_MAKE_ONE}") from None


def _long_enough(raw: bytes, where: str) -> bytes:
    # The newline that an editor or a shell leaves behind is no part of a secret.
    stripped = raw.strip()
    if not stripped:
        raise ConfigError(f"{where} is empty; {_MAKE_ONE}")
    if len(stripped) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"{where} has {len(stripped)} bytes, at least {SECRET_BYTES_MIN} are needed; {_MAKE_ONE}"
        )
    return stripped


def default_threads(num_ranks: int) -> int:
    """Threads of each rank, if their number is not given."""
    return max(1, (os.cpu_count() or 1) // num_ranks)


def environment() -> dict[str, str]:
    """All variables of this process."""
    return dict(os.environ)


def rank_environment(num_threads: int) -> dict[str, str]:
    """The environment of a rank process: threads that do not spin, and collectives on loopback only."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }


def set_variables(variables: dict[str, str]) -> None:
    """Sets variables that libraries read when this process imports them."""
    os.environ.update(variables)


def take_environment(environment: dict[str, str]) -> None:
    """Replaces the environment of a forked process."""
    os.environ.clear()
    os.environ.update(environment)


def service_environment(secret: str) -> dict[str, str]:
    """The environment of a supervised service, with the secret, which no command line shows."""
    return {**os.environ, SECRET_VARIABLE: secret, "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of mutual TLS: each end has a certificate for its address, all signed by one authority."""

    certificate: str
    key: str
    authority: str

    def accepting(self) -> ssl.SSLContext:
        """For a server: it requires a client certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._filled(context)

    def serving(self) -> ssl.SSLContext:
        """For an HTTPS server: clients verify it by the authority and need no certificate of their own."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def dialling(self) -> ssl.SSLContext:
        """For a client: the server's certificate must name the address it connects to."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            # With an empty passphrase an encrypted key is an error, not a prompt on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as cause:
            raise ConfigError(
                f"TLS certificate {self.certificate} with key {self.key}: {cause}; "
                "give two PEM files that belong together, the key without a passphrase"
            ) from None
        try:
            context.load_verify_locations(self.authority)
        except OSError as cause:
            raise ConfigError(
                f"TLS authority {self.authority}: {cause}; give the PEM file that signed the certificates"
            ) from None
        return context


def tls_files(certificate: Path | None, key: Path | None, authority: Path | None) -> Tls | None:
    """The Tls of --tls-cert, --tls-key and --tls-ca: all three or none."""
    paths = [certificate, key, authority]
    if not any(paths):
        return None
    if certificate is None or key is None or authority is None:
        raise ConfigError("TLS needs --tls-cert, --tls-key and --tls-ca together; give all three, or none")
    return Tls(str(certificate), str(key), str(authority))


def trusting(authority: str | None) -> ssl.SSLContext:
    """For an HTTPS client: trusts this authority's PEM file, or the system's where there is none."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as cause:
        raise ConfigError(
            f"TLS authority {authority}: {cause}; give the PEM file that signed the server's certificate"
        ) from None
