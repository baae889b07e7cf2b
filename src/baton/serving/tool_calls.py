"""Tool calls in the text of an answer: the forms in which models write them, and the parser of all forms.

Theory. A call begins with a tag, or, in a form without one, with a bracket where nothing but calls came
before. It goes on up to its end tag or to the bracket that closes it, and is then read as a whole. What
cannot be read is text, its tag included, and parsing goes on right behind the tag. The parser holds back only
what may still become a call: a call that is not complete, the beginning of a tag, and white space at the end,
which is dropped around calls. Each decision depends on the text up to it alone. So the result does not depend
on how the text was cut into pieces, and another instance can go on from the text so far.
"""

from __future__ import annotations

import ast
import re
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class FunctionCall(msgspec.Struct, frozen=True):
    """A function that the model calls, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """One call; in a stream it comes whole, with its place among the choice's calls."""

    id: str
    function: FunctionCall
    type: str = "function"
    index: int | UnsetType = UNSET


Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""By function: the schema of its arguments."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as a model wrote it."""

    name: str
    arguments: str
    """As JSON."""
    id: str = ""
    """In forms that have one."""


def _call_id(name: str, index: int) -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How models of a family write calls."""

    name: str
    """As in vLLM's --tool-call-parser."""
    signs: tuple[str, ...]
    """A chat template that has all of them is for models of this form."""
    tags: Mapping[str, str]
    """By what a call begins with: what it ends with; empty: the bracket that closes its first one."""
    read: Callable[[str, Schemas], list[WrittenCall]]
    """The calls in the text between the tags; empty: there are none."""
    bare: str = ""
    """The bracket that a call without a tag begins with."""
    quotes: str = '"'
    """Brackets between them do not count."""
    dropped: tuple[str, ...] = ()
    """Tags that are no part of the text: those around calls, or of other messages."""
    inner: tuple[str, ...] = ()
    """Tags inside of a call."""
    strict: tuple[str, ...] = ()
    """Tags whose end tag is needed: without it a call may be cut off, though it can be read."""
    opening: Callable[[str], int | None] | None = None
    """Where a call's first bracket is, None: not yet there, -1: it cannot come any more."""
    make_id: Callable[[str, int], str] = _call_id
    """An id by the function's name and the index of the call in the chat."""

    @property
    def all_tags(self) -> tuple[str, ...]:
        """Those that the text has to show, should they be special tokens."""
        return (*self.tags, *filter(None, self.tags.values()), *self.dropped, *self.inner)


# ---- calls in JSON

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_NAME = r"[\w.-]+"
_HEAD_MAX = 256
"""Characters between a tag and the arguments."""


