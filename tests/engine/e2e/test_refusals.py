"""A model or an option that cannot be used is refused in one line, before a rank is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.engine.e2e.instances import Side

from baton.engine import executor
from baton.engine.deployment import Deployment
from baton.errors import ConfigError, LayoutError


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "WorkerProcess", lambda config: pytest.fail("a rank was started"))


def changed(folder: Path, where: Path, **values: object) -> Path:
    """A copy of a checkpoint with other fields in its config."""
    shutil.copytree(folder, where)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, **values}))
    return where


def without_file(folder: Path, where: Path) -> Path:
    changed(folder, where)
    (where / "model.safetensors").unlink()
    return where


def without_tensor(folder: Path, where: Path) -> Path:
    changed(folder, where)
    weights = load_file(where / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, where / "model.safetensors", {"format": "pt"})
    return where


WRONG = {
    "no such model": (lambda folder, where: where, "no model"),
    "unknown family": (
        lambda folder, where: changed(folder, where, model_type="gptj"),
        "gptj.*not supported",
    ),
    "wrong shape": (lambda folder, where: changed(folder, where, intermediate_size=90), "90"),
    "no weights": (without_file, "safetensors"),
    "a tensor short": (without_tensor, r"layers\.3\.mlp\.up_proj"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_cannot_run(folder: Path, tmp_path: Path, name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(ConfigError, match=words) as caught:
        Deployment(Side(str(make(folder, tmp_path / "checkpoint"))).config).start()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "options", "words"),
    [
        ("tp5", {}, "tp5"),
        ("pp9", {}, "pp5"),
        ("xp2", {}, "xp"),
        ("tp1", {"dtype": "int3"}, "int3"),
        ("tp1", {"policy": "sometimes"}, "sometimes"),
        ("tp1", {"transport": "pigeon"}, "pigeon"),
        ("tp1", {"chunk_tokens": 0}, "chunk_tokens"),
        ("tp1", {"page_tokens": 0}, "page"),
        ("tp1", {"device": "tpu"}, "tpu"),
    ],
    ids=str,
)
def test_an_instance_that_cannot_be(
    folder: Path, layout: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises((ConfigError, LayoutError), match=words) as caught:
        Deployment(Side(str(folder), layout).but(**options).config).start()
    assert "\n" not in str(caught.value)
