"""Every layout computes what one rank computes, which computes what `transformers` does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.parallel.ranks import on_mesh
from tests.engine.parallel.script import Logits, run_rank, run_ranks, script
from tests.engine.tiny import tiny
from transformers import AutoModelForCausalLM

from baton.engine.parallel import Mesh
from baton.plan import parse_layout

FAMILIES = ("llama", "deepseek_v3")
QUICK = ("tp2", "cp2:stripe1")
OTHERS = (
    "pp2",
    "dp2.tp1",
    "tp3",
    "tp4",
    "pp3:1-2-1",
    "cp2:mirror",
    "cp2",
    "cp2:split",
    "cp3:stripe3",
    "dp2.tp2",
    "tp2.dp2",
    "dp2.cp2",
    "pp2.cp2.tp2",
)
LAYOUTS = [*QUICK, *(pytest.param(layout, marks=pytest.mark.engine) for layout in OTHERS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("tiny")
    return [tiny(family, where, num_hidden_layers=4) for family in FAMILIES]


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[Logits]:
    return [run_rank(Mesh(parse_layout("tp1"), 0), folder) for folder in folders]


def test_one_rank_is_right(folders: list[Path], alone: list[Logits]) -> None:
    for folder, found in zip(folders, alone, strict=True):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        )
        tokens: dict[int, list[int]] = {}
        for number, (batch,) in enumerate(script(1, model.config.vocab_size).steps):
            for work in batch.sequences:
                tokens.setdefault(work.sequence, []).extend(work.tokens)
                if work.num_samples:
                    with torch.inference_mode():
                        expected = model(torch.tensor([tokens[work.sequence]])).logits[0, -1]
                    np.testing.assert_allclose(found[number, work.sequence], expected, atol=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, folders: list[Path], alone: list[Logits], tmp_path: Path) -> None:
    if layout == "tp3":
        folders = [tiny(family, tmp_path, num_hidden_layers=4, num_key_value_heads=6) for family in FAMILIES]
        alone = [run_rank(Mesh(parse_layout("tp1"), 0), folder) for folder in folders]
    answers = on_mesh(layout, tmp_path / "meeting", run_ranks, folders)
    for i, expected in enumerate(alone):
        by_sequence = {at[1]: [] for at in expected}
        for (_, sequence), row in sorted(expected.items()):
            by_sequence[sequence].append(row)
        num_seen = 0
        for found in (answer[i] for answer in answers):
            for sequence in {at[1] for at in found}:
                rows = [row for (_, other), row in sorted(found.items()) if other == sequence]
                np.testing.assert_allclose(rows, by_sequence[sequence], atol=1e-4)
                num_seen += 1
        sampled_by = parse_layout(layout).size("tp")
        assert num_seen == sampled_by * len(by_sequence)
