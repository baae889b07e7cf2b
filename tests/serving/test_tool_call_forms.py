"""Every form of tool calls: what it reads, and that nothing depends on how the text was cut."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.options import ToolCallParser as ParserOption
from baton.engine.config import EngineConfig
from baton.errors import ConfigError
from baton.serving.server import ServerConfig
from baton.serving.tool_calls import FORMS, PARSERS, ToolCallParser, find_form, forced_form

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wind": {"$ref": "#/$defs/wind"},
        "places": {"type": "array"},
        "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "where": {"type": ["object", "null"]},
        "unit": {"enum": [1, 2.5]},
    },
    "$defs": {"wind": {"type": "boolean"}},
}
SCHEMAS = {"weather": WEATHER}
OSLO = {"city": "Oslo", "days": 3, "wind": True}
ROME = {"city": "5", "places": ["a", {"b": None}], "where": {"x": -1.5}}
CALLS = [("weather", OSLO), ("time.now", {})]


def deepseek(text: str) -> str:
    """The tags of a text, written as `<tool call begin>`, as DeepSeek spells them."""
    return re.sub("<(tool [a-z ]+)>", lambda tag: f"<\uff5c{tag[1].replace(' ', chr(0x2581))}\uff5c>", text)


def qwen(name: str, values: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    lines = [f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def glm(name: str, values: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    lines = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n" for key, value in values.items()
    ]
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


def python_call(name: str, values: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def written(form: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of this form writes them."""
    match form:
        case "hermes":
            return "\n".join(
                f"<tool_call>\n{json.dumps({'name': name, 'arguments': values})}\n</tool_call>"
                for name, values in calls
            )
        case "llama3_json":
            return "; ".join(json.dumps({"name": name, "parameters": values}) for name, values in calls)
        case "pythonic":
            return f"[{', '.join(python_call(*call) for call in calls)}]"
        case "mistral":
            return (
                f"[TOOL_CALLS] {json.dumps([{'name': name, 'arguments': values} for name, values in calls])}"
            )
        case "deepseek_v3":
            listed = [
                f"<tool call begin>function<tool sep>{name}\n```json\n{json.dumps(values)}\n```"
                "<tool call end>"
                for name, values in calls
            ]
            return deepseek("<tool calls begin>" + "\n".join(listed) + "<tool calls end>")
        case "deepseek_v31":
            listed = [
                f"<tool call begin>{name}<tool sep>{json.dumps(values)}<tool call end>"
                for name, values in calls
            ]
            return deepseek("<tool calls begin>" + "".join(listed) + "<tool calls end>")
        case "kimi_k2":
            listed = [
                f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(values)}"
                "<|tool_call_end|>"
                for index, (name, values) in enumerate(calls)
            ]
            return f"<|tool_calls_section_begin|>{''.join(listed)}<|tool_calls_section_end|>"
        case "openai":
            return "".join(
                f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
                f"{json.dumps(values)}<|call|>"
                for name, values in calls
            )
        case "glm45":
            return "\n".join(glm(*call) for call in calls)
        case "qwen3_coder":
            return "\n".join(qwen(*call) for call in calls)
    raise AssertionError(form)


