"""`/v1/files`: uploads for batches, and what batches have written."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from api.batches.file_store import StoredFile
from api.batches.runner import batches_of
from api.caller import caller_of
from api.errors import root_path
from api.header_docs import IDEMPOTENCY_KEY
from api.intake import Idempotency
from api.openai.answers import ERRORS, DeletedFile, FileList, FileObject
from api.openai.batch_requests import MAX_EXPIRY_S, MIN_EXPIRY_S
from api.openai.uploads import UploadForm
from api.service import service_of
from tasks.batch_types import NewFile
from tasks.codes import CarpoolError

PATH: Final = "/v1/files"
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_FIELDS: Final = ("purpose", _ANCHOR, _SECONDS)
_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": ["batch"], "description": "What it is for."},
                        "file": {"type": "string", "format": "binary", "description": "A JSON object a line."},
                        _ANCHOR: {"type": "string", "enum": ["created_at"], "description": "With the seconds."},
                        _SECONDS: {
                            "type": "integer",
                            "minimum": MIN_EXPIRY_S,
                            "maximum": MAX_EXPIRY_S,
                            "description": "How long it is kept; not given: CARPOOL_FILE_RETENTION_S.",
                        },
                    },
                }
            }
        },
    }
}

router = APIRouter(prefix=PATH, tags=["openai"], responses=ERRORS)


@router.post("", response_model=FileObject, openapi_extra={**_FORM, **IDEMPOTENCY_KEY})
async def upload_file(request: Request) -> Response:
    """Upload a file of requests for a batch. It is read as it comes, and kept in Redis."""
    service, store, caller = service_of(request), batches_of(request).store, caller_of(request)
    await service.count(caller)
    form = UploadForm(request.headers.get("content-type", ""))
    writer = store.writer()
    digest = hashlib.sha256()

    async def write(data: bytes) -> None:
        digest.update(data)
        await writer.write(data)

    try:
        await form.read(request, write)
        id = await writer.finish(_described(form, request, digest.hexdigest(), service.settings.file_retention_s))
    except BaseException:
        service.in_background(writer.discard())
        raise
    return JSONResponse(_object(await store.get(id, caller.owner)))


@router.get("", response_model=FileList)
async def list_files(
    request: Request,
    purpose: Annotated[str, Query(max_length=64, description="Files of this purpose alone.")] = "",
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most files of a page.")] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="By time of creation.")] = "desc",
    after: Annotated[str, Query(max_length=128, description="Id of the last file that you have.")] = "",
) -> Response:
    """List files by time, the newest first unless you say otherwise."""
    files, has_more = await batches_of(request).store.list_files(
        caller_of(request).owner, after=after, limit=limit, newest_first=order == "desc", purpose=purpose
    )
    return JSONResponse(page([_object(file) for file in files], has_more))


@router.get("/{id}", response_model=FileObject)
async def get_file(id: str, request: Request) -> Response:
    """Ask for a file; one that a batch writes grows meanwhile."""
    return JSONResponse(_object(await batches_of(request).store.get(id, caller_of(request).owner)))


@router.get(
    "/{id}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The bytes."}},
)
async def get_file_content(id: str, request: Request) -> Response:
    """Download a file. One that a batch writes is answered as far as it has come, in whole lines."""
    store = batches_of(request).store
    file = await store.get(id, caller_of(request).owner)
    chunks = store.chunks(file)
    # the first chunk is read before the answer begins, so that a fault is an error and no half of an answer
    first = await anext(chunks, b"")

    async def content() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(
        content(), media_type="application/octet-stream", headers={"Content-Length": str(file.num_bytes)}
    )


@router.delete("/{id}", response_model=DeletedFile)
async def delete_file(id: str, request: Request) -> Response:
    """Delete a file, unless a batch that has not ended needs it."""
    await batches_of(request).store.delete(id, caller_of(request).owner)
    return JSONResponse({"id": id, "object": "file", "deleted": True})


def page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list, as OpenAI's clients go through it."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _described(form: UploadForm, request: Request, digest: str, default_s: float) -> NewFile:
    """What the form says of its file. Raises CarpoolError."""
    for name in form.fields:
        if name not in _FIELDS:
            raise CarpoolError(
                "unsupported_field", f"the field {name[:80]!r} is not supported here. Leave it out", param=name[:80]
            )
    if not form.has_file:
        raise CarpoolError("invalid_request", "file is missing", param="file")
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        raise CarpoolError(
            "invalid_request", f"purpose: batch alone is possible, but it is {purpose!r:.80}", param="purpose"
        )
    ttl_s = _expiry(form.fields, default_s)
    owner = caller_of(request).owner
    idempotency = None
    key = request.headers.get("idempotency-key")
    if key is not None:
        body = {**form.fields, "file": digest}
        path = str(request.scope["path"]).removeprefix(root_path(request))
        idempotency = Idempotency.of(owner, request.method, path, key, body)
    return NewFile(
        id="",
        filename=form.filename,
        purpose=purpose,
        num_bytes=0,
        num_chunks=0,
        ttl_s=ttl_s,
        owner=owner,
        idempotency=idempotency.scope_hash if idempotency else "",
        body_hash=idempotency.body_hash if idempotency else "",
    )


def _expiry(fields: dict[str, str], default_s: float) -> float:
    anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise CarpoolError(
            "invalid_request", f"{_ANCHOR}: created_at alone is possible, but it is {anchor!r:.80}", param=_ANCHOR
        )
    number = int(seconds) if seconds and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10 else 0
    if not MIN_EXPIRY_S <= number <= MAX_EXPIRY_S:
        raise CarpoolError(
            "invalid_request",
            f"{_SECONDS}: from {MIN_EXPIRY_S} to {MAX_EXPIRY_S} is possible, but it is {seconds!r:.80}",
            param=_SECONDS,
        )
    return number


def _object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
