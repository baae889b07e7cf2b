"""One model has one fingerprint, whichever engine computes it."""

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny import tiny

from baton.adapters.common import model_fingerprint
from baton.checkpoint.opening import open_checkpoint

UNCHANGED: dict[str, Any] = {"config": {}, "quantization": None, "revision": None, "weights": ""}


def test_it_is_that_of_our_engine() -> None:
    model = str(tiny("llama"))
    assert model_fingerprint(model, {}, UNCHANGED) == open_checkpoint(model).fingerprint()
    other = str(tiny("llama", seed=1))
    assert model_fingerprint(other, {}, UNCHANGED) != open_checkpoint(model).fingerprint()


def test_what_an_engine_changes_makes_it_another_model() -> None:
    model = str(tiny("llama"))
    changes: list[dict[str, Any]] = [
        {},
        {"config": {"rope_theta": 1.0}},
        {"config": {"rope_theta": 2.0}},
        {"quantization": "fp8"},
        {"weights": "dummy"},
    ]
    assert len({model_fingerprint(model, {}, UNCHANGED | change) for change in changes}) == len(changes)


def test_a_checkpoint_that_cannot_be_read_is_known_by_its_config(tmp_path: Path) -> None:
    quantised = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    model = str(tmp_path)
    one = model_fingerprint(model, {"hidden_size": 64, "_name_or_path": "a"}, UNCHANGED)
    assert one == model_fingerprint("of/nobody", {"hidden_size": 64, "_name_or_path": "b"}, UNCHANGED)
    assert one != model_fingerprint(model, {"hidden_size": 128}, UNCHANGED)
    assert one != model_fingerprint(model, {"hidden_size": 64}, UNCHANGED | {"weights": "mine"})
