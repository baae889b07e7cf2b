"""Print the machines, or write them into a page: `python -m baton.protocol docs/protocol.md`."""

from __future__ import annotations

import sys
from pathlib import Path

from baton.protocol.diagram import document, rewritten


def main(arguments: list[str]) -> None:
    """Without arguments the generated part goes to stdout; each page that is named is written anew."""
    if not arguments:
        print(document())
    for name in arguments:
        page = Path(name)
        page.write_text(rewritten(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
