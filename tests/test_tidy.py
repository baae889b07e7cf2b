"""Rules that are true of good code everywhere, held over the whole source tree.

No sizes: a file, a function or a class is as long as its one idea. Each rule has a case that breaks it and a
case that keeps it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard, cast

import pytest

SOURCE_ROOT = Path(__file__).parent.parent / "src"
ENVIRON_FILE = "baton/settings.py"
PRINTING = ("baton/cli/", "baton/bench/")
ENVIRON_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
BROAD_EXCEPTIONS = {"Exception", "BaseException"}
OLD_WORDS = set(
    """
    desk door lobby premises crew keeper kin cradle birth fate nursery yield flying story told piece trouble
    handing pace took cuts due departure departures leaving arrival arrivals coming guest bay grave bury porch
    doorway knock feeder drainer turns stepping outline sheet strip stencil inquiry asked conversation wish
    vitals house shore facts mill grist pounding
    """.split()  # noqa: SIM905
)
"""Words that this code once had for things that the field has names for."""
VAGUE_LOCALS = {"found", "each", "one", "what", "told"}

# Where a rule is broken on purpose: path or path::qualname, the rule, and why.
ALLOWED: dict[tuple[str, str], str] = {
    ("baton/cli/bench.py", "local-import"): "torch takes seconds to import, which --help need not wait for",
    ("baton/cli/checks.py", "local-import"): "as cli/bench.py, for NumPy",
    ("baton/cli/demo.py", "local-import"): "as cli/bench.py",
    ("baton/cli/demo_model.py", "local-import"): "torch is imported after fork_early",
    ("baton/cli/deployment.py", "local-import"): "torch again, which a mistake need not wait for",
    ("baton/cli/doctor.py", "local-import"): "as cli/bench.py, for NumPy",
    ("baton/cli/drain.py", "local-import"): "as cli/bench.py, for aiohttp",
    ("baton/cli/generate.py", "local-import"): "as cli/bench.py",
    ("baton/cli/plan.py", "local-import"): "as cli/bench.py, for NumPy",
    ("baton/cli/registry.py", "local-import"): "as cli/bench.py, for aiohttp",
    ("baton/cli/route.py", "local-import"): "as cli/bench.py, for aiohttp",
    ("baton/cli/serve.py", "local-import"): "as cli/bench.py",
    ("baton/cli/sim.py", "local-import"): "as cli/bench.py, for NumPy",
    ("baton/cli/up.py", "local-import"): "as cli/bench.py",
    ("baton/checkpoint/names.py", "local-import"): "for `org/name` alone",
    ("baton/serving/http.py::HttpServer._middleware", "broad-except"): "the HTTP edge: what escapes is a 500",
    ("baton/session/dispatcher.py::Dispatcher.feed", "broad-except"): "a failed machine ends one transfer",
    ("baton/session/event_loop.py", "broad-except"): "a failed driver ends its instance",
    ("baton/sim/network.py::Host._run", "broad-except"): "a job's exception is its result, as the port says",
    ("baton/sim/runner.py::run_world", "broad-except"): "what escapes a driver is a finding",
}

_OPENAI = "OpenAI's object: serving writes it, the load generator of bench reads what any server wrote"
SAME_CLASS = {"CachedTokens": _OPENAI, "Delta": _OPENAI, "Usage": _OPENAI}
"""Class names of several packages, and why they mean the same thing."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[str, int, str]  # qualified name, line, what is wrong


@dataclass(frozen=True, slots=True)
class Source:
    path: str
    text: str
    tree: ast.Module
    nodes: tuple[tuple[str, ast.AST], ...]
    """Every node, with the qualified name of the definition that it is in, or is."""

    @staticmethod
    def parse(path: str, text: str) -> Source:
        tree = ast.parse(text)
        return Source(path, text, tree, tuple(walk(tree)))