class _JsonCall(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | str | UnsetType = UNSET
    parameters: dict[str, Any] | str | UnsetType = UNSET

    def calls(self, is_bare: bool = False) -> list[WrittenCall]:
        """`is_bare`: an object without arguments is not taken for a call."""
        given = self.parameters if self.arguments is UNSET else self.arguments
        if given is UNSET:
            return [] if is_bare else [WrittenCall(self.name, "{}")]
        return [WrittenCall(self.name, given if isinstance(given, str) else _encode(given))]


_CALL, _CALLS = msgspec.json.Decoder(_JsonCall), msgspec.json.Decoder(list[_JsonCall])


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _read_hermes(text: str, schemas: Schemas) -> list[WrittenCall]:
    return _CALL.decode(text).calls()


def _read_llama(text: str, schemas: Schemas) -> list[WrittenCall]:
    return _CALL.decode(text).calls(is_bare=True)


_MISTRAL_HEAD = re.compile(rf"\s*({_NAME})(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*")


def _mistral_opening(text: str) -> int | None:
    num_blank = len(text) - len(text.lstrip())
    if text[num_blank : num_blank + 1] in ("", "["):
        return num_blank if num_blank < len(text) else None
    brace = text.find("{", 0, _HEAD_MAX)
    if brace >= 0:
        return brace if _MISTRAL_HEAD.fullmatch(text, 0, brace) else -1
    is_hopeless = len(text) >= _HEAD_MAX or len(text.split()) > 1
    return -1 if is_hopeless else None


def _read_mistral(text: str, schemas: Schemas) -> list[WrittenCall]:
    if text.lstrip().startswith("["):
        return [call for given in _CALLS.decode(text) for call in given.calls()]
    head = _MISTRAL_HEAD.match(text)
    return [WrittenCall(head[1], _encode(_OBJECT.decode(text[head.end() :])))] if head else []


# gpt-oss: a message is a header, its text and <|end|> or the like. That of a call names the function, and
# where the prompt has begun the header already, the answer begins with that.
_HARMONY_MESSAGE = "<|message|>"
_HARMONY_FUNCTION = re.compile(rf"(?:to=functions|^)\.({_NAME})")


def _harmony_opening(text: str) -> int | None:
    index = text.find(_HARMONY_MESSAGE, 0, _HEAD_MAX)
    if index < 0:
        return None if len(text) < _HEAD_MAX else -1
    if not _HARMONY_FUNCTION.search(text, 0, index):
        return -1
    index += len(_HARMONY_MESSAGE)
    num_blank = len(text) - index - len(text[index:].lstrip())
    if index + num_blank == len(text):
        return None
    return index + num_blank if text[index + num_blank] == "{" else -1


def _read_harmony(text: str, schemas: Schemas) -> list[WrittenCall]:
    head, _, arguments = text.partition(_HARMONY_MESSAGE)
    name = _HARMONY_FUNCTION.search(head)
    return [WrittenCall(name[1], _encode(_OBJECT.decode(arguments)))] if name else []


def _reader_of(pattern: str) -> Callable[[str, Schemas], list[WrittenCall]]:
    """Reads a name and arguments in JSON, between other things."""
    compiled = re.compile(pattern, re.DOTALL)

    def read(text: str, schemas: Schemas) -> list[WrittenCall]:
        match = compiled.fullmatch(text.strip())
        if match is None:
            return []
        arguments = _encode(_OBJECT.decode(match["arguments"]))
        return [WrittenCall(match["name"], arguments, match.groupdict().get("id") or "")]

    return read


# ---- calls in Python

_PYTHON_ERRORS = (SyntaxError, RecursionError, MemoryError)
_JSON_NAMES: Mapping[str, Any] = {"true": True, "false": False, "null": None}


def _expression(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an escape that Python does not know
        return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr) -> Any:
    """The value of a literal; a ValueError where it is none, or none that JSON has."""
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as value) if isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as number):
            return -_value(number)
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_value(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_value, values), strict=True))
    raise ValueError(type(node).__name__)


def _read_pythonic(text: str, schemas: Schemas) -> list[WrittenCall]:
    listed, calls = _expression(text), list[WrittenCall]()
    for node in listed.elts if isinstance(listed, ast.List) else ():
        match node:
            case ast.Call(func=ast.Name() | ast.Attribute() as function, args=[], keywords=keywords):
                name = ast.unparse(function)
                values = {given.arg: _value(given.value) for given in keywords}
                if None in values or not re.fullmatch(_NAME, name):
                    return []
                calls.append(WrittenCall(name, _encode(values)))
            case _:
                return []
    return calls


# ---- calls in tags, whose values have the types of the schema

_PARAMETER = re.compile(r"<parameter=([^<>]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")


def _read_qwen3_coder(text: str, schemas: Schemas) -> list[WrittenCall]:
    inside = text.strip()
    if inside.startswith("<function="):
        if not inside.endswith("</function>"):
            return []
        inside = inside.removeprefix("<function=").removesuffix("</function>")
    name, _, rest = inside.partition(">")
    pairs = [
        (key.strip(), value.removeprefix("\n").removesuffix("\n")) for key, value in _PARAMETER.findall(rest)
    ]
    return _tagged_call(name, pairs, _PARAMETER.sub("", rest), schemas)


def _read_glm45(text: str, schemas: Schemas) -> list[WrittenCall]:
    name, key, rest = text.partition("<arg_key>")
    rest = key + rest
    pairs = [(name.strip(), value) for name, value in _ARGUMENT.findall(rest)]
    return _tagged_call(name, pairs, _ARGUMENT.sub("", rest), schemas)


