"""`/v1/responses`: answers that can be asked for again, followed, cancelled and gone on with by their ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from api.caller import Caller, caller_of
from api.errors import job_headers, naming_job, root_path
from api.events import Cursor
from api.generation import idempotency_of, run
from api.header_docs import IDEMPOTENCY_KEY
from api.intake import Draft, Idempotency
from api.openai.answers import ERRORS, EVENTS, DeletedResponse, ResponseObject
from api.openai.errors import naming
from api.openai.response_events import ResponseEvents
from api.openai.response_object import PATH, PREFIX, Stored, kept_request, load
from api.openai.response_requests import ResponseRequest
from api.service import Service, service_of
from api.waiting import wait_for_end
from tasks.chat import Message
from tasks.codes import CarpoolError

#: After a cancel, so long is waited for the worker to let go; it needs two steps and a slice of a prefill.
_CANCEL_WAIT_S: Final = 5.0

router = APIRouter(prefix=PATH, tags=["openai"], responses=ERRORS)


@router.post("", response_model=ResponseObject, responses={200: {"content": EVENTS}}, openapi_extra=IDEMPOTENCY_KEY)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Answer a conversation: as many tokens as the context and CARPOOL_MAX_TOKENS leave, at temperature 1.

    With `background` the answer comes at once and tells how to ask for it; with `stream` it is a stream of events.
    """
    service, caller = service_of(request), caller_of(request)
    if body.stream:
        service.check_streams()
    draft = await response_draft(service, body, caller, await idempotency_of(request))
    target = await service.models.choose(body.model, caller)
    with naming("input", "max_output_tokens"):
        if body.stream:
            ticket, feed = await service.intake.accept_and_follow(draft, *target, ends_only=False)
            id = ticket.id
            try:
                with naming_job(id):
                    stored = await load(service, id, caller.owner)
            except BaseException:
                feed.close()
                raise
            abandoned = "" if draft.idempotency or body.background else id
            return service.open_stream(
                feed,
                [Cursor()],
                job_headers(id, root_path(request)),
                caller,
                renderer=ResponseEvents(stored),
                cancel_abandoned=abandoned,
            )
        if body.background:
            id = (await service.intake.accept(draft, *target)).id
        else:
            id = (await run(service, request, draft, *target))["id"]
        with naming_job(id):
            return _answer(await load(service, id, caller.owner), request)


@router.get("/{id}", response_model=ResponseObject, responses={200: {"content": EVENTS}})
async def get_response(
    id: str,
    request: Request,
    stream: Annotated[bool, Query(description="Follow it, from its first event on.")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, le=2**53, description="With `stream`: number of the last event that you have.")
    ] = None,
    include_obfuscation: Annotated[bool, Query(description="Only false is possible.")] = False,
) -> Response:
    """Ask for a response, or follow it: also after its end, for as long as it is kept. `Last-Event-ID` works too."""
    service, caller = service_of(request), caller_of(request)
    if include_obfuscation:
        raise CarpoolError(
            "unsupported_field", "include_obfuscation is not supported. Leave it out", param="include_obfuscation"
        )
    stored = await load(service, id, caller.owner)
    if not stream:
        if starting_after is not None:
            raise CarpoolError(
                "invalid_request", "starting_after is for streams: set stream to true", param="starting_after"
            )
        return _answer(stored, request)
    after = _last_event_id(request.headers.get("last-event-id", ""))
    if after is None:
        after = -1 if starting_after is None else starting_after
    service.check_streams()
    member, feed = await service.attach_and_follow(id, [id])
    return service.open_stream(
        feed,
        [Cursor()],
        job_headers(id, root_path(request)),
        caller,
        renderer=ResponseEvents(stored, after),
        member=member,
        resumes=after >= 0,
    )


@router.post("/{id}/cancel", response_model=ResponseObject)
async def cancel_response(id: str, request: Request) -> Response:
    """Cancel a response, in the background or not; one that has ended is answered as it is."""
    service, owner = service_of(request), caller_of(request).owner
    stored = await load(service, id, owner)
    verdict = await service.ledger.run(service.calls.cancel(id, owner))
    if verdict == "requested":
        with await service.relay.follow([id], ends_only=True) as feed:
            view = await wait_for_end(service, request, feed, _CANCEL_WAIT_S)
    else:
        view = None
    return _answer(replace(stored, view=view or await service.view(id)), request)


@router.delete("/{id}", response_model=DeletedResponse)
async def delete_response(id: str, request: Request) -> Response:
    """Forget a response that has ended. Turns that follow it keep what they know of it."""
    service, owner = service_of(request), caller_of(request).owner
    await load(service, id, owner)
    if await service.ledger.run(service.calls.forget(id, owner)) in ("riding", "open"):
        raise CarpoolError(
            "job_not_ended", f"response {id} has not ended. Cancel it first: POST {PATH}/{id}/cancel", job_id=id
        )
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def response_draft(
    service: Service, body: ResponseRequest, caller: Caller, idempotency: Idempotency | None = None
) -> Draft:
    """The job that a request asks for. Raises CarpoolError where it follows a response that cannot be gone on with."""
    earlier = await _earlier_turns(service, body.previous_response_id, caller.owner)
    instructions = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    return Draft(
        body.response_options(),
        service.settings.max_tokens,
        messages=[*instructions, *earlier, *body.turns()],
        idempotency=idempotency,
        id_prefix=PREFIX,
        request=kept_request(body.echo(), body.store),
        webhook=service.webhooks.check(body.webhook_url),
        caller=caller,
    )


async def _earlier_turns(service: Service, id: str | None, owner: str) -> list[Message]:
    """The conversation that is gone on with, its last answer included, its instructions not."""
    if id is None:
        return []
    try:
        stored = await load(service, id, owner)
    except CarpoolError as error:
        error.param = "previous_response_id"
        raise
    if stored.view["status"] != "succeeded":
        raise CarpoolError(
            "invalid_request",
            f"previous_response_id: response {id} is {stored.object()['status']}, and only one that was answered can "
            "be gone on with. Wait for its end",
            param="previous_response_id",
        )
    return stored.answered()


def _answer(stored: Stored, request: Request) -> Response:
    body: dict[str, Any] = stored.object()
    return JSONResponse(body, headers=job_headers(body["id"], root_path(request)))


def _last_event_id(text: str) -> int | None:
    """Raises CarpoolError "bad_cursor"."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 16):
        raise CarpoolError(
            "bad_cursor",
            f"{text[:80]!r} is no cursor of this stream: it is the sequence_number of the last event that you have",
            param="Last-Event-ID",
        )
    return int(text)
