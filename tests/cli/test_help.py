"""`--help` and `--version`."""

from __future__ import annotations

import sys

import pytest

from baton import __version__
from baton.cli import VERBS, main

COMMANDS = [
    *VERBS,
    *(f"bench {name}" for name in ("plan", "transport", "handoff", "overlap", "engine", "serve")),
]


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["baton", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = said(monkeypatch, capsys, *command.split(), "--help")
    assert text.startswith(f"Usage: baton {command} [OPTIONS]")
    for noise in ("<bool>", "<str>", "<list", "BOOLEAN", "\u2500", "\u2026"):
        assert noise not in text


@pytest.mark.parametrize("command", ["serve", "generate", "up"])
def test_help_of_the_transport_names_defaults_of_this_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text = said(monkeypatch, capsys, command, "--help")
    assert text.count("cuda_ipc") == (command == "up")


def test_the_version_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(monkeypatch, capsys, "--version") == f"baton {__version__}\n"
    overview = said(monkeypatch, capsys)
    assert "--version" in overview
    assert all(f"\n  {verb} " in overview for verb in VERBS)
