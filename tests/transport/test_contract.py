"""Every check on every transport and wrapper, and every check on the broken variants that it has to catch."""

import pytest
from tests.transport import checks
from tests.transport.broken import BROKEN
from tests.transport.contract import CHECKS, Check, Variant, World
from tests.transport.subjects import SUBJECTS

# Our own transports run in `make test`; other libraries and wrappers in `make test-all`.
OURS = ("memory", "shm", "tcp", "cuda_ipc", "cuda_ipc-host")
PARAMETERS = [name if name in OURS else pytest.param(name, marks=pytest.mark.contract) for name in SUBJECTS]
VARIANTS = [(check, variant) for check in CHECKS.values() for variant in check.variants]


@pytest.mark.parametrize("subject", PARAMETERS)
@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_contract(check: Check, subject: str):
    with World(subject) as world:
        check.run(world)


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "variant"),
    VARIANTS,
    ids=[f"{check.name}-{variant.name}-{variant.subject}" for check, variant in VARIANTS],
)
def test_check_catches_variant(check: Check, variant: Variant, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "HANGS_S", 10.0)  # what hides an end never ends: no need to wait longer
    if variant.subject not in SUBJECTS:
        pytest.skip(f"no {variant.subject} here")
    sides = {f"{variant.side}_variant": variant.name}
    with pytest.raises((AssertionError, pytest.fail.Exception)), World(variant.subject, **sides) as world:
        check.run(world)


def test_every_variant_has_a_check():
    assert set(BROKEN) == {variant.name for check in CHECKS.values() for variant in check.variants}
