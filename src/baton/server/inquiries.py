"""A request as the instance gets it: one job per prompt, or one per answer that goes on.

The n answers to a prompt are one job: one prefill, one hand-over, and the decode forks. The index of a choice
is the place of its prompt times n, plus which of the n it is. A request that goes on where another attempt
was left has a job for each choice that was not finished, in the order in which they are listed.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from baton.engine.requests import EngineRequest, InboundHandoff, OutboundHandoff
from baton.engine.sampling_params import SamplingParams, check_params
from baton.errors import ConfigError
from baton.server.bodies.asked import Body, ChatRequest, CompletionRequest, Extended, GenerateRequest
from baton.server.model import TOO_LONG, Model
from baton.server.prompts import Ids, echoes, read_prompts
from baton.server.wishes import TOKENS_DEFAULT, wishes
from baton.web.credentials import Caller
from baton.web.private import Private, Resumed
from baton.web.problems import Problem, refused

NUM_CHOICES_MAX = 256
_PREFIXES = {CompletionRequest: "cmpl-", ChatRequest: "chatcmpl-", GenerateRequest: "gen-"}
_FIELD = re.compile(r"(\w+) is ")
_NAMES = {"stop_ids": "stop_token_ids"}
_WHERE = {CompletionRequest: "prompt", ChatRequest: "messages", GenerateRequest: "text"}


@dataclass(frozen=True, slots=True)
class Place:
    """The instance that a request came to."""

    role: str
    address: str
    """Of its coordinator, as host:port."""
    first_token: str
    """prefill or decode: whose first token is streamed."""
    name: str
    """Of the served model."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt with its answers, or the rest of one answer."""

    request: EngineRequest
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Inquiry:
    """One request of a client."""

    id: str
    created: int
    body: Body
    jobs: tuple[Job, ...]
    n: int
    prompts: tuple[Ids, ...]
    echoes: tuple[str, ...]
    private: Private

    @property
    def is_leg(self) -> bool:
        """Whether its prompts leave: it is answered once their hand-overs are settled."""
        return any(isinstance(job.request.handoff, OutboundHandoff) for job in self.jobs)

    @property
    def is_stream(self) -> bool:
        """Whether the client wants events."""
        return bool(self.body.stream)

    @property
    def has_usage(self) -> bool:
        """Whether its stream ends with the usage."""
        options = self.body.stream_options if isinstance(self.body, Extended) else None
        return bool(options and options.include_usage)

    @property
    def has_ids(self) -> bool:
        """Whether token ids are told with the text."""
        return isinstance(self.body, Extended) and bool(self.body.return_token_ids)

    @property
    def resumed(self) -> dict[int, Ids]:
        """By choice that goes on: the tokens of it that were told before."""
        return {each.index: each.tokens for each in self.private.resume}

    def choices(self) -> list[int]:
        """The choices that are answered here."""
        if self.private.resume:
            return [each.index for each in self.private.resume]
        return [job.prompt_index * self.n + index for job in self.jobs for index in range(self.n)]


async def inquire(body: Body, caller: Caller, model: Model, place: Place) -> Inquiry:
    """What a request asks for; a Problem where it cannot be."""
    private = read_private(body, caller)
    _check_room(body, caller)
    _check_model(body, place.name)
    first_room = (
        body.bootstrap_room[0] if isinstance(body.bootstrap_room, list) and body.bootstrap_room else 0
    )
    room = body.bootstrap_room if isinstance(body.bootstrap_room, int) else first_room
    # Both legs of a request draw alike, since both know its room.
    params = wishes(body, room or secrets.randbits(63))
    _check_stops(params, model)
    prompts = await read_prompts(body, model)
    if len(prompts) * params.n > NUM_CHOICES_MAX:
        text = f"{len(prompts)} prompts with n {params.n}: at most {NUM_CHOICES_MAX} answers in a request"
        raise Problem(400, text, param="n")
    _check(params, model)
    place = replace(place, first_token=private.first_token or place.first_token)
    hands = _hands(body, place, len(private.resume) or len(prompts), params.n)
    jobs = _jobs(_Wanted(body, params, prompts, private.resume), hands, model)
    name = private.id or f"{_PREFIXES[type(body)]}{secrets.token_hex(16)}"
    created = private.created or int(time.time())
    found = echoes(body, prompts, model)
    return Inquiry(name, created, body, jobs, params.n, tuple(prompts), tuple(found), private)


def read_private(body: Body, caller: Caller) -> Private:
    """What a router says to an instance; nothing from anybody else."""
    if not caller.is_trusted or bytes(body.baton) == b"null":
        return Private()
    try:
        return msgspec.json.decode(body.baton, type=Private)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Problem(400, f"baton: {error}; see docs/http.md", param="baton") from None


def _check_room(body: Body, caller: Caller) -> None:
    for name in ("bootstrap_room", "bootstrap_host", "bootstrap_port"):
        if getattr(body, name) is not None and not caller.is_trusted:
            raise Problem(
                403,
                f"{name} is honoured from this machine or with the router's key alone; leave it out",
                param=name,
                code="room_not_allowed",
            )


