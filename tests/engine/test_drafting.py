"""A draft on one rank: what it guesses is what its layer of `transformers` does, however rows come."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.drafts import (
    MTP_SOFT,
    NUM_LAYERS,
    chain,
    drafted,
    drafted_hybrid,
    guesses,
    reference,
)
from tests.engine.e2e.prompts import prompt
from tests.engine.hooks import NoHooks
from tests.engine.hybrids import HYBRIDS, hybrid
from tests.engine.tiny import tiny

from baton.checkpoint.opening import open_checkpoint
from baton.engine.attention.pools import CachePools
from baton.engine.commands import PageCopy, ScheduledBatch, ScheduledSequence, StartSequence
from baton.engine.drafting import (
    FORK,
    HIDDEN,
    PROPOSALS,
    NextTokens,
    hidden_of,
    packed,
    problem_of,
    proposals_of,
    with_forks,
)
from baton.engine.model_runner import ModelRunner, sample_tokens
from baton.engine.models.build import build, check_weights
from baton.engine.parallel import Mesh
from baton.engine.sampler import Sampler
from baton.engine.sampling_params import SamplingParams
from baton.errors import ConfigError, EngineError
from baton.plan import Spec, Storage, parse_layout
from baton.plan.models.config import read_cache
from baton.plan.ownership import buffers
from baton.protocol.outcomes import Aux

PAGE = 4
CPU = torch.device("cpu")
TOKENS = prompt(23)
PAGES = {"tokens": [5, 2, 9, 1, 7, 3, 10], "state": [6]}
OTHER_PAGES = {"tokens": [0, 4, 8, 11, 12, 13, 14], "state": [2]}


class Rig:
    """One rank with a tiny model and its draft."""

    def __init__(self, folder: Path, *, has_draft: bool = True) -> None:
        checkpoint = open_checkpoint(str(folder))
        cache = read_cache(checkpoint.config, "tiny", has_draft=has_draft)
        mesh = Mesh(parse_layout("tp1"), 0)
        spec = Spec(mesh.layout, cache, Storage(page_tokens=PAGE, dtype="fp32", num_pages_default=16))
        content = {name: np.zeros(size, dtype=np.uint8) for name, size in buffers(spec, 0, "t").items()}
        self.pools = CachePools(spec, 0, content, CPU)
        stage = build(checkpoint, mesh.cut(cache.num_layers, torch.float32, CPU), has_draft=has_draft)
        self.runner = ModelRunner(stage, mesh, self.pools)
        self.rows: list[torch.Tensor] = []

    def logits(self, *sequences: ScheduledSequence) -> torch.Tensor:
        """Of the rows that are sampled from or verified."""
        found = self.runner.run([ScheduledBatch(list(sequences))], NoHooks())
        assert found is not None
        return found

    def propose(
        self, *pairs: tuple[ScheduledSequence, list[int]], copies: tuple[PageCopy, ...] = ()
    ) -> list[int]:
        """The first draft token of each; see `propose_all`."""
        return [guessed[0] for guessed in self.propose_all(*pairs, copies=copies)]

    def propose_all(
        self, *pairs: tuple[ScheduledSequence, list[int]], copies: tuple[PageCopy, ...] = ()
    ) -> list[list[int]]:
        """Runs sequences, and the draft after the tokens sampled for each."""
        self.runner.run([ScheduledBatch([scheduled for scheduled, _ in pairs], list(copies))], NoHooks())
        sampled = [tokens for scheduled, tokens in pairs if scheduled.num_samples]
        drafts = self.runner.propose(sampled, NoHooks())
        self.rows = [draft.row for draft in drafts]
        return [draft.tokens for draft in drafts]


def chunk(start: int, stop: int, **changes: object) -> ScheduledSequence:
    """Part of the prompt; the last token is sampled from."""
    is_last = stop == len(TOKENS)
    fields = {"num_samples": int(is_last), "next_token": None if is_last else TOKENS[stop], **changes}
    return ScheduledSequence(0, start, TOKENS[start:stop], PAGES, len(TOKENS), **fields)


@pytest.fixture(scope="module", params=["deepseek_v3", *MTP_SOFT])
def folder(request: pytest.FixtureRequest) -> Path:
    family: str = request.param
    return drafted_hybrid(family) if family in MTP_SOFT else drafted(family)


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder)


@pytest.mark.parametrize("size", [1, 5, 23])
def test_guesses_in_chunks(rig: Rig, folder: Path, size: int) -> None:
    following = 17
    wanted = guesses(folder, [*TOKENS, following])
    drafted_tokens: list[int] = []
    for start in range(0, len(TOKENS), size):
        drafted_tokens = rig.propose((chunk(start, min(start + size, len(TOKENS))), [following]))
    assert drafted_tokens == [wanted[-1]]


def test_guesses_at_every_token(rig: Rig, folder: Path) -> None:
    tokens = [*TOKENS, 17]
    wanted = guesses(folder, tokens)
    for at in range(len(TOKENS)):
        scheduled = ScheduledSequence(0, at, TOKENS[at : at + 1], PAGES, len(TOKENS), 1)
        assert rig.propose((scheduled, [tokens[at + 1]])) == [wanted[at]], f"after token {at}"
    assert len(set(wanted)) > len(wanted) // 3, "a draft that always guesses alike shows nothing"


def test_further_guesses(rig: Rig, folder: Path) -> None:
    """From the draft's own rows, beside a sequence with fewer; what they store is written over."""
    tokens, num_guesses = [*TOKENS, 17], 4
    inputs = reference(folder).inputs(tokens)
    for at in range(len(TOKENS)):
        one = ScheduledSequence(0, at, TOKENS[at : at + 1], PAGES, 23, 1, num_guesses=num_guesses)
        two = ScheduledSequence(1, 0, TOKENS[:9], {"tokens": [0, 4, 6], "state": [2]}, 9, 1, num_guesses=2)
        found = rig.propose_all((one, [tokens[at + 1]]), (two, [TOKENS[9]]))
        assert found[0] == chain(folder, inputs[:, : at + 1], num_guesses), f"after token {at}"
        assert found[1] == chain(folder, inputs[:, :9], 2)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_takes_in_what_was_accepted(family: str) -> None:
    """Logits are those of steps without guesses, whatever was right in the steps before."""
    rig, tokens, chance = Rig(hybrid(family), has_draft=False), prompt(24, family), random.Random(3)
    plain = [rig.logits(ScheduledSequence(0, at, [token], PAGES, 1, 1))[0] for at, token in enumerate(tokens)]
    for _ in range(4):
        at, num_accepted = {0: 0, 1: 0}, {0: 0, 1: 0}
        while max(at.values()) < len(tokens):
            works, wanted = [], list[torch.Tensor]()
            for number, pages in enumerate((PAGES, OTHER_PAGES)):
                start, num_known = at[number], chance.choice((1, 1, 1, 2))
                num_right, num_wrong = chance.randrange(4), chance.randrange(3)
                own = tokens[start : start + num_known + num_right]
                num_right = len(own) - num_known
                if num_right < 0:
                    continue
                following = (*tokens, 0)[start + len(own)]
                wrong = [following ^ 1, *(chance.randrange(90) for _ in range(2))][:num_wrong]
                works.append(
                    ScheduledSequence(
                        number,
                        start,
                        own + wrong,
                        pages,
                        1,
                        1,
                        num_drafted=num_right + num_wrong,
                        num_accepted=num_accepted[number],
                    )
                )
                wanted += [*plain[start + num_known - 1 : start + len(own)], *[None] * num_wrong]
                at[number], num_accepted[number] = start + len(own), num_right
            for found, right in zip(rig.logits(*works), wanted, strict=True):
                if right is not None:
                    torch.testing.assert_close(found, right, atol=2e-3, rtol=1e-3)


