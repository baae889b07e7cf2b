"""What comes from outside of the command line: the shared secret, the certificates, the cache folder."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError

SECRET_VARIABLE = "BATON_SECRET"
CACHE_VARIABLE = "BATON_CACHE"
SECRET_BYTES_MIN = 16
_MAKE_ONE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def secret(path: str | None) -> bytes:
    """The secret that all instances share: from a file that only its owner can read, else the variable."""
    if path is not None:
        return _long_enough(_read_private(path), f"secret file {path}")
    found = os.environb.get(SECRET_VARIABLE.encode())
    if found is None:
        raise ConfigError(
            f"no secret: name a file with --secret-file, or set {SECRET_VARIABLE}, the same everywhere; "
            f"{_MAKE_ONE}"
        )
    return _long_enough(found, f"variable {SECRET_VARIABLE}")


def cache_folder() -> Path:
    """Where fetched models are kept: the variable's folder, else the user's own cache."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"


def _read_private(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"secret file {path} has mode {stat.S_IMODE(mode):04o}, so that others can use it; "
                    f"run: chmod 600 {path}"
                )
            return file.read()
    except OSError as cause:
        raise ConfigError(f"secret file {path}: {cause.strerror}; {_MAKE_ONE}") from None


def _long_enough(raw: bytes, where: str) -> bytes:
    # The newline that an editor or a shell leaves behind is no part of a secret.
    found = raw.strip()
    if not found:
        raise ConfigError(f"{where} is empty; {_MAKE_ONE}")
    if len(found) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"{where} has {len(found)} bytes, at least {SECRET_BYTES_MIN} are needed; {_MAKE_ONE}"
        )
    return found


def rank_environment(num_threads: int) -> dict[str, str]:
    """What a rank process starts with: threads that do not spin, and collectives on loopback alone."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of mutual TLS: each end has a certificate that names its address, all of one authority."""

    certificate: str
    key: str
    authority: str

    def accepting(self) -> ssl.SSLContext:
        """For the end that listens: it asks the dialler for a certificate too."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._filled(context)

    def dialling(self) -> ssl.SSLContext:
        """For the end that dials: the certificate it is shown has to name the address it dialled."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            # An empty passphrase: an encrypted key is an error here and no question on the terminal.
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
