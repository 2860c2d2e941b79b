"""`GET /service`: who rides in which slot, who waits, which workers live."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from api.caller import caller_of
from api.generation import ERRORS
from api.service import service_of

router = APIRouter(tags=["service"], responses=ERRORS)


class RiderView(BaseModel):
    """A job in a slot."""

    tag: str = Field(description="Tells riders apart, and nothing of them.")
    id: str | None = Field(description="null where it is another API key's.")
    tokens: int
    max_tokens: int | None
    stalled: bool = Field(description="Its worker was not heard in time: another will take it up.")
    stopping: bool


class WorkerView(BaseModel):
    """A worker with its riders; slots without one are free."""

    id: str
    name: str
    state: Literal["loading", "ready", "restarting", "draining", "broken", "silent"] = Field(
        description="silent: not heard for two heartbeats."
    )
    phase: str
    progress: float | None
    engine: str
    device: str
    slots: int
    tokens_per_s: float
    version: str
    riders: list[RiderView]


class ModelScene(BaseModel):
    """A model with its workers, and who waits."""

    model: str
    state: Literal["ready", "loading", "draining", "no worker"]
    workers: list[WorkerView]
    stranded: list[RiderView] = Field(description="Riders whose worker is gone; another will take them up.")
    waiting: int
    queue: list[str | None] = Field(
        description="The first 32 that wait, by arrival and priority; null for another API key's."
    )


class ServiceView(BaseModel):
    """Every model that has workers, riders or jobs that wait."""

    object: Literal["service"]
    models: list[ModelScene]


@router.get("/service", response_model=ServiceView)
async def look_on(request: Request) -> Response:
    """See the batches: who rides in which slot, who waits, which workers live. May be half a second old."""
    models = await service_of(request).onlook.describe(caller_of(request))
    return JSONResponse({"object": "service", "models": models})
