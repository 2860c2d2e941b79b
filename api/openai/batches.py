"""`/v1/batches`: files of requests, run at low priority, and their answers in files."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from api.batches import ids
from api.batches.listing import Record, list_records, read_record
from api.batches.requests import ENDPOINTS
from api.batches.runner import batches_of
from api.caller import caller_of
from api.events import as_json
from api.generation import idempotency_of
from api.header_docs import IDEMPOTENCY_KEY
from api.openai.answers import ERRORS, BatchList, BatchObject
from api.openai.batch_requests import CreateBatch
from api.openai.files import page
from api.service import Service, service_of
from tasks import keys
from tasks.batch_types import NewBatch
from tasks.codes import CarpoolError

PATH: Final = "/v1/batches"
_WINDOWS: Final = {"24h": 86400.0}
_TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")

router = APIRouter(prefix=PATH, tags=["openai"], responses=ERRORS)


@router.post("", response_model=BatchObject, openapi_extra=IDEMPOTENCY_KEY)
async def create_batch(body: CreateBatch, request: Request) -> Response:
    """Have the requests of a file answered within a day, at low priority, into files that can be read meanwhile."""
    service, runner, caller = service_of(request), batches_of(request), caller_of(request)
    await service.count(caller)
    id = ids.new_batch_id()
    idempotency = await idempotency_of(request)
    expiry = body.output_expires_after
    verdict, found = await service.ledger.run(
        runner.calls.create_batch(
            NewBatch(
                id=id,
                job_prefix=ids.job_prefix(id, ENDPOINTS[body.endpoint].job_prefix),
                file=body.input_file_id,
                endpoint=body.endpoint,
                completion_window=body.completion_window,
                window_s=_WINDOWS[body.completion_window],
                keep_s=service.settings.file_retention_s if expiry is None else expiry.seconds,
                metadata=as_json(body.metadata) if body.metadata else "",
                output=ids.output_file(id),
                errors_file=ids.errors_file(id),
                owner=caller.owner,
                idempotency=idempotency.scope_hash if idempotency else "",
                body_hash=idempotency.body_hash if idempotency else "",
            )
        )
    )
    _check_created(verdict, found)
    runner.wake()
    return JSONResponse(await _read(service, found, caller.owner))


@router.get("", response_model=BatchList)
async def list_batches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100, description="Most batches of a page.")] = 20,
    after: Annotated[str, Query(max_length=128, description="Id of the last batch that you have.")] = "",
) -> Response:
    """List batches, the newest first."""
    try:
        records, has_more = await list_records(
            service_of(request).client, keys.batches(caller_of(request).owner), keys.batch, after=after, limit=limit
        )
    except LookupError:
        raise _not_found(after) from None
    return JSONResponse(page([_object(record) for record in records], has_more))


@router.get("/{id}", response_model=BatchObject)
async def get_batch(id: str, request: Request) -> Response:
    """Ask for a batch: its counts rise, and its files grow, while it runs."""
    return JSONResponse(await _read(service_of(request), id, caller_of(request).owner))


@router.post("/{id}/cancel", response_model=BatchObject)
async def cancel_batch(id: str, request: Request) -> Response:
    """Cancel a batch. What was answered stays in its files; one that has ended is answered as it is."""
    service, runner, owner = service_of(request), batches_of(request), caller_of(request).owner
    verdict = await service.ledger.run(runner.calls.cancel_batch(id, owner))
    if verdict == "gone":
        raise _not_found(id)
    return JSONResponse(await _read(service, id, owner))


def _check_created(verdict: str, found: str) -> None:
    if verdict == "no_file":
        raise CarpoolError(
            "file_not_found",
            f"there is no file {found[:128]!r}: it never was, was deleted, or has expired",
            param="input_file_id",
        )
    if verdict == "purpose":
        raise CarpoolError(
            "invalid_request",
            f"input_file_id: a file with purpose batch is needed, and this one's is {found}",
            param="input_file_id",
        )
    if verdict == "conflict":
        raise CarpoolError(
            "idempotency_conflict",
            f"this Idempotency-Key was used with another body, for batch {found}. Take a new key for a new batch",
            param="Idempotency-Key",
        )


def _not_found(id: str) -> CarpoolError:
    return CarpoolError(
        "batch_not_found", f"there is no batch {id[:128]!r}: it never was, was deleted, or is kept no longer"
    )


async def _read(service: Service, id: str, owner: str) -> dict[str, Any]:
    record = await read_record(service.client, keys.batch(id), owner)
    if not record:
        raise _not_found(id)
    return _object(record)


def _object(record: Record) -> dict[str, Any]:
    """A batch as OpenAI's clients know it."""
    completed, failed = int(record["completed"]), int(record["failed"])
    errors = json.loads(record.get("errors") or "[]")
    return {
        "id": record["id"],
        "object": "batch",
        "endpoint": record["endpoint"],
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": record["file"],
        "completion_window": record["completion_window"],
        "status": record["status"],
        "output_file_id": record["output"] if completed else None,
        "error_file_id": record["errors_file"] if failed else None,
        "created_at": _seconds(record["created_at"]),
        "expires_at": _seconds(record["deadline"]),
        **{f"{name}_at": _seconds(record.get(f"{name}_at")) for name in _TIMES},
        "request_counts": {"total": int(record["total"]), "completed": completed, "failed": failed},
        "metadata": json.loads(record["metadata"]) if record["metadata"] else None,
    }


def _seconds(ms: str | None) -> int | None:
    return int(ms) // 1000 if ms else None
