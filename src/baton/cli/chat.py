"""`baton chat`: a conversation with any OpenAI endpoint, from a terminal or a pipe."""

from __future__ import annotations

import readline  # noqa: F401 - with it, input() has a history and keys to edit with
import sys
from pathlib import Path
from typing import Annotated

import typer

from baton import settings
from baton.cli.deployment.talking import ChatError, Talk, Voice

URL = "http://127.0.0.1:8000"
PROMPT = "> "


def chat(
    *,
    url: Annotated[str, typer.Option(metavar="URL", help="of an OpenAI endpoint, with or without /v1")] = URL,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="default: the first that it serves")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="what it is told beforehand")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="whose first line is the key; default: BATON_API_KEY")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, metavar="T", help="0: the likeliest token, always")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="of an answer")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM authority of an https URL; default: the system's")
    ] = None,
) -> None:
    """Talks to a model, streaming; Ctrl-C stops an answer, Ctrl-D leaves. From a pipe: a question a line."""
    keys = settings.api_keys(None if api_key_file is None else str(api_key_file))
    wishes = {"temperature": temperature, "max_tokens": max_tokens}
    talk = Talk(Voice(url, keys[0] if keys else "", tls_ca), model, system, wishes)
    if sys.stdin.isatty() and sys.stdout.isatty():
        _at_a_terminal(talk)
        return
    for line in sys.stdin:
        if line.strip():
            _answer(talk, line.strip())


def _at_a_terminal(talk: Talk) -> None:
    print(f"{talk.model} at {talk.voice.url}; Ctrl-C stops an answer, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            question = input(PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not question:
            continue
        try:
            _answer(talk, question)
        except KeyboardInterrupt:
            print(" [stopped]")
        except ChatError as error:
            print(f"[{error}]", file=sys.stderr)


def _answer(talk: Talk, question: str) -> None:
    for text in talk.ask(question):
        print(text, end="", flush=True)
    print(flush=True)
