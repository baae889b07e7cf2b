"""What an engine says when it asks for a hand-over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from baton.errors import ConfigError
from baton.plan import Prompt, Spec
from baton.plan.routes import check_held
from baton.plan.tokens import Ints
from baton.session.handles import Pages
from baton.transport import NOW, Fence

DIGEST_BYTES = 16
TRANSFER_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class Digest:
    """What was prefilled: its length and 128 bits that stand for everything that shaped the cache."""

    num_tokens: int
    value: bytes

    def __post_init__(self) -> None:
        Prompt(self.num_tokens)
        if not isinstance(self.value, bytes) or len(self.value) != DIGEST_BYTES:
            raise ConfigError(f"a digest has {DIGEST_BYTES} bytes, got {self.value!r}; use prompt_digest")


def prompt_digest(
    token_ids: Iterable[int], *, adapter: str = "", salt: str = "", embeddings: bytes = b""
) -> Digest:
    """The digest of a prompt: token ids, adapter, cache salt and input embeddings."""
    tokens = np.fromiter(token_ids, dtype="<i8")
    found = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"baton prompt")
    for part in (tokens.tobytes(), adapter.encode(), salt.encode(), embeddings):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return Digest(len(tokens), found.digest())


@dataclass(frozen=True, slots=True)
class Request:
    """A transfer as its target asks for it."""

    transfer: str
    source: str
    """An instance's name, to be looked up, or its coordinator's host:port."""
    digest: Digest
    pages: Mapping[int, Pages]
    """By target rank."""
    held: Mapping[str, int] = field(default_factory=dict)
    source_dp: int | None = None
    """Which group of the source prefills; None: the source says."""
    fence: Fence = NOW
    """The device work of the pages' last owner."""
    is_verified: bool = False

    def checked(self, spec: Spec) -> Request:
        """The request with page tables of its own; raises ConfigError on what could never be granted."""
        check_transfer(self.transfer)
        check_held(spec, Prompt(self.digest.num_tokens, dict(self.held)))
        layout = spec.layout
        if not self.pages:
            raise ConfigError(f"transfer {self.transfer}: give the pages of at least one rank")
        tables: dict[int, Pages] = {}
        for rank, pages in self.pages.items():
            if not 0 <= rank < layout.num_ranks:
                raise ConfigError(f"pages for rank {rank}, but {layout} has {layout.num_ranks} ranks")
            tables[rank] = read_pages(pages, spec)
        if len({layout.coordinates(rank)["dp"] for rank in self.pages}) > 1:
            ranks = ", ".join(map(str, sorted(self.pages)))
            raise ConfigError(f"ranks {ranks} of {layout} are of several dp groups; a prompt lives in one")
        return replace(self, pages=tables)


def check_transfer(transfer: str) -> None:
    """Raises ConfigError on what cannot be a transfer's id."""
    if not isinstance(transfer, str) or not 0 < len(transfer) <= TRANSFER_CHARS_MAX:
        raise ConfigError(
            f"transfer id {transfer!r:.60}: use a string of 1 to {TRANSFER_CHARS_MAX} characters"
        )


def read_pages(pages: Pages, spec: Spec) -> dict[str, Ints]:
    """A page table as it is now; raises ConfigError on ids that the pools of a spec do not have."""
    table: dict[str, Ints] = {}
    for group, ids in pages.items():
        if group not in spec.cache.groups:
            known = ", ".join(spec.cache.groups)
            raise ConfigError(f"no component is in group {group!r}; the cache has {known}")
        found, num_pages = np.asarray(ids), spec.storage.pages_of(group)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise ConfigError(f"pages of group {group!r} have to be a list of integers, got {ids!r}")
        if found.size and not 0 <= int(found.min()) <= int(found.max()) < num_pages:
            raise ConfigError(
                f"pages {found.min()} to {found.max()} of group {group!r}: its pools have {num_pages} pages"
            )
        table[group] = found.astype(np.int64)
    return table
