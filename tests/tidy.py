"""The shape and the words of the house style, as rules over the syntax tree.

A rule takes a `Source` and yields `Finding`s. Rules about identifiers look at the places that bind a
name, never at those that use it: a foreign name such as `bytes.decode` is nobody's choice, and a name
of ours is reported once, where it is chosen.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FILE_LINES_MAX = 399
FUNCTION_LINES_MAX = 60
NESTING_MAX = 3
PARAMETERS_MAX = 5
ATTRIBUTES_MAX = 12

ENVIRON_FILE = "baton/settings.py"
VAGUE_WORDS = {"manager", "handler", "helper", "util", "info", "mixin", "base"}
ENVIRON_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
BROAD_EXCEPTIONS = {"Exception", "BaseException"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Nest = (
    ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.TryStar | ast.Match
)


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path below the source root, its text and its tree."""

    path: str
    text: str
    tree: ast.Module


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule and where; `qualname` is empty at module level."""

    path: str
    qualname: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        where = f"{self.path}::{self.qualname}" if self.qualname else self.path
        return f"{where} (line {self.line}): {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Allowed:
    """A row of the allow-list: `where` is a path, or path::qualname, and excuses one rule there."""

    where: str
    rule: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        path, _, qualname = self.where.partition("::")
        return (path, self.rule) == (finding.path, finding.rule) and qualname in ("", finding.qualname)


Spot = tuple[str, int, str]  # qualname, line, what is wrong
Rule = Callable[[Source], Iterator[Spot]]


def read_source(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text))


def placed_nodes(node: ast.AST, qualname: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every node below this one, with the qualified name of the definition that it is in or is."""
    for child in ast.iter_child_nodes(node):
        name = f"{qualname}.{child.name}".lstrip(".") if isinstance(child, Definition) else qualname
        yield name, child
        yield from placed_nodes(child, name)


def functions(source: Source) -> Iterator[tuple[str, Function]]:
    return ((name, node) for name, node in placed_nodes(source.tree) if isinstance(node, Function))


def classes(source: Source) -> Iterator[tuple[str, ast.ClassDef]]:
    return ((name, node) for name, node in placed_nodes(source.tree) if isinstance(node, ast.ClassDef))


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function, without those of the functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function):
            waiting.extend(ast.iter_child_nodes(node))