def _check_model(body: Body, served: str) -> None:
    wanted = body.model if isinstance(body, Extended) else None
    if wanted is None or wanted in (served, served.rstrip("/").rpartition("/")[2]):
        return
    if wanted.startswith(f"{served}:"):
        raise refused("model", wanted, f"adapters are not served; use {served!a}", code="unsupported")
    text = f"the model {wanted[:80]!a} is not served here; use {served!a}"
    raise Problem(404, text, param="model", code="model_not_found")


def _check_stops(params: SamplingParams, model: Model) -> None:
    if params.stop and model.tokenizer is None:
        raise refused("stop", params.stop, "the model has no tokenizer; use stop_token_ids")


def _check(params: SamplingParams, model: Model) -> None:
    try:
        check_params(msgspec.structs.replace(params, max_tokens=params.max_tokens or 2**31), model.vocab_size)
    except ConfigError as error:
        match = _FIELD.match(str(error))
        param = _NAMES.get(match[1], match[1]) if match else None
        raise Problem(400, str(error), param=param) from None


@dataclass(frozen=True, slots=True)
class _Wanted:
    body: Body
    params: SamplingParams
    prompts: Sequence[Ids]
    resume: Sequence[Resumed]


def _jobs(wanted: _Wanted, hands: Sequence[Any], model: Model) -> tuple[Job, ...]:
    salt, params = wanted.body.cache_salt or "", wanted.params
    found = []
    if wanted.resume:
        alone = msgspec.structs.replace(params, n=1)
        for each, hand in zip(wanted.resume, hands, strict=True):
            place, index = divmod(each.index, params.n)
            if not 0 <= place < len(wanted.prompts):
                raise refused("baton.resume", each.index, "there is no such choice")
            generated = model.check_ids(each.tokens, "baton.resume")
            request = EngineRequest(
                wanted.prompts[place], alone, hand, salt, generated=generated, index=index
            )
            found.append(Job(_fitted(request, wanted.body, model), place))
    else:
        for place, (prompt, hand) in enumerate(zip(wanted.prompts, hands, strict=True)):
            request = EngineRequest(prompt, params, hand, salt)
            found.append(Job(_fitted(request, wanted.body, model), place))
    return tuple(found)


def _fitted(request: EngineRequest, body: Body, model: Model) -> EngineRequest:
    """With as many tokens as were asked for, or as there is room for where none were."""
    num_prompt, num_known, params = len(request.tokens), len(request.known), request.params
    param, limit = _WHERE[type(body)], model.context_max
    if num_prompt < 1 or num_known >= limit:
        text = f"{param} has {num_prompt} tokens; the context has {limit}, one of them for the answer: "
        raise Problem(400, f"{text}send 1 to {limit - 1}", param=param, code=TOO_LONG)
    most = limit if isinstance(request.handoff, OutboundHandoff) else model.room_for(num_known)
    num_left = max(0, most - num_prompt)
    if params.max_tokens > num_left and not isinstance(request.handoff, OutboundHandoff):
        text = (
            f"{param} has {num_prompt} tokens and max_tokens is {params.max_tokens}; together at most {most} "
        )
        raise Problem(400, f"{text}fit: ask for at most {num_left}", param="max_tokens", code=TOO_LONG)
    if params.max_tokens:
        return request
    num_tokens = max(1, min(num_left, TOKENS_DEFAULT.get(type(body), num_left)))
    if params.min_tokens > num_tokens:
        raise refused("min_tokens", params.min_tokens, f"answers end after {num_tokens}; set max_tokens too")
    return replace(request, params=msgspec.structs.replace(params, max_tokens=num_tokens))


def _hands(body: Body, place: Place, num_jobs: int, n: int) -> list[InboundHandoff | OutboundHandoff | None]:
    """By job: where its prompt's cache comes from or goes to; None: nowhere, it is answered here."""
    if body.bootstrap_room is None:
        return [None] * num_jobs
    rooms = _by_job(body.bootstrap_room, "bootstrap_room", num_jobs, n)
    if place.role == "prefill":
        return [OutboundHandoff(str(room)) for room in rooms]
    hosts = _by_job(body.bootstrap_host, "bootstrap_host", num_jobs, n)
    ports = _by_job(body.bootstrap_port, "bootstrap_port", num_jobs, n)
    found: list[InboundHandoff | OutboundHandoff | None] = []
    for room, host, port in zip(rooms, hosts, ports, strict=True):
        if host is None or port is None or not host or len(host) > 255:
            absent = "bootstrap_port" if port is None else "bootstrap_host"
            raise refused(absent, port if port is None else host, "say where the prefill coordinator is")
        source = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        if place.role == "both" and source == place.address:
            found.append(OutboundHandoff(str(room)))
        else:
            found.append(InboundHandoff(str(room), source, is_early=place.first_token == "prefill"))
    return found


def _by_job(value: Any, param: str, num_jobs: int, n: int) -> list[Any]:
    found = value if isinstance(value, list) else [value] * (1 if param == "bootstrap_room" else num_jobs)
    # Some routers count answers, not prompts: one in n is taken, on both legs the same one.
    if len(found) == num_jobs * n:
        found = found[::n]
    if len(found) != num_jobs:
        raise refused(param, value, f"give a list of {num_jobs}, one per prompt")
    return found