def _tagged_call(
    name: str, pairs: Iterable[tuple[str, str]], others: str, schemas: Schemas
) -> list[WrittenCall]:
    name = name.strip()
    if others.strip() or not re.fullmatch(_NAME, name):
        return []
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    values = {key: _typed(value, _types(known.get(key), schema)) for key, value in pairs}
    return [WrittenCall(name, _encode(values))]


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types that values of a schema may have; empty: it does not say."""
    types, pending, seen = set[str](), [schema], set[int]()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        reference, stated, values = schema.get("$ref"), schema.get("type"), schema.get("enum")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: Any = root
            for step in reference[2:].split("/"):
                target = target.get(step) if isinstance(target, dict) else None
            pending.append(target)
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            pending += options if isinstance(options, list) else []
        if stated is not None:
            types |= {kind for kind in (stated if isinstance(stated, list) else [stated]) if kind in _KINDS}
        elif isinstance(values, list):
            types |= {kind for value in values for kind in _kinds(value)}
    return types


def _kinds(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _typed(text: str, types: set[str]) -> Any:
    """A value as its schema has it; as text where that is allowed too, or it is of no such type."""
    if types <= {"string"}:
        return text
    value: Any
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        try:
            value = _value(_expression(text))  # as True, None and 'x' are
        except (ValueError, *_PYTHON_ERRORS):
            return text
    kinds = _kinds(value) & types
    if "string" in types:
        kinds &= {"null", "array", "object"}
    return value if kinds else text


# ---- the forms


def _deepseek_tag(words: str) -> str:
    """DeepSeek's tags have bars and spaces of their own."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_DEEPSEEK_BEGIN, _DEEPSEEK_END = _deepseek_tag("tool call begin"), _deepseek_tag("tool call end")
_DEEPSEEK_SEP = _deepseek_tag("tool sep")
_KIMI_SEP = "<|tool_call_argument_begin|>"

_DEEPSEEK_V31 = CallForm(
    "deepseek_v31",
    (_DEEPSEEK_BEGIN,),
    {_DEEPSEEK_BEGIN: _DEEPSEEK_END},
    _reader_of(rf"(?P<name>{_NAME})\s*{_DEEPSEEK_SEP}(?P<arguments>.*)"),
    dropped=(_deepseek_tag("tool calls begin"), _deepseek_tag("tool calls end")),
    inner=(_DEEPSEEK_SEP,),
)
_LLAMA3_JSON = CallForm(
    "llama3_json",
    ('{"name": function name, "parameters"',),
    {"<|python_tag|>": "", "<|python_start|>": ""},
    _read_llama,
    bare="{",
    dropped=("<|python_end|>",),
)
_HERMES = CallForm("hermes", ("<tool_call>",), {"<tool_call>": "</tool_call>"}, _read_hermes)
_IN_ORDER = (
    replace(
        _DEEPSEEK_V31,
        name="deepseek_v3",
        signs=(_DEEPSEEK_BEGIN, "```json"),
        read=_reader_of(
            rf"\w+{_DEEPSEEK_SEP}(?P<name>{_NAME})\s*```json(?P<arguments>.*)```",
        ),
    ),
    _DEEPSEEK_V31,
    CallForm(
        "kimi_k2",
        ("<|tool_call_begin|>",),
        {"<|tool_call_begin|>": "<|tool_call_end|>"},
        _reader_of(
            rf"(?P<id>(?:functions\.)?(?P<name>{_NAME})(?::\d+)?)\s*{re.escape(_KIMI_SEP)}(?P<arguments>.*)"
        ),
        dropped=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
        ),
        inner=(_KIMI_SEP,),
        make_id=lambda name, index: f"functions.{name}:{index}",
    ),
    CallForm(
        "mistral",
        ("[TOOL_CALLS]",),
        {"[TOOL_CALLS]": ""},
        _read_mistral,
        inner=("[CALL_ID]", "[ARGS]"),
        opening=_mistral_opening,
        make_id=lambda name, index: secrets.token_hex(5)[:9],  # templates refuse others
    ),
    CallForm(
        "openai",
        ("<|channel|>",),
        {"<|start|>": "", "<|channel|>": "", "to=functions": ""},
        _read_harmony,
        dropped=(
            *("<|start|>", "<|channel|>", "<|constrain|>", _HARMONY_MESSAGE),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
        opening=_harmony_opening,
    ),
    CallForm(
        "glm45",
        ("<arg_key>",),
        {"<tool_call>": "</tool_call>"},
        _read_glm45,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        strict=("<tool_call>",),
    ),
    CallForm(
        "qwen3_coder",
        ("<function=",),
        {"<tool_call>": "</tool_call>", "<function=": "</function>"},
        _read_qwen3_coder,
        strict=("<function=",),
    ),
    _HERMES,
    _LLAMA3_JSON,
    CallForm(
        "pythonic",
        ("func_name1(",),
        {"<|python_start|>": ""},
        _read_pythonic,
        bare="[",
        quotes="\"'",
        dropped=("<|python_end|>",),
    ),
)
FORMS: Mapping[str, CallForm] = {form.name: form for form in _IN_ORDER}
"""By name, in the order in which a template is searched for their signs."""
PARSERS = ("auto", "none", *FORMS)
"""What --tool-call-parser may be."""


