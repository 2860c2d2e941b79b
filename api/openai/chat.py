"""`POST /v1/chat/completions`: conversations to go on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.generation import idempotency_of
from api.intake import Draft
from api.logprobs import chat_logprobs
from api.openai.answers import ERRORS, EVENTS, ChatCompletion
from api.openai.chunks import ChatChunks, sum_usage
from api.openai.errors import naming
from api.openai.message import MessageFold
from api.openai.requests import ChatRequest
from api.openai.serving import Ended, Head, answer_with, check_number, recorded, stream_with
from api.service import service_of
from tasks.job_request import JobOptions

_PATH: Final = "/v1/chat/completions"

router = APIRouter(tags=["openai"], responses=ERRORS)


@router.post(_PATH, response_model=ChatCompletion, responses={200: {"content": EVENTS}})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Go on with a conversation: as many tokens as the context and CARPOOL_MAX_TOKENS leave, at temperature 1.

    With `stream` the answer is a stream of chunks, `data: [DONE]` at its end.
    """
    service = service_of(request)
    options = body.chat_options()
    draft = Draft(
        options,
        service.settings.max_tokens,
        messages=body.messages,
        copies=body.n,
        is_group=body.n > 1,
        idempotency=await idempotency_of(request),
        id_prefix="chatcmpl-",
        request=recorded(_PATH, body.store),
    )
    check_number(service, draft, "n", stream=body.stream)
    target = await service.models.choose(body.model)
    with naming("messages", body.tokens_field):
        if not body.stream:
            return await answer_with(service, request, draft, target, lambda head, ended: _body(head, ended, options))
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


def _body(head: Head, ended: Sequence[Ended], options: JobOptions) -> Mapping[str, Any]:
    choices = []
    for index, one in enumerate(ended):
        fold = MessageFold(one.id, options.offers_tools)
        fold.feed(one.text)
        fold.finish()
        choices.append(
            {
                "index": index,
                "message": fold.body(),
                "logprobs": None if options.logprobs is None else chat_logprobs(one.lp),
                "finish_reason": fold.finish_reason(one.finish_reason),
            }
        )
    return {
        **head.body("chat.completion"),
        "choices": choices,
        "usage": sum_usage([one.usage for one in ended], len(ended)),
    }
