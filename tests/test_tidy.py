"""The source tree keeps the house style, and each rule can tell good from bad."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import tidy
from tests.tidy import Allowed, Finding

SOURCE_ROOT = Path(__file__).parent.parent / "src"

# Where a rule pinches: path or path::qualname, the rule, and why it is right to break it there.
ALLOWED: tuple[Allowed, ...] = (
    Allowed("baton/bench/overlap/options.py::Options", "attributes", "one per thing that a user sets"),
    Allowed("baton/cli/bench/engine.py::engine", "parameters", "one per option of the command"),
    Allowed("baton/cli/bench/handoff.py::handoff", "parameters", "one per option of the command"),
    Allowed("baton/cli/bench/overlap.py::overlap", "parameters", "one per option of the command"),
    Allowed("baton/cli/bench/serve.py::serve", "parameters", "one per option of the command"),
    Allowed("baton/cli/chat.py::chat", "parameters", "one per option of the command"),
    Allowed("baton/cli/demo.py::demo", "parameters", "one per option of the command"),
    Allowed("baton/cli/generate.py::generate", "parameters", "one per option of the command"),
    Allowed("baton/cli/plan.py::plan", "parameters", "one per option of the command"),
    Allowed("baton/cli/route.py::route", "parameters", "one per option of the command"),
    Allowed("baton/cli/serve.py::serve", "parameters", "one per option of the command"),
    Allowed("baton/server/bodies/asked.py::GenerateParams", "attributes", "one per field of the body"),
    Allowed("baton/web/edge.py::Edge.guard", "broad-except", "the HTTP edge: whatever escapes is a 500"),
    Allowed("baton/web/lane.py::Lane.answer", "broad-except", "the HTTP edge: whatever escapes is a 500"),
    Allowed("baton/cli/sim.py::sim", "parameters", "one per option of the command"),
    Allowed("baton/cli/up.py::up", "parameters", "one per option of the command"),
    Allowed("baton/engine/instance/config.py::InstanceConfig", "attributes", "one per thing a user may set"),
    Allowed("baton/engine/rank/config.py::RankConfig", "attributes", "one per thing a rank is told at start"),
    Allowed("baton/engine/sampling/params.py::SamplingParams", "attributes", "one per wish of a request"),
    Allowed("baton/sim/checkers/base.py", "vague-name", "what every checker in its folder builds on"),
    Allowed(
        "baton/sim/host.py::Host._run",
        "broad-except",
        "a job's exception is its result, by the port's promise",
    ),
    Allowed("baton/sim/runner.py::run_world", "broad-except", "whatever escapes a driver is a finding"),
    Allowed("baton/plan/kinds/base.py", "vague-name", "what every kind in its folder builds on"),
    Allowed("baton/transport/base.py", "vague-name", "what every transport in its folder promises"),
    Allowed("baton/protocol/messages.py", "file-length", "the whole schema in one place"),
    Allowed("baton/protocol/messages.py::Grant", "attributes", "a message: what both ends have to know"),
    Allowed("baton/sim/transport/flight.py::Flight", "attributes", "all that becomes of one batch"),
    Allowed("baton/protocol/timings.py::Timings", "attributes", "one per thing that takes time"),
    Allowed("baton/protocol/arrival.py::Arrival", "attributes", "the whole record of a machine"),
    Allowed("baton/protocol/departure.py::Departure", "attributes", "the whole record of a machine"),
    Allowed("baton/session/endpoint.py::EndpointConfig", "attributes", "one per thing that a user sets"),
    Allowed("baton/session/stepping.py::Stepping._confined", "broad-except", "it ends one transfer alone"),
    Allowed("baton/session/link_turns.py::Turns._guard", "broad-except", "a failed driver ends its instance"),
    Allowed("baton/plan/overlap/base.py", "vague-name", "what every policy in its folder builds on"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Two small files of the same path, of which a rule reports the first and passes the second."""

    rule: str
    bad: str
    good: str
    path: str = "baton/thing.py"


def body(num_lines: int, docstring: str = "") -> str:
    return "def f():\n" + docstring + "    x = 1\n" * num_lines


ELIF_CHAIN = """
def f(x):
    for y in x:
        if y == 1:
            pass
        elif y == 2:
            pass
        elif y == 3:
            with y:
                pass
        else:
            pass
"""
ELSE_IF = """
def f(x):
    for y in x:
        if y == 1:
            pass
        else:
            if y == 2:
                with y:
                    pass
"""
MATCH_IN_TRY = """
def f(x):
    while x:
        try:
            pass
        except OSError:
            match x:
                case 1:
                    if x:
                        pass
"""
INNER_FUNCTION = """
def f(x):
    if x:
        for y in x:
            with y:
                def g():
                    if y:
                        pass
"""
SELF_ATTRIBUTES = """
class Pool:
    a: int
    b = 1

    def __init__(self):
        self.c, self.d, self.e = 1, 2, 3
        self.f: int = 4
        self.g = self.h = self.i = self.j = self.k = self.l = self.m = 5
"""


def class_of(count: int, parent: str = "") -> str:
    return f"class Thing{parent}:\n" + "".join(f"    A{index}: int = {index}\n" for index in range(count))