def parsed(
    form: str, pieces: list[str], parser: type[ToolCallParser] = ToolCallParser
) -> tuple[str, list[tuple[str, Any]]]:
    one, content, calls = parser(FORMS[form], SCHEMAS), "", []
    for part in (*map(one.push, pieces), one.finish()):
        content += part[0]
        calls += part[1]
    assert [call.index for call in calls] == list(range(len(calls)))
    if form != "kimi_k2":  # whose model writes the ids itself
        assert len({call.id for call in calls}) == len(calls)
    return content, [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def without_dropped(form: str, text: str) -> str:
    return re.sub("|".join(map(re.escape, FORMS[form].dropped)) or "(?!)", "", text)


# ---- what is read

BARE = ("llama3_json", "pythonic")
"""Forms whose calls have no tag: they stand at the beginning."""


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read(form: str):
    for calls in (CALLS[:1], CALLS, [("weather", ROME), *CALLS]):
        assert parsed(form, [f"\n{written(form, calls)}\n"]) == ("", calls)
        if form not in BARE:
            assert parsed(form, [f"I see.\n\n{written(form, calls)}"]) == ("I see.", calls)
            assert parsed(form, [f"{written(form, calls)} Done."]) == (" Done.", calls)


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', [("weather", {"city": "Oslo"})]),
        (
            "mistral",
            '[TOOL_CALLS]a{"x": "}"}[TOOL_CALLS]b[CALL_ID]a1[ARGS]{}',
            [("a", {"x": "}"}), ("b", {})],
        ),
        ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {}}', [("a", {})]),
        ("llama3_json", '<|python_start|>{"name": "a", "arguments": {}}<|python_end|>', [("a", {})]),
        (
            "llama3_json",
            'So: <|python_tag|> {"name": "a", "parameters": {"x": "{\\""}}',
            [("a", {"x": '{"'})],
        ),
        ("pythonic", "<|python_start|>[a(x='it\\'s', y=[true, None])]<|python_end|>", None),
        ("kimi_k2", "<|tool_call_begin|>a<|tool_call_argument_begin|> {} ", [("a", {})]),
        ("openai", "<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{}", [("a", {})]),
        ("openai", " to=functions.a<|channel|>commentary json<|message|>{}", [("a", {})]),
        ("qwen3_coder", "<function=a>\n<parameter=x>1</function>", [("a", {"x": "1"})]),
        ("glm45", "<tool_call>a</tool_call>", [("a", {})]),
        (
            "glm45",
            "<tool_call>a<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
            [("a", {"x": "1"})],
        ),
    ],
)
def test_other_spellings(form: str, text: str, calls: list[tuple[str, Any]] | None):
    calls = calls or [("a", {"x": "it's", "y": [True, None]})]
    assert parsed(form, [text]) == ("So:" if text.startswith("So:") else "", calls)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_call_stays_text(form: str):
    """A plain text, a call that is cut off anywhere, and brackets that stand behind a text."""
    text = written(form, CALLS[:1])
    for part in ("plain <text> [1] {2}; ", *(text[:num] for num in range(1, len(text)))):
        content, calls = parsed(form, [part])
        if calls:  # all of it is there but the last tags
            assert calls == CALLS[:1]
            assert "Oslo" not in content
        else:
            assert "".join(content.split()) == "".join(without_dropped(form, part).split())
    if form in BARE:
        assert parsed(form, [f"See {text}"]) == (f"See {text}", [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>{oops}</tool_call>!"),
        ("llama3_json", '{"name": "Bob"} {"name": "a", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>search.call(query="x")'),
        ("pythonic", "[1] and [f(a=1)]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=g())]"),
        ("pythonic", "[f(**{'a': 1})]"),
        ("pythonic", "[f(a=1e999)]"),
        ("mistral", "[TOOL_CALLS] that is a tag"),
        ("mistral", '[TOOL_CALLS][{"nome": "x"}]'),
        ("kimi_k2", "<|tool_call_begin|>a<|tool_call_argument_begin|>[1]<|tool_call_end|>"),
        ("qwen3_coder", "<tool_call>\n<function=a>\n<parameter=x>\n1"),
        ("qwen3_coder", "<tool_call>\n<function=a>stray</function>\n</tool_call>"),
        ("glm45", "<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>"),
    ],
)
def test_malformed_calls_stay_text(form: str, text: str):
    assert parsed(form, [text]) == (text, [])


def test_other_messages_of_harmony_are_text():
    text = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant"
    for rest, content, calls in (
        ("<|channel|>final<|message|>Hi", "assistantfinalHi", []),
        ("<|channel|>commentary to=functions.a<|message|>{}", "", [("a", {})]),
        ("<|channel|>commentary to=functions.a<|message|>{", "assistantcommentary to=functions.a{", []),
    ):
        assert parsed("openai", [text + rest]) == (f"analysisI see.{content}", calls)
    parser = ToolCallParser(FORMS["openai"])
    assert "".join(parser.push(letter)[0] for letter in text) == "analysisI see."


def test_a_call_behind_a_malformed_one_is_read():
    text = f"<tool_call>oops {written('hermes', CALLS)}"
    assert parsed("hermes", [text]) == ("<tool_call>oops", CALLS)


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", " a\nb ", " a\nb "),
        ("days", "5", 5),
        ("days", "five", "five"),
        ("days", "[5]", "[5]"),
        ("wind", "True", True),
        ("wind", "false", False),
        ("places", "['a', 1]", ["a", 1]),
        ("at", "null", None),
        ("at", "12", "12"),
        ("where", '{"a": 1}', {"a": 1}),
        ("where", "None", None),
        ("unit", "2.5", 2.5),
        ("unknown", "1", "1"),
    ],
)
def test_values_in_tags_have_the_types_of_the_schema(form: str, key: str, text: str, value: Any):
    write = {"qwen3_coder": qwen, "glm45": glm}[form]
    assert parsed(form, [write("weather", {key: text})]) == ("", [("weather", {key: value})])


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/properties/x"},
        {"$ref": "#/nowhere/at/all"},
        {"anyOf": [{"$ref": "#/properties/x"}] * 9},
        {"type": [{}, 5]},
        {"type": {}, "enum": 3},
        {"anyOf": "integer", "oneOf": [None, []]},
    ],
)
def test_schemas_that_say_nothing_leave_text(schema: dict[str, Any]):
    parser = ToolCallParser(FORMS["glm45"], {"f": {"properties": {"x": schema}}})
    (call,) = parser.push(glm("f", {"x": "5"}))[1]
    assert call.function.arguments == '{"x":"5"}'


# ---- how the text is cut

MARKS = [
    *("{", "}", "[", "]", '"', "'", "\\", "(", ")", ",", ";", "=", " ", "\n", "a", "call", "\u00e9"),
    *('{"name": "a", "parameters": {}}', '{"name": "a", "arguments": {"b": "{"}}', "f(a=1)", "[f(a='[')]"),
]