def test_an_accepted_and_a_rejected_draft_token(rig: Rig, folder: Path) -> None:
    """Row by row after either; wrong rows are written over."""
    tokens = [*TOKENS, 40, 41, 42, 43]
    wanted = guesses(folder, tokens)
    rig.propose((chunk(0, 20), []))
    # After 20 known tokens: the 21st, and a wrong guess of the 22nd.
    two = ScheduledSequence(0, 20, [TOKENS[20], 60], PAGES, len(TOKENS), 1, num_drafted=1)
    assert rig.propose((two, [TOKENS[21]])) == [wanted[20]]
    two = ScheduledSequence(0, 21, [TOKENS[21], TOKENS[22]], PAGES, len(TOKENS), 1, num_drafted=1)
    assert rig.propose((two, [TOKENS[22], 40])) == [wanted[22]]


def test_sequences_beside_one_another(rig: Rig, folder: Path) -> None:
    other = ScheduledSequence(1, 0, TOKENS[:9], {"tokens": [0, 4, 6], "state": [2]}, 9, 1)
    drafted_tokens = rig.propose((chunk(0, 11), []), (other, [TOKENS[9]]))
    assert drafted_tokens == [guesses(folder, TOKENS[:10])[8]]
    drafted_tokens = rig.propose(
        (chunk(11, 23), [17]),
        (ScheduledSequence(1, 9, [TOKENS[9]], {"tokens": [0, 4, 6], "state": [2]}, 9, 1), [3]),
    )
    assert drafted_tokens == [
        guesses(folder, [*TOKENS, 17])[-1],
        guesses(folder, [*TOKENS[:10], 3])[-1],
    ]


