"""`python -m baton` is the `baton` command."""

import sys
from multiprocessing.connection import Connection

from baton import cli


def main(connection: Connection, *words: str) -> None:
    """The command in a forked process (fork_server.py)."""
    connection.close()
    sys.argv = ["baton", *words]
    cli.main()


if __name__ == "__main__":
    sys.exit(cli.main())
