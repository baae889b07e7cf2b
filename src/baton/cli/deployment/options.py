"""What a user says of a deployment, and the command line of each of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from baton.errors import ConfigError
from baton.settings import Tls

REGISTRY, ROUTER = "registry", "router"
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
LOOPBACK = "127.0.0.1"
NUM_INSTANCES_MAX = 64


@dataclass(frozen=True, slots=True)
class Engine:
    """How every instance runs; None: as `baton serve` does by itself."""

    transport: str | None = None
    overlap: str | None = None
    first_token: str | None = None
    dtype: str | None = None
    device: str | None = None
    page_tokens: int | None = None
    pool_tokens: int | None = None
    context: int | None = None
    chunk_tokens: int | None = None
    queue: int | None = None
    draft: bool = False

    def words(self) -> list[str]:
        """As options of `baton serve`."""
        named = ((each.name, getattr(self, each.name)) for each in fields(self) if each.name != "draft")
        valued = [
            word
            for name, value in named
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        return [*valued, "--draft"] if self.draft else valued


@dataclass(frozen=True, slots=True)
class Front:
    """Where clients ask, and how requests are spread."""

    host: str = LOOPBACK
    port: int = 8000
    policy: str | None = None
    api_key_file: Path | None = None
    local: str | None = None
    """Which prompts decode instances prefill themselves."""
    tls: Tls | None = None
    """Of every part."""

    def tls_words(self) -> list[str]:
        """As options of every part."""
        if self.tls is None:
            return []
        return [
            *("--tls-cert", self.tls.certificate),
            *("--tls-key", self.tls.key),
            *("--tls-ca", self.tls.authority),
        ]


@dataclass(frozen=True, slots=True)
class Options:
    """A whole deployment on this machine."""

    model: str
    prefills: tuple[str, ...]
    decodes: tuple[str, ...] = ()
    """Empty: every instance prefills and decodes by itself."""
    link: str | None = None
    """The speed of each prefill rank's link."""
    engine: Engine = field(default_factory=Engine)
    front: Front = field(default_factory=Front)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of a deployment."""

    name: str
    role: str
    verb: str
    greeting: str
    """How its first line begins; its URL follows."""
    words: tuple[str, ...] = ()
    port: int = 0
    """0: a free one, and the same one again when it is started anew."""
    layout: str = ""

    def command(self, port: int) -> list[str]:
        """What comes behind `baton`."""
        return [self.verb, *self.words, "--port", str(port or self.port)]


def layouts(option: str, text: str | None) -> tuple[str, ...]:
    """The layouts of `pp2,tp3`, one for each instance."""
    if text is None:
        return ()
    found = tuple(word.strip() for word in text.split(","))
    if not all(found):
        raise ConfigError(f"{option} {text!r} has an empty layout; write it like pp2 or pp2,tp2")
    if len(found) > NUM_INSTANCES_MAX:
        raise ConfigError(f"{option} has {len(found)} layouts; at most {NUM_INSTANCES_MAX} are started")
    return found


def registry_part(words: Sequence[str] = ()) -> Part:
    """What instances and the router find each other by."""
    return Part(REGISTRY, REGISTRY, "registry", "registry at ", tuple(words))


def instance_parts(options: Options, registry: str) -> Iterator[Part]:
    """The instances: prefill ones first."""
    first = PREFILL if options.decodes else BOTH
    for role, texts in ((first, options.prefills), (DECODE, options.decodes)):
        for index, layout in enumerate(texts):
            name = f"{role}-{index}"
            words = ["--role", role, "--model", options.model, "--layout", layout]
            words += ["--registry", registry, "--name", name, *options.engine.words()]
            words += options.front.tls_words()
            if options.link and role == PREFILL:
                words += ["--link", options.link]
            yield Part(name, role, "serve", "serving at ", tuple(words), layout=layout)


def router_part(options: Options, registry: str) -> Part:
    """What clients ask."""
    front, words = options.front, ["--registry", registry]
    words += ["--host", front.host, *front.tls_words()]
    words += ["--policy", front.policy] if front.policy else []
    words += ["--local", front.local] if front.local else []
    words += ["--api-key-file", str(front.api_key_file)] if front.api_key_file else []
    return Part(ROUTER, ROUTER, "route", "routing at ", tuple(words), front.port)
