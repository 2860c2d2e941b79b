"""`GET /v1/models`: what is served now, and the further names that the settings give it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from api.caller import caller_of
from api.models import start_worker
from api.openai.answers import ERRORS, ModelCard, ModelList
from api.service import service_of
from tasks.codes import CarpoolError
from tasks.registry import ModelInfo

router = APIRouter(prefix="/v1/models", tags=["openai"], responses=ERRORS)


@router.get("", response_model=ModelList)
async def list_models(request: Request) -> Response:
    """List every model that a living worker serves or loads and that the API key may use, and every alias of one."""
    served = await service_of(request).models.served(caller_of(request))
    return JSONResponse({"object": "list", "data": [_card(name, info) for name, info in served.items()]})


@router.get("/{model:path}", response_model=ModelCard)
async def get_model(model: str, request: Request) -> Response:
    """Ask for one of these models, by its name or an alias."""
    models, caller = service_of(request).models, caller_of(request)
    served = await models.served(caller)
    if model in served:
        return JSONResponse(_card(model, served[model]))
    alias = await models.find(model)
    allowed = models.allowed(caller)
    if alias is None or (allowed is not None and alias not in allowed):
        raise await models.unknown(model, caller)
    there = ", ".join(served) or "none"
    raise CarpoolError(
        "model_not_found",
        f"no worker serves the model {model[:128]!r} now. {start_worker(alias)}. Served now: {there}",
        param="model",
    )


def _card(name: str, info: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(info.registered_at),
        "owned_by": "carpool",
        "root": info.alias,
        "max_model_len": info.context_length,
    }