def find_form(parser: str, has_word: Callable[[str], bool]) -> CallForm | None:
    """The form that `parser` names, or that the chat template has, by the words in it; None: no form."""
    if parser != "auto":
        return FORMS.get(parser)
    return next((form for form in FORMS.values() if all(map(has_word, form.signs))), None)


def forced_form(form: CallForm | None) -> CallForm:
    """The form of calls that a grammar forces: Hermes' own, and for models of other forms plain JSON."""
    if form is None:
        return _LLAMA3_JSON
    return form if form is _HERMES else replace(_LLAMA3_JSON, make_id=form.make_id)


# ---- the parser

_SPACE = " \t\r\n\v\f"
_READ_ERRORS = (msgspec.DecodeError, ValueError, *_PYTHON_ERRORS)


@dataclass(slots=True)
class _Brackets:
    """Looks for the bracket that closes the first one of a text."""

    quotes: str
    index: int
    """As far as the text was read."""
    _depth: int = 0
    _quote: str = ""
    _is_escaped: bool = False

    def find_end(self, text: str) -> int:
        """Where the text behind that bracket begins; -1: it is not there yet."""
        while self.index < len(text):
            character = text[self.index]
            self.index += 1
            if self._quote:
                if self._is_escaped or character == "\\":
                    self._is_escaped = not self._is_escaped
                elif character == self._quote:
                    self._quote = ""
            elif character in self.quotes:
                self._quote = character
            elif character in "[{(":
                self._depth += 1
            elif character in "]})":
                self._depth -= 1
                if self._depth == 0:
                    return self.index
        return -1


@dataclass(slots=True)
class _OpenCall:
    """A call that has begun, in the text that is held back."""

    body_index: int
    """Where its text begins, behind its tag."""
    text_index: int
    """Where parsing goes on if it is no call."""
    tag: str
    search_index: int
    brackets: _Brackets | None = None


