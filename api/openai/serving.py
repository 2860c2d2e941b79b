"""What the endpoints under `/v1` have in common: a draft becomes a job or a group, is waited for or streamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import Request
from redis.exceptions import RedisError
from starlette.responses import Response

from api.errors import job_headers, naming_job, root_path
from api.events import MAX_STREAM_CHILDREN, Cursor, Renderer, as_json
from api.generation import run
from api.intake import Draft
from api.service import Service
from api.stream import read_log
from tasks.codes import CarpoolError
from tasks.entries import TokenLogprob
from tasks.registry import ModelInfo

_log = structlog.get_logger("carpool.api")

Target = tuple[str, ModelInfo | None]


@dataclass(frozen=True, slots=True)
class Head:
    """What is constant over an answer.

    Attributes:
        id: of the job or group.
        ids: of its sequences, in order.
        created: seconds since 1970.
    """

    id: str
    ids: Sequence[str]
    created: int
    model: str

    def body(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True, slots=True)
class Ended:
    """One sequence that succeeded. `lp` is its logprobs, where they were asked for."""

    id: str
    text: str
    finish_reason: str
    usage: Mapping[str, Any]
    lp: Sequence[TokenLogprob]


def check_number(service: Service, draft: Draft, field: str, *, stream: bool) -> None:
    """Refuse more jobs than one request may make. Raises CarpoolError."""
    num_jobs, most = draft.num_jobs, service.settings.max_prompts
    if num_jobs > most:
        raise CarpoolError(
            "invalid_request",
            f"{field}: at most {most} answers are possible in one request, not {num_jobs}",
            param=field,
        )
    if stream and num_jobs > MAX_STREAM_CHILDREN:
        raise CarpoolError(
            "group_too_large",
            f"{num_jobs} answers in one stream, and at most {MAX_STREAM_CHILDREN} are possible. Ask for fewer, or "
            "leave stream out",
            param=field,
        )


async def answer_with(
    service: Service,
    request: Request,
    draft: Draft,
    target: Target,
    body: Callable[[Head, Sequence[Ended]], Mapping[str, Any]],
) -> Response:
    """Wait for the job or group, and answer with the body made of it."""
    view = await run(service, request, draft, *target)
    with naming_job(view["id"]):
        head, ended = await read_answer(service, view, with_logprobs=draft.options.logprobs is not None)
    return Response(
        as_json(body(head, ended)), media_type="application/json", headers=job_headers(head.id, root_path(request))
    )


async def read_answer(
    service: Service, view: Mapping[str, Any], *, with_logprobs: bool
) -> tuple[Head, Sequence[Ended]]:
    """What an answer is made of, by the object of a job or group that has succeeded."""
    ids: list[str] = view.get("children") or [view["id"]]
    views = await service.views(ids) if "children" in view else [view]
    ended = [await _ended(service, one, with_logprobs=with_logprobs) for one in views]
    return Head(view["id"], ids, int(view["created_at"]), view["model"]), ended


async def stream_with(
    service: Service, request: Request, draft: Draft, target: Target, renderer: Callable[[Head], Renderer]
) -> Response:
    """Accept the job or group, and answer with its events in the dialect of the renderer made for it."""
    service.check_streams()
    ticket, feed = await service.intake.accept_and_follow(draft, *target, ends_only=False)
    try:
        created, model = await created_of(service, ticket.id, target[0])
        head = Head(ticket.id, feed.ids, created, model)
        return service.open_stream(
            feed,
            [Cursor() for _ in feed.ids],
            job_headers(ticket.id, root_path(request)),
            draft.caller,
            renderer=renderer(head),
            cancel_abandoned="" if draft.idempotency else ticket.id,
        )
    except BaseException:
        feed.close()
        raise


async def created_of(service: Service, id: str, alias: str) -> tuple[int, str]:
    """When a job or group was made, and its model, by its record; the job stands also where that can't be read now."""
    try:
        view = await service.view(id)
    except RedisError as error:
        _log.warning("accepted_and_not_read", job_id=id, error=str(error))
        return 0, alias
    return int(view["created_at"]), view["model"]


async def _ended(service: Service, view: Mapping[str, Any], *, with_logprobs: bool) -> Ended:
    lp: list[TokenLogprob] = []
    if with_logprobs:
        async for page in read_log(service.client, view["id"], 0):
            lp.extend(item for entry in page for item in entry.lp)
    return Ended(view["id"], view["text"], view["finish_reason"], view["usage"], lp)


def recorded(endpoint: str, store: bool | None, **more: Any) -> str:
    """What a job's record keeps of its request beyond the job itself."""
    return as_json({"endpoint": endpoint, "store": store, **more})
