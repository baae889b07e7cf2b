"""Names of models: what each leads to, and what is said where it leads nowhere."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants, try_to_load_from_cache
from tests.engine.tiny import tiny

from baton.checkpoint.names import find_dtype
from baton.checkpoint.opening import open_checkpoint
from baton.checkpoint.safetensors import SafetensorsFolder
from baton.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nowhere/at-all", "there is no model 'nowhere/at-all' here"),
        ("nowhere/at-all", "fetch it with `hf download nowhere/at-all`"),
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
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + (9).to_bytes(4, "little"))
    with pytest.raises(ConfigError, match=r"a\.gguf: GGUF version 9 is not supported"):
        open_checkpoint(str(tmp_path))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(tiny("llama"), tmp_path / "model")
    assert isinstance(open_checkpoint("~/model"), SafetensorsFolder)


def test_an_id_is_found_in_the_hugging_face_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some-org--some.model"
    snapshot = folder / "snapshots" / "1234abcd"
    shutil.copytree(tiny("llama"), snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with pytest.raises(ConfigError, match="hf download some-org/"):
        open_checkpoint("some-org/some.model")  # fetched by its commit, never as the main branch
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1234abcd")
    assert open_checkpoint("some-org/some.model").path == snapshot
    assert find_dtype("some-org/some.model") == "bf16"
    # The library finds the same file.
    found = try_to_load_from_cache("some-org/some.model", "config.json", cache_dir=tmp_path)
    assert found == str(snapshot / "config.json")