@dataclass(slots=True)
class ToolCallParser:
    """Splits the text of one choice into content and calls."""

    form: CallForm
    schemas: Schemas = field(default_factory=dict)
    num_before: int = 0
    """Calls earlier in the chat."""
    num_calls: int = 0
    _held: str = ""
    _open: _OpenCall | None = None
    _is_bare_allowed: bool = True
    """Whether nothing but calls came so far."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content and the calls that are certain with this text."""
        self._held += text
        return self._parse(is_over=False)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, when the text is over; a model may leave out the last tag."""
        return self._parse(is_over=True)

    def _parse(self, is_over: bool) -> tuple[str, list[ToolCall]]:
        content, calls = "", list[ToolCall]()
        while True:
            if self._open is None:
                num_held = len(self._held)
                content += self._next_content(is_over)
                if self._open is None and len(self._held) in (0, num_held):
                    return content, calls
                continue
            body_end, text_index = self._find_end(self._open, is_over)
            if body_end is None:
                return content, calls
            read = self._read(self._held[self._open.body_index : body_end]) if body_end >= 0 else []
            if read:
                calls += read
            else:
                text_index, tag = self._open.text_index, self._open.tag
                num_given = text_index - len(tag) if tag in self.form.dropped else text_index
                content += self._given(self._held[:num_given])
            self._held, self._open = self._held[text_index:], None

    def _next_content(self, is_over: bool) -> str:
        """Takes content from what is held, up to the next call or tag or to what may become one."""
        form, text = self.form, self._held
        if form.bare and self._is_bare_allowed:
            num_lead = len(text) - len(text.lstrip(_SPACE + ",;" if self.num_calls else _SPACE))
            if text.startswith(form.bare, num_lead):
                self._open = _OpenCall(num_lead, num_lead + 1, "", num_lead)
                return ""
            if num_lead == len(text) and not is_over:
                return ""
        starts = [(text.find(tag), tag) for tag in (*form.tags, *form.dropped) if tag in text]
        if starts:
            index, tag = min(starts)
            num_content = len(text[:index].rstrip(_SPACE))
            if tag in form.tags:
                body_index = index + len(tag) - num_content
                self._open = _OpenCall(body_index, body_index, tag, body_index)
                self._held = text[num_content:]
            else:
                self._held = text[index + len(tag) :]
            return self._given(text[:num_content])
        if is_over:
            self._held = ""
            return self._given(text.rstrip(_SPACE) if self.num_calls else text)
        num_tag = max(_num_begun(text, tag) for tag in (*form.tags, *form.dropped))
        num_content = len(text[: len(text) - num_tag].rstrip(_SPACE))
        self._held = text[num_content:]
        return self._given(text[:num_content])

    def _given(self, content: str) -> str:
        if content.strip(_SPACE):
            self._is_bare_allowed = False
        return content

    def _find_end(self, call: _OpenCall, is_over: bool) -> tuple[int | None, int]:
        """(end, next): where the call ends (None: incomplete, -1: not a call), and where text resumes."""
        form, text = self.form, self._held
        if end := form.tags.get(call.tag, ""):
            index = text.find(end, call.search_index)
            if index >= 0:
                return index, index + len(end)
            call.search_index = max(call.body_index, len(text) - len(end) + 1)
            if not is_over:
                return None, 0
            return (-1, 0) if call.tag in form.strict else (len(text), len(text))
        if call.brackets is None:
            opening = (form.opening or _opening_of(form.bare))(text[call.body_index :])
            if opening is None or opening < 0:
                return (None if opening is None and not is_over else -1), 0
            call.brackets = _Brackets(form.quotes, call.body_index + opening)
        index = call.brackets.find_end(text)
        if index < 0:
            return (-1 if is_over else None), 0
        return index, index

    def _read(self, text: str) -> list[ToolCall]:
        try:
            written = self.form.read(text, self.schemas)
        except _READ_ERRORS:
            return []
        calls = []
        for call in written:
            identity = call.id or self.form.make_id(call.name, self.num_before + self.num_calls)
            calls.append(ToolCall(identity, FunctionCall(call.name, call.arguments), index=self.num_calls))
            self.num_calls += 1
        return calls


def _opening_of(bracket: str) -> Callable[[str], int | None]:
    def opening(text: str) -> int | None:
        num_blank = len(text) - len(text.lstrip(_SPACE))
        if num_blank == len(text):
            return None
        return num_blank if text[num_blank] == bracket else -1

    return opening


def _num_begun(text: str, tag: str) -> int:
    """How many of the first characters of a tag the text ends with."""
    index = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while index >= 0 and not tag.startswith(text[index:]):
        index = text.find(tag[0], index + 1)
    return len(text) - index if index >= 0 else 0


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Of the tools that a request offers; what has no schema is left out."""
    functions = [tool.get("function") for tool in tools]
    return {
        function["name"]: function["parameters"]
        for function in functions
        if isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), dict)
    }
