"""Every check on every transport and wrapper, and every check on the lies that it has to catch."""

import pytest
from tests.transport import checks_content, checks_cost, checks_failure, checks_lifecycle
from tests.transport.contract import CHECKS, Check, Lie, World
from tests.transport.lies import LIES
from tests.transport.subjects import SUBJECTS

SUITES = (checks_content, checks_lifecycle, checks_failure, checks_cost)

# Ours by themselves in `make test`; through libraries of others, and through wrappers, in `make contract`.
OURS = ("memory", "shm", "shm-staged", "tcp", "throttled-memory", "faulty-memory")
ASKED = [name if name in OURS else pytest.param(name, marks=pytest.mark.contract) for name in SUBJECTS]
LYING = [(check, lie) for check in CHECKS.values() for lie in check.lies]


@pytest.mark.parametrize("subject", ASKED)
@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_contract(check: Check, subject: str):
    with World(subject) as world:
        check.run(world)


@pytest.mark.parametrize(
    ("check", "lie"), LYING, ids=[f"{check.name}-{lie.name}-{lie.subject}" for check, lie in LYING]
)
def test_check_catches_lie(check: Check, lie: Lie):
    if lie.subject not in SUBJECTS:
        pytest.skip(f"no {lie.subject} here")
    lies = {f"{lie.side}_lie": lie.name}
    with pytest.raises((AssertionError, pytest.fail.Exception)), World(lie.subject, **lies) as world:
        check.run(world)


def test_every_lie_is_told():
    assert set(LIES) == {lie.name for check in CHECKS.values() for lie in check.lies}
