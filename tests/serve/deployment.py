"""Deployments of real processes on a tiny checkpoint: a registry, prefill and decode instances, a router.

    with deployment(prefill=["tp2"], decode=["pp2"]) as world:
        answer = world.ask("/v1/completions", {"prompt": "the fox", "max_tokens": 8, "temperature": 0})
        assert answer.json["choices"][0]["text"] == oracle_text("the fox", 8).text

Everything runs on loopback and ends with the test, also when the test process is killed. On a failure the
last lines of every part are printed.
"""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.serve.hosts import Host
from tests.serve.parts import END_S_MAX, Answer, Part, ask, children, is_rank, until
from tests.serve.speaking import Expected, encode, model, oracle_text, tokenizer

from baton.settings import Tls

__all__ = [
    "Answer",
    "Deployment",
    "Expected",
    "Part",
    "Want",
    "ask",
    "children",
    "deployment",
    "encode",
    "model",
    "oracle_text",
    "registry_part",
    "router_part",
    "secret_file",
    "serve_part",
    "tokenizer",
    "until",
]

POOL_TOKENS = 4096
SERVE_OPTIONS = {"pool-tokens": str(POOL_TOKENS), "silence-s": "15"}


@dataclass(frozen=True)
class Want:
    """What a deployment is made of; options are those of the command line, without dashes."""

    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    both: Sequence[str] = ()
    has_router: bool = True
    has_registry: bool = True
    serve: Mapping[str, str] = field(default_factory=dict)
    route: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    tls: Tls | None = None
    model: str | None = None
    hosts: Mapping[str, Host] = field(default_factory=dict)
    """Where registry, router, prefill and decode run; those that are not named run here."""


def secret_file(folder: Path, name: str = "secret", text: str | None = None) -> Path:
    """A file that only its owner can read, with a secret in it."""
    file = folder / name
    file.touch(mode=0o600)
    file.write_text(text or secrets.token_hex(32))
    return file


def registry_part(folder: Path, port: int = 0, tls: Tls | None = None, place: Host | None = None) -> Part:
    """`baton registry`, not started yet."""
    words = ["registry", "--secret-file", str(folder / "secret")]
    return Part("registry", words, port or free_port(), folder, tls=tls, host=place)


def serve_part(
    folder: Path,
    name: str,
    role: str,
    layout: str,
    *,
    tls: Tls | None = None,
    place: Host | None = None,
    **options: str,
) -> Part:
    """`baton serve`, not started yet; options with underscores for dashes."""
    port = int(options.pop("port", 0)) or free_port()
    words = ["serve", "--device", "cpu", "--role", role, "--layout", layout, "--name", name]
    words += ["--model", options.pop("model", "") or str(model()), "--secret-file", str(folder / "secret")]
    if role != "decode" and "bootstrap_port" not in options:
        options["bootstrap_port"] = str(free_port())
    for option, value in {**_underscored(SERVE_OPTIONS), **options}.items():
        words += ["--" + option.replace("_", "-"), value]
    return Part(name, words, port, folder, tls=tls, host=place)


def router_part(
    folder: Path, registry: str, *, tls: Tls | None = None, place: Host | None = None, **options: str
) -> Part:
    """`baton route`, not started yet; options with underscores for dashes."""
    port = int(options.pop("port", 0)) or free_port()
    words = ["route", "--registry", registry, "--secret-file", str(folder / "secret")]
    for option, value in options.items():
        words += ["--" + option.replace("_", "-"), value]
    return Part("router", words, port, folder, tls=tls, host=place)


class Deployment:
    """The parts of a deployment, by name and by role."""

    def __init__(self, want: Want, folder: Path) -> None:
        self.want = want
        self.folder = folder
        self.secret = secret_file(folder).read_text()
        self.registry = (
            registry_part(folder, tls=want.tls, place=want.hosts.get("registry"))
            if want.has_registry
            else None
        )
        common = {**_underscored(want.serve), **({"model": want.model} if want.model else {})}
        if self.registry is not None:
            common["registry"] = self.registry.url
        if want.api_key is not None:
            common["api_key_file"] = str(secret_file(folder, "api-key", want.api_key))
        self.prefill = self._instances("prefill", want.prefill, common)
        self.decode = self._instances("decode", want.decode, common)
        self.both = self._instances("both", want.both, common)
        self.router: Part | None = None
        if want.has_router:
            assert self.registry is not None, "a router needs a registry"
            keys = {"api_key_file": common["api_key_file"]} if want.api_key is not None else {}
            routing = {**_underscored(want.route), **keys}
            place = want.hosts.get("router")
            self.router = router_part(folder, self.registry.url, tls=want.tls, place=place, **routing)

    def _instances(self, role: str, layouts: Sequence[str], common: Mapping[str, str]) -> list[Part]:
        tls, place = self.want.tls, self.want.hosts.get(role)
        return [
            serve_part(self.folder, f"{role}-{index}", role, layout, tls=tls, place=place, **common)
            for index, layout in enumerate(layouts)
        ]

    @property
    def instances(self) -> list[Part]:
        """Every server."""
        return [*self.prefill, *self.decode, *self.both]

    @property
    def parts(self) -> list[Part]:
        """Every part, in the order in which they start."""
        return [part for part in (self.registry, *self.instances, self.router) if part is not None]

    @property
    def url(self) -> str:
        """Where clients ask: the router, else the first instance."""
        return self._front.url

    @property
    def _front(self) -> Part:
        return self.router or self.instances[0]

    @property
    def model(self) -> str:
        """What the endpoint calls its model."""
        return str(self.ask("/v1/models").json["data"][0]["id"])

    def ask(self, path: str, body: Any = None, key: str | None = None) -> Answer:
        """One request of a client."""
        return self._front.ask(path, body, key or self.want.api_key)

    def start(self) -> None:
        """Starts all parts at once and waits until each is able to serve."""
        if self.registry is not None:
            self.registry.start().wait()
        for part in self.parts:
            if part is not self.registry:
                part.start()
        for part in self.parts:
            part.wait()

    def close(self) -> None:
        """Ends all parts, each by its own pid, and checks that no rank is left."""
        ranks = [pid for part in self.instances if part.is_alive for pid in part.rank_pids]
        for part in reversed(self.parts):
            if part.is_alive:
                part.send(signal.SIGTERM)
        for part in self.parts:
            part.end()
        alive = {pid for pid in ranks if is_rank(pid)}
        until(lambda: not {pid for pid in alive if is_rank(pid)}, f"ranks {alive} end", END_S_MAX)

    def told(self) -> str:
        """The end of the output of every part."""
        return "\n".join(part.told() for part in self.parts)


@contextmanager
def deployment(
    prefill: Sequence[str] = (), decode: Sequence[str] = (), *, router: bool = True, **more: Any
) -> Iterator[Deployment]:
    """A running deployment of these layouts; `more` are further fields of Want."""
    want = Want(prefill=prefill, decode=decode, has_router=router, **more)
    with tempfile.TemporaryDirectory(prefix="baton-serve-") as name:
        world = Deployment(want, Path(name))
        try:
            world.start()
            yield world
        except BaseException:
            print(world.told(), file=sys.stderr)
            raise
        finally:
            world.close()


def _underscored(options: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in options.items()}
