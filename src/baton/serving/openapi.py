"""The OpenAPI description of the server, generated from the structs of baton.serving.openai."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from baton import __version__
from baton.serving import openai
from baton.serving.http import ErrorBody, RouterHints

_REF = "#/components/schemas/{name}"
_ERRORS = {
    "400": "Bad input: the field, its value and what to do.",
    "401": "An API key is needed.",
    "403": "Only a router may ask for this.",
    "404": "Not found.",
    "408": "The body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "429": "Too many requests are waiting.",
    "500": "An internal error.",
    "502": "The other side of the hand-over failed.",
    "503": "Not ready, draining or out of pages.",
    "504": "The hand-over took too long.",
}
_GENERATING = ("400", "401", "403", "404", "408", "413", "415", "429", "500", "502", "503", "504")
_STRUCTS = (
    openai.CompletionRequest,
    openai.ChatRequest,
    openai.GenerateRequest,
    openai.TokenizeRequest,
    openai.DetokenizeRequest,
    openai.Tokenized,
    openai.Detokenized,
    openai.Completion,
    openai.ChatCompletion,
    openai.ChatChunk,
    openai.Generated,
    openai.ModelList,
    openai.ModelCard,
    openai.HealthBody,
    openai.DrainBody,
    RouterHints,
    ErrorBody,
)


_CHECKED = (
    *("CompletionRequest", "ChatRequest", "GenerateRequest", "TokenizeRequest", "DetokenizeRequest"),
    *("GenerateParams", "StreamOptions", "OutputFormat", "StructuredOutputs"),
)
"""Schemas whose other fields are refused."""


@cache
def description() -> dict[str, Any]:
    """The whole document."""
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
    for name in _CHECKED:
        properties = components[name]["properties"]
        components[name]["additionalProperties"] = False
        if "baton" in properties:
            properties["baton"] = {"description": "For routers; ignored from other callers."}
        for field, (neutral, _) in openai.UNSUPPORTED.items():
            properties.setdefault(field, {"enum": list(neutral), "description": "Only neutral values."})
        for field in sorted(openai.IGNORED):
            properties.setdefault(field, {"description": "Without effect."})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__, "description": "One instance behind HTTP."},
        "paths": _paths(),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _paths() -> dict[str, Any]:
    model = _get("One model.", {"404"}, _json("ModelCard"))
    model["get"]["parameters"] = [_parameter("id", "path", {"type": "string", "minLength": 1})]
    timeline = _get("The timeline of a request.", {"400", "404"}, _json({"type": "object"}))
    timeline["get"]["parameters"] = [
        _parameter("id", "path", {"type": "string", "minLength": 1}),
        _parameter("format", "query", {"type": "string", "enum": ["json", "perfetto"]}),
    ]
    any_object = {"type": "object"}
    return {
        "/v1/completions": _post("Completes prompts.", "CompletionRequest", "Completion"),
        "/v1/chat/completions": _post("Completes a chat.", "ChatRequest", "ChatCompletion"),
        "/generate": _post(
            "The same in the form of SGLang.",
            "GenerateRequest",
            {"anyOf": [{"$ref": _REF.format(name="Generated")}, _many("Generated")]},
        ),
        "/tokenize": _post("The token ids of a prompt or chat.", "TokenizeRequest", "Tokenized"),
        "/detokenize": _post("The text of token ids.", "DetokenizeRequest", "Detokenized"),
        "/version": _get("The version of Baton.", set(), _json(any_object)),
        "/v1/models": _get("The served models.", set(), _json("ModelList")),
        "/v1/models/{id}": model,
        "/health": _get("Whether it can serve and hand over.", {"503"}, _json("HealthBody")),
        "/health_generate": _get("The same.", {"503"}, _json("HealthBody")),
        "/server_info": _get("State and load, for routers.", set(), _json(any_object)),
        "/get_server_info": _get("The same.", set(), _json(any_object)),
        "/model_info": _get("The model, for routers.", set(), _json(any_object)),
        "/get_model_info": _get("The same.", set(), _json(any_object)),
        "/metrics": _get("For Prometheus.", set(), {"text/plain": {"schema": {"type": "string"}}}),
        "/v1/timelines": _get("The latest requests.", set(), _json(any_object)),
        "/v1/timelines/{id}": timeline,
        "/openapi.json": _get("This document.", set(), _json(any_object)),
        "/drain": {"post": _operation("Stops taking new requests.", {"403"}, _json("DrainBody"))},
    }


def _post(text: str, body: str, content: str | dict[str, Any]) -> dict[str, Any]:
    responses = {**_json(content), "text/event-stream": {"schema": {"type": "string"}}}
    operation = _operation(text, set(_GENERATING), responses)
    operation["requestBody"] = {"required": True, "content": _json(body)}
    return {"post": operation}


def _get(text: str, errors: set[str], content: dict[str, Any]) -> dict[str, Any]:
    return {"get": _operation(text, errors, content)}


def _operation(text: str, errors: set[str], content: dict[str, Any]) -> dict[str, Any]:
    wrong = {*errors, "401", "408", "413", "415", "500"}
    responses: dict[str, Any] = {"200": {"description": "OK.", "content": content}}
    for status in sorted(wrong):
        responses[status] = {"description": _ERRORS[status], "content": _json("ErrorBody")}
    return {"summary": text, "responses": responses}


def _json(content: str | dict[str, Any]) -> dict[str, Any]:
    form = {"$ref": _REF.format(name=content)} if isinstance(content, str) else content
    return {"application/json": {"schema": form}}


def _many(name: str) -> dict[str, Any]:
    return {"type": "array", "items": {"$ref": _REF.format(name=name)}}


def _parameter(name: str, where: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}
