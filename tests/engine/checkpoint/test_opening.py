"""Names of models: what each leads to, and what is said where it leads nowhere."""

import shutil
from pathlib import Path

import pytest
from tests.engine.tiny import tiny

from baton.engine.checkpoint import open_checkpoint
from baton.engine.checkpoint.safetensors import SafetensorsFolder
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nowhere/at-all", "there is no model 'nowhere/at-all' here"),
        ("org/model\0", "there is no model"),
        ("", "there is no model ''"),
        ("llama-3-8b", "or dummy:llama-3-8b for random ones"),
        ("dummy:nothing", "neither a built-in card"),
        ("dummy:falcon-h1-34b", "the card has the shape of the cache only"),
    ],
)
def test_names_that_lead_nowhere(model: str, said: str):
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(model)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_checkpoint(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="is no checkpoint"):
        open_checkpoint(str(tmp_path / "notes.txt"))
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(ConfigError, match="name its folder"):
            open_checkpoint(str(tiny("llama") / name))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_checkpoint(str(tmp_path))


def test_folder_with_several_gguf_files(tmp_path: Path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"has 2 \.gguf files \(a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "b.gguf").unlink()
    with pytest.raises(ConfigError, match=r"a\.gguf: is not a GGUF file"):
        open_checkpoint(str(tmp_path))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(tiny("llama"), tmp_path / "model")
    assert isinstance(open_checkpoint("~/model"), SafetensorsFolder)
