"""Deployments of our own to measure: a pair of roles behind a router, or one instance that does both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.serve.children import Child, Nursery, baton, free_port

FIRST_TOKENS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a deployment consists of; words are options of `baton serve` and `baton route` as typed."""

    model: str
    prefill: tuple[str, ...] = ("tp1",)
    decode: tuple[str, ...] = ("tp1",)
    """Layouts, one an instance; none: the prefill instances do both, and clients ask the first."""
    instance_words: tuple[str, ...] = ()
    source_words: tuple[str, ...] = ()
    """Of prefill instances alone."""
    route_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Running:
    """A deployment that is ready."""

    url: str
    """Where clients ask."""
    prefill: tuple[Child, ...]
    decode: tuple[Child, ...]
    registry: str = ""
    """Where its instances are found; empty: they are not registered."""


def start(nursery: Nursery, shape: Shape) -> Running:
    """Starts a deployment and waits until it can hand over."""
    if not shape.decode:
        words = ("--role", "both", *shape.instance_words)
        children = [_serve(nursery, shape, layout, words) for layout in shape.prefill]
        urls = [_ready(child) for child in children]
        return Running(urls[0], tuple(children), ())
    registry = nursery.registry()
    at = ("--registry", registry)
    sources = [
        _serve(nursery, shape, layout, ("--role", "prefill", *at, *shape.instance_words, *shape.source_words))
        for layout in shape.prefill
    ]
    targets = [
        _serve(nursery, shape, layout, ("--role", "decode", *at, *shape.instance_words))
        for layout in shape.decode
    ]
    for child in (*sources, *targets):
        _ready(child)
    url = start_router(nursery, registry, shape.route_words)
    return Running(url, tuple(sources), tuple(targets), registry)


def start_router(nursery: Nursery, registry: str, words: Sequence[str] = ()) -> str:
    """A router in front of what is registered; its URL, once it can hand over."""
    own = ("--registry", registry, "--port", "0", "--secret-file", str(nursery.secret_file))
    router = nursery.start("router", baton("route", *own, *words))
    url = router.wait_word("routing at ")
    router.wait_health(url)
    return url


def _serve(nursery: Nursery, shape: Shape, layout: str, words: Sequence[str]) -> Child:
    role = words[1]
    name = f"{role}-{len(nursery.children)}"
    own = ["--model", shape.model, "--layout", layout, "--port", "0", "--name", name]
    own += ["--secret-file", str(nursery.secret_file)]
    if role == "prefill":
        own += ["--bootstrap-port", str(free_port())]
    return nursery.start(role, baton("serve", *own, *words))


def _ready(child: Child) -> str:
    url = child.wait_word("serving at ")
    child.wait_health(url)
    return url