def test_a_fork_goes_on_from_the_row_that_it_was_sampled_from(rig: Rig, folder: Path) -> None:
    """The draft saw the first answer's token: the other's draft entry is computed anew from that row."""
    pages = {"tokens": PAGES["tokens"][:2], "state": [6]}
    parent = ScheduledSequence(0, 0, TOKENS[:8], pages, 8, 2)
    rig.propose((parent, [60]))
    row = rig.rows[0].numpy().tobytes()
    copies = (PageCopy("tokens", 2, 9), PageCopy("state", 6, 3))
    child = ScheduledSequence(1, 8, [61], {"tokens": [5, 9, 1], "state": [3]}, 8, 1, hidden=row)
    assert rig.propose((child, [62]), copies=copies) == [guesses(folder, [*TOKENS[:8], 61, 62])[-1]]
    part = "latent" if "deepseek" in folder.name else "k"
    entry = rig.pools.view(part, NUM_LAYERS)
    assert not torch.equal(entry[2], entry[9])
    # Without the row, the entry is the first answer's.
    rig.propose((parent, [60]))
    late = ScheduledSequence(2, 8, [61], {"tokens": [5, 10, 1], "state": [4]}, 8, 1)
    rig.propose((late, [62]), copies=(PageCopy("tokens", 2, 10), PageCopy("state", 6, 4)))
    entry = rig.pools.view(part, NUM_LAYERS)
    torch.testing.assert_close(entry[2], entry[10])
    with pytest.raises(EngineError, match="a row of 47 channels, the model has 48"):
        rig.propose(
            (ScheduledSequence(1, 8, [61], {"tokens": [5, 9, 1], "state": [3]}, 8, 1, hidden=row[4:]), [62])
        )


