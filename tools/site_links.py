"""A hook of mkdocs: links from docs/ to other folders, which the site does not have, become plain text."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page without links to files outside of docs/."""
    depth = page.file.src_uri.count("/")
    up = re.escape("../" * (depth + 1))
    return re.sub(rf"\[([^\]]+)\]\({up}[^)]*\)", r"\1", markdown)