CASES = [
    Case("file-length", "x = 1\n" * 400, "x = 1\n" * 399),
    Case("function-length", body(60), body(59)),
    Case("function-length", body(60, '    """One."""\n'), body(59, '    """One\n    two.\n    """\n')),
    Case("nesting", ELSE_IF, ELIF_CHAIN),
    Case("nesting", MATCH_IN_TRY, INNER_FUNCTION),
    Case("nesting", "if 1:\n if 1:\n  if 1:\n   if 1: pass\n", "if 1:\n if 1:\n  if 1: pass\n"),
    Case("parameters", "def f(a, b, c, d, e, g): pass", "def f(a, b, c, d, e): pass"),
    Case("parameters", "def f(a, /, b, *c, d, e, **g): pass", "def f(a, /, b, *c, d, **g): pass"),
    Case(
        "parameters",
        "class C:\n def f(self, a, b, c, d, e, g): pass",
        "class C:\n def f(self, a, b, c, d, e): pass",
    ),
    Case("attributes", class_of(13), class_of(12)),
    Case("attributes", SELF_ATTRIBUTES, class_of(20, "(enum.IntEnum)")),
    Case("vague-name", "class PageManager: pass", "class PageTable: pass"),
    Case("vague-name", "class TransportBase: pass", "class Database: pass"),
    Case("vague-name", "class KVInfo: pass", "class Information: pass"),
    Case("local-import", "def f():\n    import json\n", "import json\n\n\ndef f():\n    return json\n"),
    Case(
        "local-import",
        "def f():\n    if 1:\n        from a import b\n",
        "if TYPE_CHECKING:\n    from a import b\n",
    ),
    Case("environ", "import os\nx = os.environ['A']\n", "import os\nx = os.sep\n"),
    Case("environ", "from os import getenv\n", "from os import sep\n"),
    Case(
        "broad-except", "try:\n    pass\nexcept Exception:\n    pass\n", "try: pass\nexcept OSError: pass\n"
    ),
    Case(
        "broad-except", "try:\n    pass\nexcept:\n    pass\n", "try: pass\nexcept (OSError, KeyError): pass\n"
    ),
    Case(
        "broad-except",
        "try: pass\nexcept (OSError, builtins.BaseException): pass\n",
        "with suppress(OSError): pass\n",
    ),
    Case("broad-except", "with contextlib.suppress(Exception): pass\n", "raise Exception\n"),
    Case("ascii", "x = 1  # caf\u00e9\n", "x = '\\u00e9'\n"),
    Case("source-target", "def f(src_rank): pass", "def f(source_rank): pass"),
    Case("source-target", "self.dst = 1", "numpy.copyto(x, src=y)"),
    Case("source-target", "match x:\n    case [dst, *rest]: pass\n", "match x:\n    case [target]: pass\n"),
    Case("roles-in-plan", "prefill_ranks = 1", "source_ranks = 1", "baton/plan/thing.py"),
    Case("roles-in-plan", "def decode(): pass", "x = b'a'.decode()", "baton/plan/thing.py"),
]


def rules_broken(path: str, text: str) -> set[str]:
    return {finding.rule for finding in tidy.check_source(tidy.read_source(path, text))}


def test_tree_is_tidy():
    unexcused, _ = tidy.without_allowed(tidy.check_tree(SOURCE_ROOT), ALLOWED)
    report = "\n".join(map(str, unexcused))
    assert not unexcused, f"mend these, or give each a row with a reason in ALLOWED:\n{report}"


def test_allow_list_has_no_stale_row():
    _, stale = tidy.without_allowed(tidy.check_tree(SOURCE_ROOT), ALLOWED)
    assert not stale, f"no longer needed, remove from ALLOWED: {stale}"


def test_allow_list_gives_reasons():
    assert all(row.reason.strip() for row in ALLOWED)


def test_checker_keeps_its_own_rules():
    files = [Path(tidy.__file__), Path(__file__)]
    assert [str(finding) for file in files for finding in tidy.check_source(read_test(file))] == []


def read_test(file: Path) -> tidy.Source:
    return tidy.read_source(f"tests/{file.name}", file.read_text("utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_rule_tells_good_from_bad(case: Case):
    assert rules_broken(case.path, case.bad) == {case.rule}
    assert rules_broken(case.path, case.good) == set()


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == set(tidy.RULES)


@pytest.mark.parametrize(
    "path", ["baton/utils.py", "baton/session/helpers/x.py", "baton/kind_base.py", "baton/info/__init__.py"]
)
def test_vague_module_names_are_reported(path: str):
    assert rules_broken(path, "") == {"vague-name"}


def test_scoped_rules_leave_other_files_alone():
    assert rules_broken("baton/settings.py", "import os\nx = os.environ\n") == set()
    assert rules_broken("baton/engine/thing.py", "prefill_ranks = 1") == set()


def test_findings_carry_the_qualified_name():
    source = tidy.read_source("baton/thing.py", "class A:\n    def f(self):\n        import json\n")
    assert [(found.qualname, found.line) for found in tidy.check_source(source)] == [("A.f", 3)]


@pytest.mark.parametrize("where", ["baton/a.py", "baton/a.py::A.f"])
def test_row_excuses_its_place_and_rule_only(where: str):
    row = Allowed(where, "nesting", "a reason")
    inside = Finding("baton/a.py", "A.f", 1, "nesting", "")
    others = [Finding("baton/b.py", "A.f", 1, "nesting", ""), Finding("baton/a.py", "A.f", 1, "ascii", "")]
    assert tidy.without_allowed([inside, *others], [row]) == (others, [])
    assert tidy.without_allowed(others, [row]) == (others, [row])


def test_row_of_one_function_does_not_excuse_another():
    finding = Finding("baton/a.py", "A.g", 1, "nesting", "")
    row = Allowed("baton/a.py::A.f", "nesting", "a reason")
    assert tidy.without_allowed([finding], [row]) == ([finding], [row])