def test_next_tokens() -> None:
    sequences = [
        ScheduledSequence(0, 3, [4, 5, 6], {}, 9, 0, next_token=7),
        ScheduledSequence(1, 0, [1, 2], {}, 2, 1),
        ScheduledSequence(2, 8, [1, 30, 31], {}, 2, 1, num_drafted=2),
        ScheduledSequence(3, 8, [1, 30], {}, 2, 1, num_drafted=1),
    ]
    following = NextTokens(ScheduledBatch(sequences), [[9], [30, 50], [30, 33]])
    assert following.tokens.tolist() == [5, 6, 7, 2, 9, 30, 50, 50, 30, 33]
    assert following.last_rows.tolist() == [4, 6, 9]
    with pytest.raises(EngineError, match=r"sequence 0: .*without next_token"):
        NextTokens(ScheduledBatch([ScheduledSequence(0, 3, [4], {}, 9)]), [])
    forked = with_forks(ScheduledBatch([ScheduledSequence(0, 3, [4], {}, 3, 1, hidden=b"row"), sequences[1]]))
    assert [(scheduled.start, scheduled.tokens) for scheduled in forked.sequences] == [
        (2, [FORK, 4]),
        (0, [1, 2]),
    ]
    assert with_forks(batch := ScheduledBatch(sequences)) is batch


def test_draft_tokens_are_accepted_as_far_as_they_are_sampled() -> None:
    sampler = Sampler(vocab_size=8, eos_ids=())
    for sequence in range(3):
        sampler.begin(StartSequence(sequence, 0, [1, 2], 2, SamplingParams(temperature=0.0)))
    sequences = [
        ScheduledSequence(0, 1, [2, 5, 6], {}, 2, 1, num_drafted=2),
        ScheduledSequence(1, 1, [2], {}, 2, 1),
        ScheduledSequence(2, 1, [2, 4], {}, 2, 1, num_drafted=1),
    ]
    best = [5, 6, 7, 3, 1, 2]
    logits = torch.nn.functional.one_hot(torch.tensor(best), 8).float()
    accepted = {
        key: [sample.token for sample in tokens]
        for key, tokens in sample_tokens(sampler, logits, sequences).items()
    }
    assert accepted == {0: [5, 6, 7], 1: [3], 2: [1]}
    # The sampler knows accepted tokens only: the next step goes on right behind them.
    sampler.extend(2, [1], 2)
    with pytest.raises(EngineError, match="only 3 are known"):
        sampler.extend(2, [1], 4)


def test_draft_fields_of_an_aux_record_are_checked() -> None:
    sound = Aux(tensors={PROPOSALS: packed([7, 0]), HIDDEN: bytes(12)})
    assert (proposals_of(sound), hidden_of(sound)) == ([7, 0], bytes(12))
    assert (proposals_of(Aux()), hidden_of(Aux())) == ([], None)
    assert problem_of(sound, 8, 3) == problem_of(Aux(), 8, 3) == ""
    for wrong in (8, -1):
        assert "none of 8 tokens" in problem_of(Aux(tensors={PROPOSALS: packed([1, wrong])}), 8, 3)
    assert "of 5 bytes; each has 4" in problem_of(Aux(tensors={PROPOSALS: bytes(5)}), 8, 3)
    assert "a row of 12 bytes; the rows of the model have 16" in problem_of(sound, 8, 4)


def test_models_without_a_draft_are_refused(folder: Path) -> None:
    plain = open_checkpoint(str(tiny("llama")))
    with pytest.raises(ConfigError, match=r"no draft layer .* decode without drafts"):
        check_weights(plain, has_draft=True)
    check_weights(open_checkpoint(str(folder)), has_draft=True)


def test_a_draft_whose_tensors_are_missing_is_refused() -> None:
    """A config that announces one, with weights that have none."""
    checkpoint = open_checkpoint(str(tiny("deepseek_v3", num_nextn_predict_layers=1)))
    check_weights(checkpoint)
    with pytest.raises(ConfigError, match=r"does not match its config: model\.layers\.4"):
        check_weights(checkpoint, has_draft=True)


def test_a_draft_follows_a_step(rig: Rig) -> None:
    with pytest.raises(EngineError, match="a draft follows a step"):
        rig.runner.propose([], NoHooks())
