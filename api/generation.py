"""The endpoints that answer with the text itself, or with its tokens as they come."""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from api.caller import caller_of
from api.errors import ClientLeft, error_of_job, job_headers, naming_job, root_path
from api.events import Cursor
from api.feed import Feed
from api.header_docs import IDEMPOTENCY_KEY
from api.intake import Draft, Idempotency, Ticket
from api.schemas import (
    BasicGenerate,
    ErrorAnswer,
    Generate,
    GeneratedText,
    GeneratedTexts,
    GenerateStream,
    GenerateVllm,
)
from api.service import Service, service_of
from api.waiting import wait_for_end
from tasks import keys
from tasks.codes import CarpoolError
from tasks.job_request import Prompt
from tasks.registry import ModelInfo

_log = structlog.get_logger("carpool.api")
#: Every error has the same shape; without this FastAPI would document another one for 422.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in (
        (400, "The request cannot be read, or is longer than the model's context."),
        (401, "An API key is needed, or this one is good no more."),
        (403, "The API key may not ask for this priority."),
        (404, "There is no such model, or not for this API key."),
        (409, "The job was cancelled, or the Idempotency-Key was used with another body."),
        (413, "The body is larger than CARPOOL_MAX_BODY_BYTES."),
        (415, "The body is not JSON."),
        (422, "A field has a value that is not possible, or is not supported."),
        (429, "The API key has used up its minute, or more of its jobs or tokens wait or run than may."),
        (500, "The job failed."),
        (503, "Redis or a worker is away, or Redis or the queue is full."),
        (504, "The job goes on and the wait was too long, or its deadline passed."),
    )
}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}, "description": "Events"}}

router = APIRouter(tags=["generate"], responses=ERRORS)


async def idempotency_of(request: Request) -> Idempotency | None:
    """The request's Idempotency-Key, if it has one."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    body = await request.json()
    path = str(request.scope["path"]).removeprefix(root_path(request))
    return Idempotency.of(caller_of(request).owner, request.method, path, key, body)


@router.post("/basic_generate", response_model=GeneratedText, openapi_extra=IDEMPOTENCY_KEY)
async def basic_generate(body: BasicGenerate, request: Request) -> Response:
    """Complete one prompt and answer with prompt and completion: 50 new tokens, greedy, unless you say otherwise."""
    service, caller = service_of(request), caller_of(request)
    draft = Draft(
        body, body.default_max_tokens, [body.prompt], idempotency=await idempotency_of(request), caller=caller
    )
    view = await run(service, request, draft, *await service.models.choose(body.model, caller))
    return _json({"generated_text": body.prompt + view["text"]}, view, request)


@router.post("/generate", response_model=GeneratedTexts, openapi_extra=IDEMPOTENCY_KEY)
async def generate(body: Generate, request: Request) -> Response:
    """Complete several prompts, which ride side by side, and answer in order with prompts and completions."""
    service = service_of(request)
    target = await service.models.choose(body.model, caller_of(request))
    view = await _run_group(service, request, body, body.prompts, target)
    texts = [prompt + text for prompt, text in zip(body.prompts, view["texts"], strict=True)]
    return _json({"generated_texts": texts}, view, request)


@router.post("/generate_vllm", response_model=GeneratedTexts, openapi_extra=IDEMPOTENCY_KEY)
async def generate_vllm(body: GenerateVllm, request: Request) -> Response:
    """Complete several prompts on a worker with the vLLM engine, and answer with the completions alone."""
    if not body.prompts:
        return JSONResponse({"generated_texts": []})
    service = service_of(request)
    target = await service.models.choose_vllm(body.model, caller_of(request))
    view = await _run_group(service, request, body, body.prompts, target)
    return _json({"generated_texts": view["texts"]}, view, request)


@router.post("/generate_stream", response_class=Response, responses=EVENTS, openapi_extra=IDEMPOTENCY_KEY)
async def generate_stream(body: GenerateStream, request: Request) -> Response:
    """Complete one prompt, token by token: `data: {"token", "sequence_id", "n"}`.

    The last event adds `finish_reason`, `usage`, `status` and `error`; its token is the rest of the text and may be
    empty. A stream that was cut is taken up again at `/jobs/{sequence_id}/stream`.
    """
    service, caller = service_of(request), caller_of(request)
    service.check_streams()
    draft = Draft(
        body, body.default_max_tokens, [body.prompt], idempotency=await idempotency_of(request), caller=caller
    )
    target = await service.models.choose(body.model, caller)
    ticket, feed = await service.intake.accept_and_follow(draft, *target, ends_only=False)
    return service.open_stream(
        feed,
        [Cursor()],
        job_headers(ticket.id, root_path(request)),
        caller,
        cancel_abandoned="" if draft.idempotency else ticket.id,
    )


async def _run_group(
    service: Service,
    request: Request,
    body: Generate | GenerateVllm,
    prompts: list[Prompt],
    target: tuple[str, ModelInfo | None],
) -> dict[str, Any]:
    most = service.settings.max_prompts
    if len(prompts) > most:
        raise CarpoolError(
            "invalid_request",
            f"prompts: at most {most} are possible in one request, but it has {len(prompts)}",
            param="prompts",
        )
    draft = Draft(
        body,
        body.default_max_tokens,
        prompts,
        is_group=True,
        idempotency=await idempotency_of(request),
        caller=caller_of(request),
    )
    return await run(service, request, draft, *target)


async def run(
    service: Service,
    request: Request,
    draft: Draft,
    alias: str,
    model: ModelInfo | None,
) -> dict[str, Any]:
    """Accept a job, or a group, and wait for it.

    Raises:
        CarpoolError: it did not succeed, or not in time.
        ClientLeft: so did the client, and without an Idempotency-Key its job is cancelled.
    """
    ticket, feed = await service.intake.accept_and_follow(draft, alias, model, ends_only=True)
    with naming_job(ticket.id):
        return await _wait_for(service, request, draft, ticket, feed)


async def _wait_for(service: Service, request: Request, draft: Draft, ticket: Ticket, feed: Feed) -> dict[str, Any]:
    wait_s = service.settings.sync_wait_s
    try:
        with feed:
            view = await wait_for_end(service, request, feed, wait_s)
    except ClientLeft:
        if draft.idempotency is None and not service.stopping.is_set():
            service.in_background(service.cancel_abandoned(ticket.id))
        raise
    if view is None:
        why = "this server is stopping" if service.stopping.is_set() else f"{wait_s:g} s are over (CARPOOL_SYNC_WAIT_S)"
        raise CarpoolError(
            "wait_exceeded", f"{why}, and job {ticket.id} goes on: GET /jobs/{ticket.id}", job_id=ticket.id
        )
    if view["status"] != "succeeded":
        param = await _culprit(service, ticket.id, draft.copies) if draft.is_group else None
        raise error_of_job(ticket.id, view["status"], view["error"], param)
    return view


async def _culprit(service: Service, id: str, copies: int) -> str | None:
    """Which prompt of a group it was that did not succeed; None also where Redis cannot tell now."""
    try:
        child = await service.client.hget(keys.group(id), "culprit")
    except RedisError as error:
        # the end itself is known: an error of Redis in its place would have the client ask for everything once more
        _log.warning("culprit_not_read", job_id=id, error=str(error))
        return None
    return f"prompts[{int(str(child).rpartition('.')[2]) // copies}]" if child else None


def _json(body: dict[str, Any], view: dict[str, Any], request: Request) -> JSONResponse:
    return JSONResponse(body, headers=job_headers(view["id"], root_path(request)))
