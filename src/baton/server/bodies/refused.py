"""Fields that would change the answer and that nothing here can honour: each may only be neutral.

They are looked for by a reader of their own, which passes over everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.web.problems import refused

_LEAVE = "leave it out"
_FREE = f"answers cannot be held to a form here; {_LEAVE}"
_ADAPTER = f"adapters are not served; {_LEAVE}"
_TEXT = f"prompts and answers are text or token ids; {_LEAVE}"
_OFF: tuple[Any, ...] = (None, False)
_ABSENT: tuple[Any, ...] = (None, [], {}, "")

NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (
        (None, {"type": "text"}),
        f"answers cannot be held to a form here; use text or {_LEAVE}",
    ),
    **dict.fromkeys(
        (
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structured_outputs",
            "structural_tag",
            "json_schema",
            "regex",
            "ebnf",
            "grammar",
        ),
        (_ABSENT, _FREE),
    ),
    "tool_choice": ((None, "none", "auto"), "no call can be forced here; use auto or none"),
    "functions": (_ABSENT, "use tools"),
    "function_call": ((None, "none", "auto"), "no call can be forced here; use auto or none"),
    **dict.fromkeys(("lora_path", "lora_request", "lora_id", "adapter"), (_ABSENT, _ADAPTER)),
    **dict.fromkeys(
        ("logits_processors", "custom_logit_processor"), (_ABSENT, f"logits cannot be changed; {_LEAVE}")
    ),
    **dict.fromkeys(
        ("audio", "image_data", "audio_data", "video_data", "input_embeds", "prompt_embeds", "input_audio"),
        (_ABSENT, _TEXT),
    ),
    "modalities": ((None, [], ["text"]), f"only text is answered; use text or {_LEAVE}"),
    "web_search_options": (_ABSENT, f"nothing is looked up; {_LEAVE}"),
    "verbosity": ((None, "medium"), f"use medium or {_LEAVE}"),
    "suffix": ((None, ""), f"prompts are only continued; {_LEAVE}"),
    "use_beam_search": (_OFF, f"there is no beam search; {_LEAVE}"),
    "prompt_logprobs": (_OFF, f"prompts have no log-probabilities here; {_LEAVE}"),
    "return_hidden_states": (_OFF, f"hidden states are not told; {_LEAVE}"),
    "truncate_prompt_tokens": ((None,), f"cut the prompt yourself, or {_LEAVE}"),
    "chat_template": ((None, ""), f"the model's own template is used; {_LEAVE}"),
    "no_stop_trim": (_OFF, f"stop strings are no part of the answer; {_LEAVE}"),
    "include_stop_str_in_output": (_OFF, f"stop strings are no part of the answer; {_LEAVE}"),
    "skip_special_tokens": ((None, True), f"special tokens have no text here; use true or {_LEAVE}"),
    "logprob_start_len": ((None, -1), f"prompts have no log-probabilities here; {_LEAVE}"),
}
"""By field: the values that ask for nothing, and what to do about any other."""

_Suspects = msgspec.defstruct("_Suspects", [(name, Any, None) for name in NEUTRAL], frozen=True)
_reader = msgspec.json.Decoder(_Suspects)


def check_fields(body: bytes) -> None:
    """Refuses what would be ignored to the caller's harm; `body` is a JSON object."""
    check_values(msgspec.structs.asdict(_reader.decode(body)))


def check_values(found: Mapping[str, Any], prefix: str = "") -> None:
    """The same for fields that were read already, below a field that they stand in."""
    for name, (neutral, remedy) in NEUTRAL.items():
        value = found.get(name)
        # Equal values of unequal types (0 and false) are not the same wish.
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise refused(f"{prefix}{name}", value, remedy, code="unsupported")
