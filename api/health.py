"""Is this process alive, does it take jobs, does anybody run them?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from api.schemas import ErrorAnswer, Health
from api.service import Service, service_of
from tasks import keys
from tasks.codes import CarpoolError
from tasks.redis_clients import check_server, connect
from tasks.registry import WorkerInfo
from tasks.settings import Settings

_PROBE_TTL_S = 10

router = APIRouter(
    prefix="/health",
    tags=["health"],
    responses={503: {"model": ErrorAnswer, "description": "Not now: the message says why."}},
)


@router.get("/live", response_model=Health)
async def live() -> Response:
    """This process serves."""
    return JSONResponse({"status": "live"})


@router.get("/accepting", response_model=Health)
async def accepting(request: Request) -> Response:
    """This server takes jobs: Redis answers, and takes writes."""
    service = service_of(request)
    try:
        await _check_server_once(service)
        await service.client.set(keys.PROBE, "1", ex=_PROBE_TTL_S)
    except (CarpoolError, RedisError):
        if _is_told_details(request):
            raise
        raise CarpoolError(
            "redis_unavailable", "Redis is away, or takes no writes. Try again", retry_after_s=1
        ) from None
    return JSONResponse({"status": "accepting"})


@router.get("/ready", response_model=Health)
async def ready(request: Request) -> Response:
    """Jobs are run: a worker is ready. Else the message says what is waited for."""
    try:
        workers = await service_of(request).models.workers()
    except RedisError:
        if _is_told_details(request):
            raise
        raise CarpoolError("redis_unavailable", "Redis is away. Try again", retry_after_s=1) from None
    if any(worker.state == "ready" for worker in workers):
        return JSONResponse({"status": "ready"})
    waiting_for = describe_workers(workers) if _is_told_details(request) else "it is not said without an API key"
    error = CarpoolError("no_worker", f"waiting for a worker: {waiting_for}", retry_after_s=1)
    return JSONResponse(
        {"status": "waiting", "waiting_for": waiting_for, "error": error.body()}, 503, {"Retry-After": "1"}
    )


def _is_told_details(request: Request) -> bool:
    """Whether more than a status may be said: everybody may ask here, and where there are keys, most are strangers."""
    return bool(request.scope["state"]["is_told_details"])


def describe_workers(workers: Sequence[WorkerInfo]) -> str:
    """What workers that are not ready are doing, in plain words."""
    if not workers:
        return "none is up. Start one: carpool worker"
    return "; ".join(map(_describe, workers))


def _describe(worker: WorkerInfo) -> str:
    doing = worker.phase or worker.state
    progress = "" if worker.progress is None else f" {worker.progress * 100:.0f} %"
    return f"{worker.name} {doing}{progress}"


async def _check_server_once(service: Service) -> None:
    """A server that was away when this process started is looked at once it answers."""
    if service.server_is_checked:
        return
    await asyncio.to_thread(_check_server, service.settings)
    service.server_is_checked = True


def _check_server(settings: Settings) -> None:
    with connect(settings) as client:
        check_server(client, settings.redis_url)
