"""The model runner on one rank: hooks, rows to sample from, input embeddings, page copies."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.hooks import NoHooks
from tests.engine.tiny import tiny
from torch import Tensor

from baton.checkpoint.opening import open_checkpoint
from baton.engine.attention.pools import CachePools
from baton.engine.commands import PageCopy, ScheduledBatch, ScheduledSequence
from baton.engine.model_runner import ModelRunner
from baton.engine.models.build import build
from baton.engine.models.layers import ModelStage
from baton.engine.pages import engine_storage
from baton.engine.parallel import Mesh
from baton.errors import EngineError
from baton.plan import Spec, parse_layout
from baton.plan.models.config import read_config
from baton.plan.models.parts import stack
from baton.plan.ownership import buffers

PAGE = 4
CPU = torch.device("cpu")
TOKENS = [5, 9, 2, 7, 7, 1, 30]


class Rig:
    """One rank with a tiny model."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(str(folder))
        cache = stack((read_config(checkpoint.config, "tiny"),))
        self.mesh = Mesh(parse_layout("tp1"), 0)
        storage = replace(engine_storage(cache, PAGE, "fp32"), num_pages_default=16)
        spec = Spec(self.mesh.layout, cache, storage)
        content = {name: np.zeros(size, dtype=np.uint8) for name, size in buffers(spec, 0, "t").items()}
        self.pools = CachePools(spec, 0, content, CPU)
        self.stage: ModelStage = build(checkpoint, self.mesh.cut(cache.num_layers, torch.float32, CPU))
        self.runner = ModelRunner(self.stage, self.mesh, self.pools)

    def run(self, *sequences: ScheduledSequence, copies: tuple[PageCopy, ...] = ()) -> Tensor | None:
        return self.runner.run([ScheduledBatch(list(sequences), list(copies))], NoHooks())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder)


def prompt(sequence: int, pages: list[int], *, num_samples: int = 1) -> ScheduledSequence:
    return ScheduledSequence(sequence, 0, TOKENS, {"tokens": pages}, len(TOKENS), num_samples)


def test_hooks_are_called_for_every_layer_once_its_cache_is_stored(rig: Rig) -> None:
    calls: list[object] = []

    class Recorder:
        def before_forward(self, batch: ScheduledBatch) -> None:
            calls.append(batch.num_rows)

        def layer_done(self, layer: int) -> None:
            stored = [bool(rig.pools.view("k", i)[3].any()) for i in range(5)]
            assert stored == [i <= layer for i in range(5)]
            calls.append(layer)

        def after_forward(self) -> None:
            calls.append("end")

    rig.runner.run([ScheduledBatch([prompt(0, [3, 1])])], Recorder())
    assert calls == [7, 0, 1, 2, 3, 4, "end"]


def test_only_sequences_that_are_sampled_have_logits(rig: Rig) -> None:
    both = rig.run(prompt(0, [3, 1]), prompt(1, [2, 4], num_samples=0), prompt(2, [5, 6], num_samples=3))
    assert both is not None
    assert both.shape == (2, 101)
    assert both.dtype == torch.float32
    torch.testing.assert_close(both[0], both[1])
    assert rig.run(prompt(3, [7, 8], num_samples=0)) is None


def test_input_embeddings_replace_those_of_tokens(rig: Rig) -> None:
    plain = rig.run(prompt(0, [3, 1]))
    assert rig.stage.embedding is not None
    rows = rig.stage.embedding.embed(torch.tensor(TOKENS)).numpy().astype(np.float32).tobytes()
    given = ScheduledSequence(1, 0, [0] * len(TOKENS), {"tokens": [2, 4]}, len(TOKENS), 1, rows)
    both = rig.run(prompt(2, [5, 6]), given)
    assert plain is not None
    assert both is not None
    torch.testing.assert_close(both, plain.expand(2, -1))
    with pytest.raises(EngineError, match="bytes of input embeddings for 7 tokens; give 192 bytes"):
        rig.run(ScheduledSequence(1, 0, [0] * len(TOKENS), {"tokens": [2, 4]}, len(TOKENS), 1, rows[:-4]))


def test_copied_pages_serve_another_sequence(rig: Rig) -> None:
    rig.run(prompt(0, [3, 1]))
    after = ScheduledSequence(0, len(TOKENS), [11], {"tokens": [3, 1]}, len(TOKENS), 1)
    fork = ScheduledSequence(1, len(TOKENS), [11], {"tokens": [3, 9]}, len(TOKENS), 1)
    copied = rig.run(fork, copies=(PageCopy("tokens", 1, 9),))
    plain = rig.run(after)
    assert copied is not None
    assert plain is not None
    torch.testing.assert_close(copied, plain)


def test_a_step_has_a_batch_for_every_dp_group(rig: Rig) -> None:
    with pytest.raises(EngineError, match="a step of 2 batches for 1 dp groups"):
        rig.runner.run([ScheduledBatch(), ScheduledBatch()], NoHooks())


def test_a_stage_that_does_not_fit_is_refused(rig: Rig) -> None:
    with pytest.raises(EngineError, match="first stage has the embedding"):
        ModelRunner(ModelStage(rig.stage.layers, None, rig.stage.head), rig.mesh, rig.pools)
