"""`POST /v1/chat/completions`: conversations to go on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.caller import Caller, caller_of
from api.generation import idempotency_of
from api.header_docs import IDEMPOTENCY_KEY
from api.intake import Draft, Idempotency
from api.logprobs import chat_logprobs
from api.openai.answers import ERRORS, EVENTS, ChatCompletion
from api.openai.chunks import ChatChunks, sum_usage
from api.openai.errors import naming
from api.openai.message import MessageFold
from api.openai.requests import ChatRequest
from api.openai.serving import Ended, Head, answer_with, check_number, recorded, stream_with
from api.service import Service, service_of

PATH: Final = "/v1/chat/completions"
PREFIX: Final = "chatcmpl-"

router = APIRouter(tags=["openai"], responses=ERRORS)


@router.post(PATH, response_model=ChatCompletion, responses={200: {"content": EVENTS}}, openapi_extra=IDEMPOTENCY_KEY)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Go on with a conversation: as many tokens as the context and CARPOOL_MAX_TOKENS leave, at temperature 1.

    With `stream` the answer is a stream of chunks, `data: [DONE]` at its end.
    """
    service, caller = service_of(request), caller_of(request)
    draft = chat_draft(service, body, caller, await idempotency_of(request))
    options = draft.options
    check_number(service, draft, "n", stream=body.stream)
    target = await service.models.choose(body.model, caller)
    with naming("messages", body.tokens_field):
        if not body.stream:
            return await answer_with(
                service,
                request,
                draft,
                target,
                lambda head, ended: chat_body(head, ended, options.offers_tools, options.logprobs is not None),
            )
        return await stream_with(
            service,
            request,
            draft,
            target,
            lambda head: ChatChunks(
                head.ids,
                head.body("chat.completion.chunk"),
                body.n,
                body.include_usage,
                uses_tools=options.offers_tools,
                logprobs=options.logprobs is not None,
            ),
        )


def chat_draft(service: Service, body: ChatRequest, caller: Caller, idempotency: Idempotency | None = None) -> Draft:
    """The job or group that a request asks for."""
    return Draft(
        body.chat_options(),
        service.settings.max_tokens,
        messages=body.messages,
        copies=body.n,
        is_group=body.n > 1,
        idempotency=idempotency,
        id_prefix=PREFIX,
        request=recorded(PATH, body.store),
        caller=caller,
    )


def chat_body(head: Head, ended: Sequence[Ended], offers_tools: bool, logprobs: bool) -> Mapping[str, Any]:
    """The answer, made of the sequences that have ended."""
    choices = []
    for index, one in enumerate(ended):
        fold = MessageFold(one.id, offers_tools)
        fold.feed(one.text)
        fold.finish()
        choices.append(
            {
                "index": index,
                "message": fold.body(),
                "logprobs": chat_logprobs(one.lp) if logprobs else None,
                "finish_reason": fold.finish_reason(one.finish_reason),
            }
        )
    return {
        **head.body("chat.completion"),
        "choices": choices,
        "usage": sum_usage([one.usage for one in ended], len(ended)),
    }
