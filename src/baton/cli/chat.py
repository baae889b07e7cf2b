"""`baton chat`: a chat with any OpenAI endpoint, from a terminal or a pipe."""

from __future__ import annotations

import readline  # noqa: F401 - gives input() a history and line editing
import sys
from pathlib import Path

from baton import settings
from baton.cli.client import ApiClient, ChatError, ChatSession
from baton.cli.options import CLIENT_KEY_FILE, URL_TLS_CA
from baton.cli.parser import command, option

PROMPT = "> "


@command
def chat(
    *,
    url: str = option("http://127.0.0.1:8000", "URL", "URL of an OpenAI endpoint, with or without /v1"),
    model: str | None = option(None, "MODEL", "model name (default: the first that it serves)"),
    system: str | None = option(None, "TEXT", "system prompt"),
    api_key_file: Path | None = CLIENT_KEY_FILE,
    temperature: float | None = option(
        None, "T", "sampling temperature; 0: greedy decoding (default: the server's)", min=0.0
    ),
    max_tokens: int | None = option(None, "N", "maximum tokens of an answer", min=1),
    tls_ca: Path | None = URL_TLS_CA,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D quits. From a pipe, each line is a question."""
    keys = settings.api_keys(api_key_file)
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
