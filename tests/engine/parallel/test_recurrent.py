"""Recurrent families: every layout computes what one rank does, which computes what `transformers` does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.hybrids import HYBRIDS, hybrid
from tests.engine.parallel.ranks import on_mesh
from tests.engine.parallel.script import Logits, run_rank, run_ranks, script
from transformers import AutoModelForCausalLM

from baton.engine.attention import states
from baton.engine.attention.states import Alike, PassStates
from baton.engine.parallel import Mesh
from baton.plan import parse_layout

CLOSE = 1e-3
"""Of logits between 10 and 100."""
FAMILIES = ("qwen3_next", "falcon_h1")
UNEVEN = {
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 3},
    "falcon_h1": {"mamba_n_groups": 3, "mamba_n_heads": 6, "num_key_value_heads": 3},
}
"""Three ranks get unlike numbers of heads."""
LAYOUTS = (
    "cp2:mirror",
    "tp2",
    "tp3",
    "tp6",
    "pp2",
    "dp2.tp1",
    "cp2:stripe1",
    "cp2:split",
    "cp3:stripe3",
    "dp2.tp2",
    "pp2.cp2.tp2",
)


def alone(folder: Path) -> Logits:
    return run_rank(Mesh(parse_layout("tp1"), 0), folder)


@pytest.mark.engine
@pytest.mark.parametrize("family", HYBRIDS)
def test_one_rank_is_right(family: str, tmp_path: Path) -> None:
    folder = hybrid(family, tmp_path)
    found = alone(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    for place, expected in wanted(model).items():
        np.testing.assert_allclose(found[place], expected, atol=CLOSE)


def wanted(model: torch.nn.Module) -> Logits:
    """What `transformers` gives wherever the script samples."""
    found: Logits = {}
    tokens: dict[int, list[int]] = {}
    for number, (batch,) in enumerate(script(1, model.config.vocab_size).steps):
        for work in batch.sequences:
            tokens.setdefault(work.sequence, []).extend(work.tokens)
            if work.num_samples:
                with torch.inference_mode():
                    logits = model(torch.tensor([tokens[work.sequence]])).logits
                found[number, work.sequence] = logits[0, -1].numpy()
    return found


@pytest.mark.engine
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, tmp_path: Path) -> None:
    folders = [hybrid(family, tmp_path, **(UNEVEN[family] if "tp3" in layout else {})) for family in FAMILIES]
    answers = on_mesh(layout, tmp_path / "meeting", run_ranks, folders)
    for i, folder in enumerate(folders):
        compare(layout, alone(folder), [answer[i] for answer in answers])


def compare(layout: str, expected: Logits, answers: list[Logits]) -> None:
    """Every sequence is sampled once for each tp rank, with the logits of one rank alone."""
    by_sequence: dict[int, list[np.ndarray]] = {at[1]: [] for at in expected}
    for (_, sequence), row in sorted(expected.items()):
        by_sequence[sequence].append(row)
    num_seen = 0
    for found in answers:
        for sequence in {at[1] for at in found}:
            rows = [row for (_, other), row in sorted(found.items()) if other == sequence]
            np.testing.assert_allclose(rows, by_sequence[sequence], atol=CLOSE)
            num_seen += 1
    assert num_seen == parse_layout(layout).size("tp") * len(by_sequence)


def test_a_slot_that_is_not_begun_anew_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hybrid("qwen3_5_text", tmp_path)
    right, find = alone(folder), states._alike

    def never_begun(*args: object) -> list[Alike]:
        return [replace(alike, begun=None) for alike in find(*args)]

    monkeypatch.setattr(states, "_alike", never_begun)
    with pytest.raises(AssertionError):
        compare("tp1", right, [alone(folder)])


@pytest.mark.engine
def test_key_heads_that_are_not_gathered_are_seen(tmp_path: Path) -> None:
    folder = hybrid("qwen3_5_text", tmp_path)
    right = alone(folder)
    with pytest.raises(AssertionError):
        compare("tp2", right, on_mesh("tp2", tmp_path / "meeting", run_ungathered, folder))


def run_ungathered(mesh: Mesh, folder: Path) -> Logits:
    """As if the key heads that another rank keeps had no state."""
    read = PassStates._read

    def read_own(self: PassStates, part: str, layer: int, units: object, alike: Alike) -> torch.Tensor:
        found = read(self, part, layer, units, alike)
        first, last = self._blocks(part, layer)[self._tp.index]
        start = units[self._tp.index][0]
        kept = torch.zeros_like(found)
        kept[:, first - start : last - start] = found[:, first - start : last - start]
        return kept

    PassStates._read = read_own
    return run_rank(mesh, folder)
