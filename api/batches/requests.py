"""The endpoints of batches: from a line's body to a draft of its job, and from the ended job to the answer."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import ValidationError

from api.caller import Caller
from api.errors import of_validation
from api.events import as_json
from api.intake import Draft
from api.openai import chat, completions, response_object, responses
from api.openai.requests import ChatRequest, CompletionRequest, OpenAIRequest
from api.openai.response_requests import ResponseRequest
from api.openai.serving import check_number, read_answer
from api.service import Service
from tasks.codes import CarpoolError
from tasks.priority import LOW


@dataclass(frozen=True, slots=True)
class LineDraft:
    """What a line asks for.

    Attributes:
        prompt_field, tokens_field: how the endpoint names what is generated from, and how much of it.
    """

    draft: Draft
    prompt_field: str
    tokens_field: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint.

    Attributes:
        job_prefix: what the ids of its jobs begin with, as for requests that are no part of a batch.
        answer: the body of the answer, made of the object of the ended job and of what was kept of the request.
    """

    body: type[OpenAIRequest]
    job_prefix: str
    draft: Callable[[Service, Any, Caller], Awaitable[tuple[LineDraft, dict[str, Any]]]]
    answer: Callable[[Service, Mapping[str, Any], Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


async def draft_line(
    service: Service, endpoint: Endpoint, batch: str, custom_id: str, body: dict[str, Any], caller: Caller
) -> LineDraft:
    """The job or group that a line asks for, on behalf of whom the batch belongs to.

    Raises:
        CarpoolError: it is not possible; the same as for a request that is no part of a batch.
    """
    if body.get("webhook_url") is not None:
        raise CarpoolError(
            "unsupported_field",
            "webhook_url: the answers of a batch come in its output. Leave it out",
            param="webhook_url",
        )
    try:
        request = endpoint.body.model_validate(body)
        _check_is_for_batches(request)
        line, kept = await endpoint.draft(service, request, caller)
    except ValidationError as error:
        raw = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        raise of_validation(raw, sorted(endpoint.body.model_fields), body) from None
    check_number(service, line.draft, "n", stream=False)
    recorded = {**json.loads(line.draft.request), "custom_id": custom_id, "answer": kept}
    draft = replace(line.draft, request=as_json(recorded), default_priority=LOW, batch=batch)
    return replace(line, draft=draft)


def _check_is_for_batches(request: OpenAIRequest) -> None:
    for name in ("stream", "background"):
        if getattr(request, name, False):
            raise CarpoolError(
                "unsupported_field", f"{name}: the answers of a batch come in its output. Leave it out", param=name
            )


async def _chat_draft(service: Service, body: ChatRequest, caller: Caller) -> tuple[LineDraft, dict[str, Any]]:
    draft = chat.chat_draft(service, body, caller)
    kept = {"offers_tools": draft.options.offers_tools, "logprobs": draft.options.logprobs is not None}
    return LineDraft(draft, "messages", body.tokens_field), kept


async def _chat_answer(service: Service, view: Mapping[str, Any], kept: Mapping[str, Any]) -> Mapping[str, Any]:
    head, ended = await read_answer(service, view, with_logprobs=kept["logprobs"])
    return chat.chat_body(head, ended, kept["offers_tools"], kept["logprobs"])


async def _completion_draft(
    service: Service, body: CompletionRequest, caller: Caller
) -> tuple[LineDraft, dict[str, Any]]:
    kept = {"copies": body.n, "echo": body.prompts if body.echo else [], "logprobs": body.logprobs is not None}
    return LineDraft(completions.completion_draft(body, caller), "prompt", "max_tokens"), kept


async def _completion_answer(service: Service, view: Mapping[str, Any], kept: Mapping[str, Any]) -> Mapping[str, Any]:
    head, ended = await read_answer(service, view, with_logprobs=kept["logprobs"])
    echo = [prompt for prompt in kept["echo"] for _ in range(kept["copies"])]
    return completions.completion_body(head, ended, kept["copies"], echo, kept["logprobs"])


async def _response_draft(service: Service, body: ResponseRequest, caller: Caller) -> tuple[LineDraft, dict[str, Any]]:
    return LineDraft(await responses.response_draft(service, body, caller), "input", "max_output_tokens"), {}


async def _response_answer(service: Service, view: Mapping[str, Any], kept: Mapping[str, Any]) -> Mapping[str, Any]:
    return (await response_object.load(service, view["id"], "")).object()


ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    chat.PATH: Endpoint(ChatRequest, chat.PREFIX, _chat_draft, _chat_answer),
    completions.PATH: Endpoint(CompletionRequest, completions.PREFIX, _completion_draft, _completion_answer),
    response_object.PATH: Endpoint(ResponseRequest, response_object.PREFIX, _response_draft, _response_answer),
}
