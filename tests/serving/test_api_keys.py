"""API keys come from a private file, else from the environment, and only if they can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton import settings
from baton.errors import ConfigError


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_keys_are_lines_of_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATON_API_KEY", "key-of-the-environment")
    assert settings.api_keys(None) == ("key-of-the-environment",)
    assert settings.api_keys(key_file(tmp_path, "key-of-one\n\n key-of-two \n")) == (
        "key-of-one",
        "key-of-two",
    )
    monkeypatch.delenv("BATON_API_KEY")
    assert settings.api_keys(None) == ()


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ("", 0o600, "is empty"),
        ("short\n", 0o600, "at least 8"),
        ("a key with spaces\n", 0o600, "no spaces"),
        ("key-of-one\n", 0o644, "chmod 600"),
    ],
)
def test_keys_that_cannot_be_used_are_refused_and_not_shown(tmp_path: Path, text: str, mode: int, words: str):
    with pytest.raises(ConfigError, match=words) as raised:
        settings.api_keys(key_file(tmp_path, text, mode))
    assert not text.strip() or text.strip() not in str(raised.value)
