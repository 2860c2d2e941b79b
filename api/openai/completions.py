"""`POST /v1/completions`: texts to go on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.caller import Caller, caller_of
from api.generation import idempotency_of
from api.header_docs import IDEMPOTENCY_KEY
from api.intake import Draft, Idempotency
from api.logprobs import LegacyLogprobs
from api.openai.answers import ERRORS, EVENTS, Completion
from api.openai.chunks import CompletionChunks, sum_usage
from api.openai.errors import naming
from api.openai.requests import COMPLETION_MAX_TOKENS, CompletionRequest
from api.openai.serving import Ended, Head, answer_with, check_number, recorded, stream_with
from api.service import service_of

PATH: Final = "/v1/completions"
PREFIX: Final = "cmpl-"

router = APIRouter(tags=["openai"], responses=ERRORS)


@router.post(PATH, response_model=Completion, responses={200: {"content": EVENTS}}, openapi_extra=IDEMPOTENCY_KEY)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete a prompt, or several: 16 tokens at temperature 1, unless you say otherwise.

    With `stream` the answer is a stream of chunks, `data: [DONE]` at its end.
    """
    service, caller = service_of(request), caller_of(request)
    draft = completion_draft(body, caller, await idempotency_of(request))
    check_number(service, draft, "prompt", stream=body.stream)
    target = await service.models.choose(body.model, caller)
    echo = [prompt for prompt in body.prompts for _ in range(body.n)] if body.echo else []
    with naming("prompt"):
        if not body.stream:
            return await answer_with(
                service,
                request,
                draft,
                target,
                lambda head, ended: completion_body(head, ended, body.n, echo, body.logprobs is not None),
            )
        return await stream_with(
            service,
            request,
            draft,
            target,
            lambda head: CompletionChunks(
                head.ids,
                head.body("text_completion"),
                body.n,
                body.include_usage,
                echo=echo,
                logprobs=body.logprobs is not None,
            ),
        )


def completion_draft(body: CompletionRequest, caller: Caller, idempotency: Idempotency | None = None) -> Draft:
    """The job or group that a request asks for."""
    prompts = body.prompts
    return Draft(
        body.options(),
        COMPLETION_MAX_TOKENS,
        prompts,
        copies=body.n,
        is_group=len(prompts) * body.n > 1,
        idempotency=idempotency,
        id_prefix=PREFIX,
        request=recorded(PATH, body.store),
        caller=caller,
    )


def completion_body(
    head: Head, ended: Sequence[Ended], copies: int, echo: Sequence[str], logprobs: bool
) -> Mapping[str, Any]:
    """The answer, made of the sequences that have ended; `echo` is the prompt of each, or empty."""
    choices = [
        {
            "index": index,
            "text": (echo[index] if echo else "") + one.text,
            "logprobs": LegacyLogprobs().take(one.lp) if logprobs else None,
            "finish_reason": one.finish_reason,
        }
        for index, one in enumerate(ended)
    ]
    return {
        **head.body("text_completion"),
        "choices": choices,
        "usage": sum_usage([one.usage for one in ended], copies),
    }
