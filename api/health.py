"""Is this process alive, does it take jobs, does anybody run them?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from redis.exceptions import RedisError
from starlette.responses import JSONResponse, Response

from api.caller import Caller
from api.models import Pool, start_worker
from api.schemas import ErrorAnswer, Health, Ready
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


@router.get(
    "/ready",
    response_model=Ready,
    responses={
        404: {"model": ErrorAnswer, "description": "There is no such model."},
        422: {"model": ErrorAnswer, "description": "The query has a value that is not possible."},
    },
)
async def ready(
    request: Request,
    model: Annotated[str | None, Query(description="Ask for this model alone, by its name or an alias.")] = None,
) -> Response:
    """Jobs are run: a worker is ready. Else the message says what is waited for. `models` says how each one is."""
    models, is_told = service_of(request).models, _is_told_details(request)
    caller: Caller = request.scope["state"].get("caller", Caller())
    allowed = models.allowed(caller)
    try:
        pools = [pool for pool in await models.pools() if allowed is None or pool.alias in allowed]
        alias = await models.find(model) if model is not None else None
    except RedisError:
        if is_told:
            raise
        raise CarpoolError("redis_unavailable", "Redis is away. Try again", retry_after_s=1) from None
    if model is not None:
        if alias is None or (allowed is not None and alias not in allowed):
            raise await models.unknown(model, caller) if is_told else _no_such_model(model)
        pools = [pool for pool in pools if pool.alias == alias]
    body: dict[str, Any] = {"status": "ready"}
    if is_told:
        body["models"] = [_model(pool) for pool in pools]
    if any(pool.state == "ready" for pool in pools):
        return JSONResponse(body)
    waiting_for = _waiting_for(pools, alias) if is_told else "it is not said without an API key"
    error = CarpoolError("no_worker", f"waiting for a worker: {waiting_for}", retry_after_s=1)
    body.update(status="waiting", waiting_for=waiting_for, error=error.body())
    return JSONResponse(body, 503, {"Retry-After": "1"})


def _is_told_details(request: Request) -> bool:
    """Whether more than a status may be said: everybody may ask here, and where there are keys, most are strangers."""
    return bool(request.scope["state"]["is_told_details"])


def _no_such_model(name: str) -> CarpoolError:
    return CarpoolError("model_not_found", f"there is no model {name[:128]!r} here. Ask for another", param="model")


def _model(pool: Pool) -> dict[str, Any]:
    serving = [worker for worker in pool.workers if worker.serves]
    return {
        "model": pool.alias,
        "state": pool.state,
        "workers": len(pool.workers),
        "slots": sum(worker.slots for worker in serving),
        "free": sum(worker.free for worker in serving if worker.state == "ready"),
        "waiting": pool.waiting,
    }


def _waiting_for(pools: Sequence[Pool], alias: str | None) -> str:
    """What workers that are not ready are doing, in plain words; `alias` is the model that was asked for."""
    workers = [worker for pool in pools for worker in pool.workers]
    if not workers:
        return f"none is up. {start_worker(alias) if alias else 'Start one: carpool worker'}"
    several = len({worker.pool for worker in workers}) > 1
    return "; ".join(_describe(worker, several) for worker in workers)


def _describe(worker: WorkerInfo, with_model: bool) -> str:
    doing = worker.phase or worker.state
    progress = "" if worker.progress is None else f" {worker.progress * 100:.0f} %"
    name = f"{worker.name} ({worker.pool})" if with_model else worker.name
    return f"{name} {doing}{progress}"


async def _check_server_once(service: Service) -> None:
    """A server that was away when this process started is looked at once it answers."""
    if service.server_is_checked:
        return
    await asyncio.to_thread(_check_server, service.settings)
    service.server_is_checked = True


def _check_server(settings: Settings) -> None:
    with connect(settings) as client:
        check_server(client, settings.redis_url)
