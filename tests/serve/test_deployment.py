"""What the serving tests stand on: the oracle, the processes, and the counts of what they hold."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import pytest
from tests.engine.tiny import oracle
from tests.faults.stages import named_segments
from tests.ports import free_port
from tests.serve.deployment import (
    Part,
    deployment,
    encode,
    model,
    oracle_text,
    registry_part,
    router_part,
    secret_file,
    serve_part,
    until,
)
from tests.serve.parts import children
from tests.serve.resources import (
    Bounds,
    Held,
    Snapshot,
    _held,
    growth,
    lost_pages,
    slope_per_s,
)
from tests.serve.speaking import EOS, NUM_TEXT_IDS, tokenizer


def test_the_oracle_is_transformers_up_to_the_end_of_the_answer() -> None:
    prompt = encode("the quick brown fox")
    (tokens,) = oracle(model(), [prompt], 12)
    found = oracle_text("the quick brown fox", 12, ignore_eos=True)
    assert list(found.tokens) == tokens
    assert found == oracle_text(prompt, 12, ignore_eos=True)
    assert (found.finish, found.text) == ("length", tokenizer().decode(tokens))
    stop = tokenizer().decode(tokens[5:7])
    cut = oracle_text("the quick brown fox", 12, stop=stop)
    assert cut.finish == "stop"
    assert found.text.startswith(cut.text + stop)
    assert len(cut.tokens) <= 7


def test_the_oracle_ends_at_eos() -> None:
    assert oracle_text([47], 8).tokens == (54, 347, EOS)
    assert (oracle_text([47], 8).finish, oracle_text([47], 8).text) == ("stop", "Thello")
    assert oracle_text([47], 8, ignore_eos=True).finish == "length"
    assert oracle_text([81], 8) == oracle_text([81], 8, stop="x")
    assert (oracle_text([81], 8).tokens, oracle_text([81], 8).text) == ((EOS,), "")


def test_every_id_below_the_limit_has_a_spelling() -> None:
    assert all(tokenizer().has_text(token) for token in range(3, NUM_TEXT_IDS))


def snap(at_s: float, memory: int = 0, fds: int = 5, pid: int = 1, segments: int = 1) -> Snapshot:
    held = {"a": Held(memory, fds, segments, 3)}
    return Snapshot(at_s, held, {"a": pid}, {"a": {"free": 3, "used": 0, "total": 3}}, frozenset())


def test_growth_is_seen_and_a_plateau_is_not() -> None:
    steps = [snap(float(at_s), at_s << 20) for at_s in range(60)]
    assert growth(steps, Bounds(process_bytes=32 << 20)) == ["a: memory grew by 59.0 MiB"]
    assert growth(steps, Bounds(process_bytes=64 << 20)) == []
    wave = [snap(float(at_s), (at_s % 10) << 23) for at_s in range(60)]
    assert growth(wave, Bounds(process_bytes=96 << 20)) == []
    assert slope_per_s([(0.0, 1.0), (2.0, 5.0)]) == 2.0


@pytest.mark.parametrize(
    ("last", "finding"),
    [
        (snap(1.0, fds=12), "a: num_fds went from 5 to 12"),
        (snap(1.0, segments=2), "a: num_segments went from 1 to 2"),
        (snap(1.0, pid=2), "another process: a"),
        (replace(snap(1.0), held={}, pids={}), "lost: a"),
    ],
)
def test_what_leaks_is_named(last: Snapshot, finding: str) -> None:
    assert growth([snap(0.0), last]) == [finding]
    assert growth([snap(0.0), snap(1.0)]) == []


def test_segments_of_a_process_that_have_names(tmp_path: Path) -> None:
    folder = f"{tmp_path}/"
    for name in ("of nobody", "open", "mapped", "gone"):
        (tmp_path / name).write_bytes(b"x")
    with (
        (tmp_path / "open").open(),
        (tmp_path / "gone").open(),
        (tmp_path / "mapped").open("r+b") as file,
        mmap(file.fileno(), 0),
    ):
        file.close()
        (tmp_path / "gone").unlink()
        assert named_segments(os.getpid(), folder) == {"open", "mapped"}
    assert named_segments(os.getpid(), folder) == set()


def test_pages_that_are_held_are_named() -> None:
    free = {"free": 4, "used": 0, "leased": 0, "quarantined": 0, "total": 4}
    assert lost_pages({"a": free}) == []
    assert lost_pages({"a": {**free, "quarantined": 1}})
    assert lost_pages({"a": {**free, "free": 3}})


def test_a_leaked_descriptor_and_segment_are_counted() -> None:
    before = _held(os.getpid())
    fd = os.memfd_create("leak")
    try:
        after = _held(os.getpid())
    finally:
        os.close(fd)
    assert before is not None
    assert after is not None
    assert after.num_fds == before.num_fds + 1


@pytest.mark.serve
def test_a_part_that_fails_is_shown_with_its_words(tmp_path: Path) -> None:
    part = Part("registry", ["registry", "--secret-file", str(tmp_path / "none")], free_port(), tmp_path)
    with pytest.raises(AssertionError, match=r"ended with 2(.|\n)*secret file"):
        part.start().wait()
    assert part.code == 2


@pytest.mark.serve
def test_a_part_starts_again_on_its_port_and_ends_by_its_pid(tmp_path: Path) -> None:
    secret_file(tmp_path)
    with registry_part(tmp_path) as part:
        part.wait()
        first = part.pid
        assert first in children(os.getpid())
        part.kill()
        assert part.code == -signal.SIGKILL
        assert not part.is_healthy
        part.start().wait()
        assert part.pid != first
        assert part.end() == 0
    assert part.output.count(part.url) == 2


@pytest.mark.serve
def test_a_deployment_answers_like_the_oracle_and_leaves_nothing() -> None:
    with deployment(prefill=["tp2"], decode=["pp2"]) as world:
        body = {"model": world.model, "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0}
        answer = world.ask("/v1/completions", body)
        assert answer.status == 200, answer.text
        assert answer.json["choices"][0]["text"] == oracle_text("the quick brown fox", 12).text
        pids = [part.pid for part in world.parts] + [
            pid for part in world.instances for pid in part.rank_pids
        ]
        assert len(pids) == 1 + 2 + 4 + 1
        folder = world.folder
    assert all(not Path(f"/proc/{pid}/cmdline").exists() for pid in pids)
    assert not folder.exists()
    assert str(folder).startswith(tempfile.gettempdir())


@pytest.mark.serve
def test_copies_of_a_checkpoint_hand_off_under_any_name_and_other_weights_do_not(tmp_path: Path) -> None:
    for name in ("copy", "other"):
        shutil.copytree(model(), tmp_path / name)
    (weights,) = (tmp_path / "other").glob("*.safetensors")
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))  # the last byte of a tensor
    expected = oracle_text("the quick fox", 12)
    with deployment(prefill=["tp1"], router=False) as world:
        assert world.registry is not None
        options = {"registry": world.registry.url}
        copy = serve_part(world.folder, "decode-0", "decode", "tp1", model=str(tmp_path / "copy"), **options)
        other = serve_part(
            world.folder, "decode-1", "decode", "tp1", model=str(tmp_path / "other"), **options
        )
        router = router_part(world.folder, world.registry.url, local_prefill_max="0")
        with copy, other, router:
            for part in (copy, other, router):
                part.wait()
            until(lambda: b"decode-1 (" in router.ask("/health").body, "the router has polled all")
            told = router.ask("/health").json
            assert told["status"] == "ok"
            assert "no hand-over for decode-1" in told["message"]
            body = {"model": "copy", "prompt": "the quick fox", "max_tokens": 12, "temperature": 0}
            reply = router.ask("/v1/completions", body)
            assert (reply.status, reply.json["choices"][0]["text"]) == (200, expected.text)
            figures = router.ask("/metrics").text
            labels = f'{{model_name="{tmp_path / "copy"}"}}'
            assert f"baton_router_handoffs_total{labels} 1.0" in figures
            unpaired = [line for line in figures.splitlines() if line.startswith("baton_router_unpaired")]
            assert [line.split('"')[1] for line in unpaired if line.endswith(" 1.0")] == ["decode-1"]
            assert "no hand-over for decode-1" in router.output