@st.composite
def texts(draw: st.DrawFn, form: str) -> str:
    """Calls, parts of calls, tags and brackets, in any order."""
    whole = st.sampled_from([written(form, calls) for calls in (CALLS[:1], CALLS)])
    cut = st.builds(lambda text, a, b: text[min(a, b) : max(a, b)], whole, *[st.integers(0, 200)] * 2)
    tags = st.sampled_from([*FORMS[form].all_tags, *MARKS])
    return "".join(draw(st.lists(st.one_of(whole, cut, tags), max_size=5)))


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_the_cut_changes_nothing(form: str, data: st.DataObject):
    text = data.draw(texts(form))
    whole = parsed(form, [text])
    assert parsed(form, list(text)) == whole
    for _ in range(4):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(form, pieces) == whole
    # What is no call and no tag is all there, but for white space.
    letters = re.compile(r"\s")
    if not whole[1]:
        assert letters.sub("", whole[0]) == letters.sub("", without_dropped(form, text))


@pytest.mark.parametrize("form", FORMS)
def test_a_cut_at_every_position(form: str):
    call, calls = written(form, CALLS[:1]), written(form, CALLS)
    for text in (calls, f"I see.\n{calls} Done. {call[:-9]}"):
        whole = parsed(form, [text])
        for cut in range(len(text)):
            assert parsed(form, [text[:cut], text[cut:]]) == whole


class Hasty(ToolCallParser):
    """A broken one: it does not wait for the rest of a tag."""

    def push(self, text: str) -> tuple[str, list[Any]]:
        content, calls = super().push(text)
        if self._open is None:
            content, self._held = content + self._held, ""
        return content, calls


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_a_hasty_parser_is_found_out(form: str):
    text = written(form, CALLS)
    assert parsed(form, [f" {text}"], Hasty) == ("", CALLS)
    assert any(
        parsed(form, [text[:cut], text[cut:]], Hasty) != ("", CALLS) for cut in range(len(text))
    ) or parsed(form, [" ", text], Hasty) != ("", CALLS)


@pytest.mark.parametrize("form", FORMS)
def test_text_outside_of_calls_streams_through(form: str):
    parser = ToolCallParser(FORMS[form])
    assert "".join(parser.push(letter)[0] for letter in "I see. Now <b>") == "I see. Now <b>"
    calls = [call for letter in written(form, CALLS) for call in parser.push(letter)[1]]
    if form not in BARE:
        assert [call.function.name for call in calls] == ["weather", "time.now"]


def test_tags_do_not_overlap():
    """Otherwise what is found first could depend on the cut."""
    for form in FORMS.values():
        tags = (*form.tags, *form.dropped)
        for first in tags:
            for second in tags:
                common = [num for num in range(1, len(second)) if first.endswith(second[:num])]
                assert not common, (first, second)
                assert first == second or second not in first


# ---- which form

SAYINGS = {
    "hermes": "{{ '<tool_call>' }}",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>",
    "glm45": "<tool_call>{name}\n<arg_key>{key}</arg_key>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    "mistral": "{{- '[TOOL_CALLS] [' }}",
    "openai": '{{- "<|channel|>commentary json<|message|>" }}',
    "deepseek_v3": deepseek("<tool call begin>' + tool['type'] + '<tool sep>' + '```json'"),
    "deepseek_v31": deepseek("<tool call begin>'+ tool['function']['name'] + '<tool sep>'"),
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name',
    "pythonic": "[func_name1(params_name1=params_value1, ...), func_name2(params)]",
}


def test_the_template_names_the_form():
    assert SAYINGS.keys() == FORMS.keys()
    for name, words in SAYINGS.items():
        for parser, expected in (("auto", name), ("hermes", "hermes"), ("none", None)):
            form = find_form(parser, lambda word, words=words: word in words)
            assert (form and form.name) == expected
    assert find_form("auto", lambda word: False) is None


def test_the_option_has_every_form():
    assert get_args(ParserOption) == PARSERS
    with pytest.raises(ConfigError, match="tool call parser 'herms' is not known; use one of auto, none, "):
        ServerConfig(EngineConfig("demo"), tool_call_parser="herms")


def test_ids_are_as_the_templates_of_the_family_want_them():
    for name, pattern in (("mistral", "[0-9a-f]{9}"), ("hermes", "call_[0-9a-f]{24}")):
        parser = ToolCallParser(FORMS[name])
        (call,) = parser.push(written(name, CALLS[:1]))[1] or parser.finish()[1]
        assert re.fullmatch(pattern, call.id)
    text = written("llama3_json", CALLS[:1])
    (call,) = ToolCallParser(forced_form(FORMS["kimi_k2"]), num_before=2).push(text)[1]
    assert call.id == "functions.weather:2"
    (call,) = ToolCallParser(FORMS["kimi_k2"], num_before=2).push(written("kimi_k2", CALLS[:1]))[1]
    assert call.id == "functions.weather:0"  # as the model wrote it