def identifier_words(identifier: str) -> list[str]:
    """The lower-case words of a snake_case or CamelCase identifier."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def bound_names(node: ast.AST) -> list[str]:
    """The identifiers that this very node introduces."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
        case ast.arg(arg=name) | ast.alias(asname=str(name)):
            return [name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return [name]
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
        case _:
            return []


def names_with_words(source: Source, words: set[str], advice: str) -> Iterator[Spot]:
    for qualname, node in placed_nodes(source.tree):
        for name in bound_names(node):
            if words.intersection(identifier_words(name)):
                yield qualname, getattr(node, "lineno", 1), f"{name}: {advice}"


def docstring_lines(function: Function) -> int:
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def inner_blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statement lists one level inside a compound statement."""
    for field in ("body", "orelse", "finalbody"):
        yield getattr(statement, field, [])
    for clause in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield clause.body


def deepest_nest(statements: Iterable[ast.stmt], depth: int = 0) -> tuple[int, int]:
    """Depth and line of the most nested compound statement; functions inside are counted on their own."""
    deepest = (depth, 0)
    for statement in statements:
        if isinstance(statement, Function):
            continue
        inside = depth + 1 if isinstance(statement, Nest) else depth
        deepest = max(deepest, (inside, statement.lineno))
        for block in inner_blocks(statement):
            is_elif = isinstance(statement, ast.If) and is_elif_block(statement, block)
            deepest = max(deepest, deepest_nest(block, depth if is_elif else inside))
    return deepest


def is_elif_block(statement: ast.If, block: list[ast.stmt]) -> bool:
    """An elif is an If alone in the else, in the column of its parent."""
    return (
        block is statement.orelse
        and len(block) == 1
        and isinstance(block[0], ast.If)
        and block[0].col_offset == statement.col_offset
    )


def last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def exception_names(node: ast.expr | None) -> set[str]:
    match node:
        case None:
            return {"BaseException"}
        case ast.Tuple(elts=elements):
            return {last_name(element) for element in elements}
        case _:
            return {last_name(node)}


def attribute_names(node: ast.ClassDef) -> set[str]:
    """What the class body assigns or declares, and what its methods assign on self."""
    body = [target for statement in node.body for target in assignment_targets(statement)]
    names = {target.id for target in body if isinstance(target, ast.Name)}
    for method in node.body:
        if isinstance(method, Function):
            names |= {
                inner.attr
                for inner in ast.walk(method)
                if isinstance(inner, ast.Attribute)
                and isinstance(inner.ctx, ast.Store)
                and last_name(inner.value) == "self"
            }
    return {name for name in names if not name.startswith("__")}


def assignment_targets(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.AnnAssign(target=target):
            return [target]
        case ast.Assign(targets=targets):
            return targets
        case _:
            return []


def file_length(source: Source) -> Iterator[Spot]:
    num_lines = len(source.text.splitlines())
    if num_lines > FILE_LINES_MAX:
        yield "", num_lines, f"{num_lines} lines, at most {FILE_LINES_MAX}"


def function_length(source: Source) -> Iterator[Spot]:
    for qualname, node in functions(source):
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
        if num_lines > FUNCTION_LINES_MAX:
            yield qualname, node.lineno, f"{num_lines} lines, at most {FUNCTION_LINES_MAX}"


def nesting(source: Source) -> Iterator[Spot]:
    bodies = [("", source.tree.body), *((name, node.body) for name, node in functions(source))]
    for qualname, body in bodies:
        depth, line = deepest_nest(body)
        if depth > NESTING_MAX:
            yield qualname, line, f"{depth} deep, at most {NESTING_MAX}"


def parameters(source: Source) -> Iterator[Spot]:
    for qualname, node in functions(source):
        positional = [*node.args.posonlyargs, *node.args.args]
        if positional and positional[0].arg in ("self", "cls"):
            del positional[0]
        stars = [star for star in (node.args.vararg, node.args.kwarg) if star]
        count = len(positional) + len(node.args.kwonlyargs) + len(stars)
        if count > PARAMETERS_MAX:
            yield qualname, node.lineno, f"{count} parameters, at most {PARAMETERS_MAX}: make a dataclass"


def attributes(source: Source) -> Iterator[Spot]:
    for qualname, node in classes(source):
        if any(last_name(parent).endswith(("Enum", "Flag")) for parent in node.bases):
            continue  # the members of an enum are its values
        count = len(attribute_names(node))
        if count > ATTRIBUTES_MAX:
            yield qualname, node.lineno, f"{count} attributes, at most {ATTRIBUTES_MAX}"


def vague_name(source: Source) -> Iterator[Spot]:
    path = PurePosixPath(source.path).with_suffix("")
    names = [("", 1, part) for part in path.parts]
    names += [(qualname, node.lineno, node.name) for qualname, node in classes(source)]
    for qualname, line, name in names:
        vague = {word for word in identifier_words(name) if word.removesuffix("s") in VAGUE_WORDS}
        if vague:
            yield qualname, line, f"{name}: '{min(vague)}' does not say what it is"


def local_import(source: Source) -> Iterator[Spot]:
    for qualname, function in functions(source):
        for node in own_nodes(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield qualname, node.lineno, "import inside a function"


def environ(source: Source) -> Iterator[Spot]:
    if source.path == ENVIRON_FILE:
        return
    for qualname, node in placed_nodes(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name, lineno=line) if name in ENVIRON_NAMES:
                yield qualname, line, f"os.{name}: only {ENVIRON_FILE} reads the environment"
            case ast.ImportFrom(module="os", names=aliases, lineno=line):
                for name in sorted(ENVIRON_NAMES.intersection(alias.name for alias in aliases)):
                    yield qualname, line, f"os.{name}: only {ENVIRON_FILE} reads the environment"


def broad_except(source: Source) -> Iterator[Spot]:
    for qualname, node in placed_nodes(source.tree):
        match node:
            case ast.ExceptHandler(type=caught):
                names = exception_names(caught)
            case ast.Call(func=called, args=arguments) if last_name(called) == "suppress":
                names = {last_name(argument) for argument in arguments}
            case _:
                continue
        if names & BROAD_EXCEPTIONS:
            yield qualname, node.lineno, f"catches {min(names & BROAD_EXCEPTIONS)}"


def ascii_only(source: Source) -> Iterator[Spot]:
    for line, text in enumerate(source.text.splitlines(), start=1):
        if not text.isascii():
            strange = next(char for char in text if not char.isascii())
            yield "", line, f"U+{ord(strange):04X} in source; write an escape"


def ends_of_a_copy(source: Source) -> Iterator[Spot]:
    return names_with_words(source, {"src", "dst"}, "the ends of a copy are source and target")


def roles_in_plan(source: Source) -> Iterator[Spot]:
    if source.path.startswith("baton/plan/"):
        yield from names_with_words(source, {"prefill", "decode"}, "a role; plan knows source and target")


RULES: dict[str, Rule] = {
    "file-length": file_length,
    "function-length": function_length,
    "nesting": nesting,
    "parameters": parameters,
    "attributes": attributes,
    "vague-name": vague_name,
    "local-import": local_import,
    "environ": environ,
    "broad-except": broad_except,
    "ascii": ascii_only,
    "source-target": ends_of_a_copy,
    "roles-in-plan": roles_in_plan,
}


def check_source(source: Source) -> list[Finding]:
    """Every broken rule of one file, whatever the allow-list says."""
    return [
        Finding(source.path, qualname, line, name, text)
        for name, rule in RULES.items()
        for qualname, line, text in rule(source)
    ]


def check_tree(root: Path) -> list[Finding]:
    """Every broken rule of the files under a source root, ordered by path."""
    return [
        finding
        for file in sorted(root.rglob("*.py"))
        for finding in check_source(read_source(file.relative_to(root).as_posix(), file.read_text("utf-8")))
    ]


def without_allowed(
    findings: list[Finding], allowed: Iterable[Allowed]
) -> tuple[list[Finding], list[Allowed]]:
    """The findings that no row excuses, and the rows that excuse nothing any more."""
    rows = list(allowed)
    unexcused = [finding for finding in findings if not any(row.covers(finding) for row in rows)]
    stale = [row for row in rows if not any(row.covers(finding) for finding in findings)]
    return unexcused, stale