def walk(root: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    stack = [("", child) for child in ast.iter_child_nodes(root)]
    while stack:
        qualname, node = stack.pop()
        if isinstance(node, Function | ast.ClassDef):
            qualname = f"{qualname}.{node.name}".lstrip(".")
        yield qualname, node
        stack.extend((qualname, child) for child in ast.iter_child_nodes(node))


def last_name(node: ast.expr | None) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def words_of(identifier: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def local_import(source: Source) -> Iterator[Finding]:
    functions = [(name, node) for name, node in source.nodes if isinstance(node, Function)]
    for qualname, function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield qualname, node.lineno, "import inside a function"


def environ(source: Source) -> Iterator[Finding]:
    if source.path == ENVIRON_FILE:
        return
    for qualname, node in source.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name, lineno=line) if name in ENVIRON_NAMES:
                yield qualname, line, f"os.{name}: only {ENVIRON_FILE} reads the environment"
            case ast.ImportFrom(module="os", names=aliases, lineno=line):
                for name in sorted(ENVIRON_NAMES.intersection(alias.name for alias in aliases)):
                    yield qualname, line, f"os.{name}: only {ENVIRON_FILE} reads the environment"


def broad_except(source: Source) -> Iterator[Finding]:
    for qualname, node in source.nodes:
        match node:
            case ast.ExceptHandler(type=None):
                names = {"BaseException"}
            case ast.ExceptHandler(type=ast.Tuple(elts=elements)):
                names = {last_name(element) for element in elements}
            case ast.ExceptHandler(type=caught):
                names = {last_name(caught)}
            case ast.Call(func=called, args=arguments) if last_name(called) == "suppress":
                names = {last_name(argument) for argument in arguments}
            case _:
                continue
        if names & BROAD_EXCEPTIONS:
            yield qualname, node.lineno, f"catches {min(names & BROAD_EXCEPTIONS)}"


def printing(source: Source) -> Iterator[Finding]:
    if source.path.startswith(PRINTING):
        return
    for qualname, node in source.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield qualname, node.lineno, "print: log, or return it to the command"


def ascii_only(source: Source) -> Iterator[Finding]:
    for line, text in enumerate(source.text.splitlines(), start=1):
        if not text.isascii():
            strange = next(char for char in text if not char.isascii())
            yield "", line, f"U+{ord(strange):04X} in source; write an escape"


def old_word(source: Source) -> Iterator[Finding]:
    """Modules, classes and functions are named in the field's words."""
    for part in Path(source.path).with_suffix("").parts:
        for word in sorted(set(part.split("_")) & OLD_WORDS):
            yield "", 1, f"module {part}: '{word}'; use the field's word"
    for qualname, node in source.nodes:
        if isinstance(node, ast.ClassDef):
            for word in sorted(words_of(node.name) & OLD_WORDS):
                yield qualname, node.lineno, f"class {node.name}: '{word}'; use the field's word"


def hand_over(source: Source) -> Iterator[Finding]:
    """In sentences a hand-over, which is handed over; in names, of commands and metrics too, a handoff."""
    texts = [(node.lineno, node.value) for _, node in source.nodes if is_sentence(node)]
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for line, text in texts:
        for word in hand_offs(text):
            yield "", line, f"{word!r} in a sentence; write hand-over, or handed over"
    for qualname, node in source.nodes:
        name = getattr(node, "name", None) or getattr(node, "arg", None) or last_name(cast(ast.expr, node))
        if isinstance(name, str) and re.search(r"hand_?over", name, re.IGNORECASE):
            yield qualname, getattr(node, "lineno", 1), f"{name}: in names it is handoff"


def is_sentence(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def hand_offs(text: str) -> list[str]:
    """Other spellings than hand-over, but for names of commands and modules, and code."""
    text = re.sub(r"`[^`]*`|baton bench handoff", "", text)
    return re.findall(r"(?i)(?<![\w./-])(?:hand-?offs?|handovers?|hand(?:s|ed|ing)? off)(?![\w.(/-])", text)


def vague_local(source: Source) -> Iterator[Finding]:
    """Of functions; a field may have such a name where a format gives it."""
    functions = {name for name, node in source.nodes if isinstance(node, Function)}
    for qualname, node in source.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.MatchAs(name=str(name)) | ast.FunctionDef(name=name):
                pass
            case _:
                continue
        if name in VAGUE_LOCALS and qualname in functions:
            yield qualname, getattr(node, "lineno", 1), f"{name}: name what it holds"


def ends_of_a_copy(source: Source) -> Iterator[Finding]:
    yield from bound_names(source, {"src", "dst"}, "the ends of a copy are source and target")


def roles_in_plan(source: Source) -> Iterator[Finding]:
    if source.path.startswith("baton/plan/"):
        yield from bound_names(source, {"prefill", "decode"}, "a role; plan knows source and target")


def bound_names(source: Source, words: set[str], advice: str) -> Iterator[Finding]:
    """Only where a name is chosen: a foreign name such as bytes.decode is not our choice."""
    for qualname, node in source.nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.arg(arg=name) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                pass
            case _:
                continue
        if words & words_of(name):
            yield qualname, getattr(node, "lineno", 1), f"{name}: {advice}"


RULES: dict[str, Callable[[Source], Iterator[Finding]]] = {
    "local-import": local_import,
    "environ": environ,
    "broad-except": broad_except,
    "print": printing,
    "ascii": ascii_only,
    "old-word": old_word,
    "hand-over": hand_over,
    "vague-local": vague_local,
    "source-target": ends_of_a_copy,
    "roles-in-plan": roles_in_plan,
}


@cache
def sources() -> list[Source]:
    files = sorted(SOURCE_ROOT.rglob("*.py"))
    return [Source.parse(file.relative_to(SOURCE_ROOT).as_posix(), file.read_text("utf-8")) for file in files]


def imports(source: Source, modules: set[str]) -> set[str]:
    """Modules of ours that this one needs; imports for type checking count too, since a cycle is a cycle."""
    needed: set[str] = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=aliases):
                needed.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                named = {f"{module}.{alias.name}" for alias in aliases}
                needed.update(named & modules or {module})
                if named - modules:
                    needed.add(module)
    return needed & modules


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other (strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return groups


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def repeated_classes(tree: list[Source]) -> dict[str, list[str]]:
    """Public classes of any packages that share a name."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in tree:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


@dataclass(frozen=True, slots=True)
class Case:
    rule: str
    bad: str
    good: str
    path: str = "baton/thing.py"


CASES = [
    Case("local-import", "def f():\n    import json\n", "import json\ndef f():\n    return json\n"),
    Case("local-import", "def f():\n    if 1:\n        from a import b\n", "if 1:\n    from a import b\n"),
    Case("environ", "import os\nx = os.environ['A']\n", "import os\nx = os.sep\n"),
    Case("environ", "from os import getenv\n", "from os import sep\n"),
    Case("broad-except", "try: pass\nexcept Exception: pass\n", "try: pass\nexcept OSError: pass\n"),
    Case("broad-except", "try: pass\nexcept: pass\n", "try: pass\nexcept (OSError, KeyError): pass\n"),
    Case(
        "broad-except",
        "try: pass\nexcept (OSError, x.BaseException): pass\n",
        "with suppress(OSError): pass\n",
    ),
    Case("broad-except", "with contextlib.suppress(Exception): pass\n", "raise Exception\n"),
    Case("print", "print(1)\n", "console.print(1)\n"),
    Case("ascii", "x = 1  # caf\u00e9\n", "x = '\\u00e9'\n"),
    Case("old-word", "class PrefillDesk: pass\n", "class EngineCore: pass\n"),
    Case("hand-over", "x = 'one handoff more'\n", "x = 'one hand-over more, see baton.bench.handoff.run'\n"),
    Case("hand-over", "x = 1  # handed off\n", "x = 1  # handed over by `baton bench handoff`\n"),
    Case("hand-over", "def make_handover(): pass\n", "def make_handoff(): return x.handed_over\n"),
    Case("vague-local", "def f():\n    found = 1\n", "class A:\n    what: int\n"),
    Case("vague-local", "def f(each): pass\n", "def f(x): return x.each\n"),
    Case("vague-local", "def f(x): return [one for one in x]\n", "def f(x): return g(one=x)\n"),
    Case("source-target", "def f(src_rank): pass", "def f(source_rank): pass"),
    Case("source-target", "self.dst = 1", "numpy.copyto(x, src=y)"),
    Case("source-target", "match x:\n    case [dst, *rest]: pass\n", "match x:\n    case [target]: pass\n"),
    Case("roles-in-plan", "prefill_ranks = 1", "source_ranks = 1", "baton/plan/thing.py"),
    Case("roles-in-plan", "def decode(): pass", "x = b'a'.decode()", "baton/plan/thing.py"),
]


def broken(path: str, text: str) -> set[str]:
    source = Source.parse(path, text)
    return {name for name, rule in RULES.items() if any(rule(source))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_tells_good_from_bad(case: Case) -> None:
    assert broken(case.path, case.bad) == {case.rule}
    assert broken(case.path, case.good) == set()


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == set(RULES)


def test_the_tree_keeps_the_rules() -> None:
    used, findings = set(), []
    for source in sources():
        for name, rule in RULES.items():
            for qualname, line, text in rule(source):
                keys = [(f"{source.path}::{qualname}", name), (source.path, name)]
                allowed = next((key for key in keys if key in ALLOWED), None)
                if allowed:
                    used.add(allowed)
                else:
                    findings.append(f"{source.path}:{line} {qualname}: {name}: {text}")
    assert not findings, "\n".join(findings)
    assert used == set(ALLOWED), f"rows that excuse nothing: {set(ALLOWED) - used}"


def test_pages_write_hand_over() -> None:
    root = SOURCE_ROOT.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    texts = {page: re.sub(r"(?ms)^ *```.*?^ *```|\]\([^)]*\)", "", page.read_text("utf-8")) for page in pages}
    assert {page.name: hand_offs(text) for page, text in texts.items() if hand_offs(text)} == {}


def test_no_package_has_a_cycle_of_imports() -> None:
    tree = {module_name(source.path): source for source in sources()}
    graph = {module: imports(source, set(tree)) for module, source in tree.items()}
    assert cycles(graph) == []


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert cycles({"a": {"b"}, "b": set(), "c": {"a", "b"}}) == []


def test_a_class_name_means_one_thing() -> None:
    assert set(repeated_classes(sources())) == set(SAME_CLASS)


def test_a_repeated_class_is_found() -> None:
    first, second = (Source.parse(f"baton/plan/{name}.py", "class Part: pass") for name in "ab")
    other = Source.parse("baton/sim/c.py", "class Part: pass\nclass _Own: pass")
    own = Source.parse("baton/cli/d.py", "class Whole: pass\nclass _Own: pass")
    assert repeated_classes([first, second, own]) == {"Part": [first.path, second.path]}
    assert repeated_classes([first, other, own]) == {"Part": [first.path, other.path]}
    assert repeated_classes([other, own]) == {}
