"""`baton chat`: a chat with any OpenAI endpoint, from a terminal or a pipe."""

from __future__ import annotations

import readline  # noqa: F401 - gives input() a history and line editing
import sys
from pathlib import Path
from typing import Annotated

import typer

from baton import settings
from baton.cli.client import ApiClient, ChatError, ChatSession
from baton.cli.options import UrlTlsCa

URL = "http://127.0.0.1:8000"
PROMPT = "> "


def chat(
    *,
    url: Annotated[
        str, typer.Option(metavar="URL", help="URL of an OpenAI endpoint, with or without /v1")
    ] = URL,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="model name (default: the first that it serves)")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="system prompt")] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="file whose first line is the API key (default: BATON_API_KEY)"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="T", help="sampling temperature; 0: greedy decoding (default: the server's)"
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="maximum tokens of an answer")
    ] = None,
    tls_ca: UrlTlsCa = None,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D quits. From a pipe, each line is a question."""
    keys = settings.api_keys(None if api_key_file is None else str(api_key_file))
    params = {"temperature": temperature, "max_tokens": max_tokens}
    session = ChatSession(ApiClient(url, keys[0] if keys else "", tls_ca), model, system, params)
    if sys.stdin.isatty() and sys.stdout.isatty():
        _chat_on_terminal(session)
        return
    for line in sys.stdin:
        if line.strip():
            _answer(session, line.strip())


def _chat_on_terminal(session: ChatSession) -> None:
    print(f"{session.model} at {session.client.url}; Ctrl-C stops an answer, Ctrl-D quits", file=sys.stderr)
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
            _answer(session, question)
        except KeyboardInterrupt:
            print(" [stopped]")
        except ChatError as error:
            print(f"[{error}]", file=sys.stderr)


def _answer(session: ChatSession, question: str) -> None:
    for text in session.ask(question):
        print(text, end="", flush=True)
    print(flush=True)
