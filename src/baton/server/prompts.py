"""From what a request says to the token ids of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.server.bodies.asked import (
    NUM_PROMPTS_MAX,
    Body,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Message,
)
from baton.server.model import Model
from baton.web.problems import Problem, refused

Ids = tuple[int, ...]

_RESERVED = {"conversation", "messages", "tokenize", "chat_template", "return_tensors", "return_dict"}
"""What a caller may not set of how the template is applied."""


async def read_prompts(body: Body, model: Model) -> list[Ids]:
    """By prompt: its token ids."""
    match body:
        case ChatRequest():
            options = _options(body)
            return [await model.chat([_message(each, at) for at, each in enumerate(body.messages)], options)]
        case CompletionRequest():
            found: Any = body.prompt
            return await _texts_or_ids(found, "prompt", model)
        case GenerateRequest():
            if (body.text is None) == (body.input_ids is None):
                raise Problem(400, "give either text or input_ids", param="text")
            if body.text is not None:
                return await _texts_or_ids(body.text, "text", model)
            return await _texts_or_ids(body.input_ids, "input_ids", model)


async def _texts_or_ids(found: Any, param: str, model: Model) -> list[Ids]:
    if isinstance(found, str):
        return [await model.encode(found, param)]
    if not found:
        raise refused(param, found, "give at least one prompt")
    kinds = {type(each) for each in found}
    if len(kinds) > 1:
        raise refused(param, found, "give texts, or token ids, or lists of token ids, not a mixture")
    if kinds == {int}:
        return [model.check_ids(found, param)]
    if len(found) > NUM_PROMPTS_MAX:
        raise Problem(400, f"{param} has {len(found)} prompts; send at most {NUM_PROMPTS_MAX}", param=param)
    if kinds == {list}:
        return [model.check_ids(each, param) for each in found]
    return [await model.encode(each, param) for each in found]


def _message(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it: content is one text, arguments of calls are objects."""
    where = f"messages[{place}]"
    found = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            if part.type != "text":
                remedy = "only parts of type text are taken"
                raise refused(f"{where}.content[{index}].type", part.type, remedy, code="unsupported")
        found["content"] = "\n".join(part.text for part in message.content)
    elif message.content is None:
        if message.role != "assistant":
            raise refused(f"{where}.content", None, "give a text")
        found["content"] = ""
    if message.tool_calls is not None:
        found["tool_calls"] = [_call(each) for each in message.tool_calls]
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _options(body: ChatRequest) -> dict[str, Any]:
    """What the template is given beside the messages."""
    options = dict(body.chat_template_kwargs or {})
    if reserved := _RESERVED.intersection(options):
        raise refused("chat_template_kwargs", sorted(reserved), "these cannot be set; leave them out")
    if body.tools:
        options["tools"] = body.tools
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
        options.setdefault("add_generation_prompt", False)
        if options["add_generation_prompt"]:
            remedy = "leave it out where the last message is continued"
            raise refused("add_generation_prompt", True, remedy)
    return options


def echoes(body: Body, prompts: Sequence[Ids], model: Model) -> list[str]:
    """By prompt: what goes ahead of each of its answers."""
    if not isinstance(body, CompletionRequest) or not body.echo:
        return [""] * len(prompts)
    if body.logprobs is not None:
        raise refused("echo", True, "prompts have no log-probabilities here; leave out one of the two")
    found = body.prompt
    given = [found] if isinstance(found, str) else found
    return [
        str(text) if isinstance(text, str) else model.text(ids)
        for text, ids in zip(given if len(given) == len(prompts) else prompts, prompts, strict=True)
    ]
