"""Jobs: submit one, ask for it, wait for it, follow it, cancel it, delete it."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Final, Literal

import structlog
from fastapi import APIRouter, Query, Request
from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from api.caller import Caller, caller_of
from api.errors import job_headers, root_path
from api.events import MAX_STREAM_CHILDREN, as_json, parse_cursor
from api.generation import ERRORS, EVENTS, idempotency_of
from api.header_docs import IDEMPOTENCY_KEY, LAST_EVENT_ID
from api.intake import Draft, Ticket
from api.schemas import ErrorAnswer, JobPage, JobView, SubmitJob
from api.service import Service, job_not_found, service_of
from api.timeline import timeline_of
from api.waiting import has_ended, wait_for_end
from tasks import keys
from tasks.calls import Call
from tasks.codes import CarpoolError

_log = structlog.get_logger("carpool.api")
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
_NOT_FOUND: Final[dict[int | str, dict[str, Any]]] = {
    404: {"model": ErrorAnswer, "description": "There is no such job."}
}

router = APIRouter(prefix="/jobs", tags=["jobs"], responses={**ERRORS, **_NOT_FOUND})


@router.post("", status_code=202, response_model=JobView, openapi_extra=IDEMPOTENCY_KEY)
async def submit(body: SubmitJob, request: Request) -> Response:
    """Submit a job and go away: 256 tokens at temperature 1, unless you say otherwise.

    With an `Idempotency-Key`, the same request sent again answers with the same job.
    """
    service, caller = service_of(request), caller_of(request)
    draft = Draft(
        body,
        body.default_max_tokens,
        [] if body.prompt is None else [body.prompt],
        messages=body.messages,
        idempotency=await idempotency_of(request),
        webhook=service.webhooks.check(body.webhook_url),
        caller=caller,
    )
    alias, model = await service.models.choose(body.model, caller)
    ticket = await service.intake.accept(draft, alias, model)
    view = await _view_of_accepted(service, ticket, alias)
    if ticket.durable is not None:
        view["durable"] = ticket.durable
    root = root_path(request)
    return JSONResponse(_rooted(view, root), 202, job_headers(ticket.id, root))


@router.get("", response_model=JobPage)
async def list_jobs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100, description="Most jobs of a page.")] = 100,
    cursor: Annotated[str, Query(pattern=r"^[0-9]{0,20}$", description="`next_cursor` of the page before.")] = "",
) -> Response:
    """List jobs, newest first."""
    service = service_of(request)
    views, after = await service.ledger.run(service.calls.list(caller_of(request).owner, cursor, limit))
    data = [_rooted(view, root_path(request)) for view in views]
    return JSONResponse({"object": "list", "data": data, "next_cursor": after or None})


@router.get("/{id}", response_model=JobView)
async def get_job(
    id: str,
    request: Request,
    wait: Annotated[float, Query(ge=0, allow_inf_nan=False, description="Seconds to wait for the end.")] = 0,
    include: Annotated[Literal["", "events"], Query(description="`events`: what happened to it, too.")] = "",
) -> Response:
    """Ask for a job; with `wait`, the answer comes when it has ended, or when the time is over."""
    service, caller = service_of(request), caller_of(request)
    _check_id(id)
    most = service.settings.max_wait_s
    if wait > most:
        raise CarpoolError(
            "invalid_request", f"wait: at most {most:g} seconds are possible, but it is {wait:g}", param="wait"
        )
    text = await _view_text(service, id, caller)
    if wait and not has_ended(json.loads(text)):
        text = await _wait_for_end(service, request, id, wait)
    root = root_path(request)
    if include:
        view = json.loads(text)
        return Response(
            as_json(_rooted({**view, **await timeline_of(service, view, caller)}, root)), media_type="application/json"
        )
    return Response(as_json(_rooted(json.loads(text), root)) if root else text, media_type="application/json")


@router.post(
    "/{id}/cancel", response_model=JobView, responses={202: {"model": JobView, "description": "It will stop."}}
)
async def cancel_job(id: str, request: Request) -> Response:
    """Cancel a job or a group: 200 where it has ended, 202 where its worker was told to stop."""
    service, owner = service_of(request), caller_of(request).owner
    _check_id(id)
    verdict = await service.ledger.run(service.calls.cancel(id, owner))
    if verdict == "gone":
        raise job_not_found(id)
    view = await service.view(id, owner)
    return JSONResponse(_rooted(view, root_path(request)), 200 if has_ended(view) else 202)


@router.delete("/{id}", status_code=204, response_class=Response)
async def delete_job(id: str, request: Request) -> Response:
    """Delete an ended job or group with everything that is kept of it."""
    service = service_of(request)
    _check_id(id)
    verdict = await service.ledger.run(service.calls.forget(id, caller_of(request).owner))
    if verdict == "gone":
        raise job_not_found(id)
    if verdict == "riding":
        raise CarpoolError(
            "job_not_ended", f"job {id} has not ended. Cancel it first: POST /jobs/{id}/cancel", job_id=id
        )
    if verdict == "open":
        raise CarpoolError(
            "job_not_ended",
            f"job {id} has ended, and its batch's output has yet to take its answer. Try again",
            job_id=id,
        )
    if verdict == "child":
        group = id.rpartition(".")[0]
        raise CarpoolError("invalid_request", f"job {id} is a part of {group}: DELETE /jobs/{group}", job_id=id)
    return Response(status_code=204)


@router.get(
    "/{id}/stream",
    response_class=Response,
    responses={**EVENTS, 204: {"description": "Nothing is left."}},
    openapi_extra=LAST_EVENT_ID,
)
async def stream_job(
    id: str,
    request: Request,
    starting_after: Annotated[str, Query(max_length=512, description="Id of the last event that you have.")] = "",
) -> Response:
    """Follow a job from its first token, or from where a stream was cut: `data: {"token", "n", "sequence_id"}`.

    `Last-Event-ID` wins over `starting_after`. A group of up to 16 is followed as one, its event ids joined by commas.
    """
    service, caller = service_of(request), caller_of(request)
    _check_id(id)
    ids = await _sequences(service, id, caller)
    # a browser that reconnects sends the header and repeats the URL: the header is the newer of the two
    cursors = parse_cursor(request.headers.get("last-event-id") or starting_after, len(ids))
    if all(cursor.ended for cursor in cursors):
        return Response(status_code=204)
    service.check_streams()
    member, feed = await service.attach_and_follow(id, ids)
    return service.open_stream(feed, cursors, {}, caller, member=member)


async def _sequences(service: Service, id: str, caller: Caller) -> list[str]:
    """The job, or the children of a group. Raises CarpoolError where there is none, or there are too many."""
    state = (await service.look([id]))[0]
    async with service.client.pipeline(transaction=False) as pipeline:
        pipeline.hget(keys.record(id), "key")
        pipeline.hmget(keys.group(id), ["n", "key"])
        own, (num_children, of_group) = await pipeline.execute()
    if state is None or (own or of_group or keys.NO_KEY) != caller.owner:
        raise job_not_found(id)
    if num_children is None:
        return [id]
    if int(num_children) > MAX_STREAM_CHILDREN:
        raise CarpoolError(
            "group_too_large",
            f"job {id} has {int(num_children)} children, and at most {MAX_STREAM_CHILDREN} are followed as one. Follow "
            f"them one by one: /jobs/{id}.0/stream and so on",
            job_id=id,
        )
    return [f"{id}.{index}" for index in range(int(num_children))]


async def _wait_for_end(service: Service, request: Request, id: str, wait_s: float) -> str:
    member = await service.attachments.attach(id)
    try:
        with await service.relay.follow([id], ends_only=True) as feed:
            view = await wait_for_end(service, request, feed, wait_s)
    finally:
        service.in_background(service.attachments.detach(member))
    return as_json(view) if view is not None else await _view_text(service, id, caller_of(request))


async def _view_text(service: Service, id: str, caller: Caller) -> str:
    """A job's object as the JSON that the ledger gives, which a poll passes on as it is."""
    parsed = service.calls.view([id], caller.owner)
    text = await service.ledger.run(Call(parsed.script, parsed.keys, parsed.args, lambda answer: str(answer[0])))
    if not text:
        raise job_not_found(id)
    return text


async def _view_of_accepted(service: Service, ticket: Ticket, alias: str) -> dict[str, Any]:
    """The object of a job that was just accepted; the job stands also where it cannot be read now."""
    try:
        return await service.view(ticket.id)
    except RedisError as error:
        _log.warning("accepted_and_not_read", job_id=ticket.id, error=str(error))
        return {
            "id": ticket.id,
            "object": "job",
            "status": "queued",
            "model": alias,
            "urls": {"self": f"/jobs/{ticket.id}"},
        }


def _check_id(id: str) -> None:
    if not _ID.fullmatch(id):
        raise job_not_found(id)


def _rooted(view: dict[str, Any], root: str) -> dict[str, Any]:
    """The object with its URLs under the path that a proxy serves this API at."""
    if root:
        view["urls"] = {name: f"{root}{url}" for name, url in view["urls"].items()}
    return view
