"""`GET /v1/models`: what is served, and the further names that the settings give it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from api.caller import Caller, caller_of
from api.openai.answers import ERRORS, ModelCard, ModelList
from api.service import Service, service_of
from tasks.codes import CarpoolError
from tasks.registry import ModelInfo

router = APIRouter(prefix="/v1/models", tags=["openai"], responses=ERRORS)


@router.get("", response_model=ModelList)
async def list_models(request: Request) -> Response:
    """List every model that was ever served and that the API key may use, and every alias of one."""
    return JSONResponse(
        {"object": "list", "data": list((await _cards(service_of(request), caller_of(request))).values())}
    )


@router.get("/{model:path}", response_model=ModelCard)
async def get_model(model: str, request: Request) -> Response:
    """Ask for one model, by its name or an alias."""
    cards = await _cards(service_of(request), caller_of(request))
    if model not in cards:
        there = ", ".join(sorted(cards)) or "none yet"
        raise CarpoolError(
            "model_not_found", f"no worker has ever served the model {model[:128]!r}. There is: {there}", param="model"
        )
    return JSONResponse(cards[model])


async def _cards(service: Service, caller: Caller) -> dict[str, dict[str, Any]]:
    allowed = service.models.allowed(caller)
    known = {name: info for name, info in (await service.models.known()).items() if allowed is None or name in allowed}
    cards = {name: _card(name, info) for name, info in sorted(known.items())}
    for alias, name in service.models.aliases.items():
        if name in known:
            cards.setdefault(alias, _card(alias, known[name]))
    return cards


def _card(name: str, info: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(info.registered_at),
        "owned_by": "carpool",
        "root": info.alias,
        "max_model_len": info.context_length,
    }
