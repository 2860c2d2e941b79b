"""Errors as answers: every one of them is `{"error": {message, type, param, code}}` from the table of codes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from redis.exceptions import ConnectionError, RedisError, TimeoutError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from api import schemas
from api.openai.batch_requests import CreateBatch
from api.openai.errors import is_openai, retry_header, status_of
from api.openai.requests import ChatRequest, CompletionRequest
from api.openai.response_requests import ResponseRequest
from tasks.codes import CODES, CarpoolError
from tasks.redis_clients import is_full, is_pool_used_up, takes_no_writes

_log = structlog.get_logger("carpool.api")
_SHOWN = 80


class ClientLeft(Exception):
    """Nobody is there any more to be answered."""


class ErrorResponse(JSONResponse):
    """An error. Whoever sees the request's scope when the answer starts can tell which one, and of which job."""

    def __init__(self, error: CarpoolError, status: int, headers: Mapping[str, str]) -> None:
        super().__init__({"error": error.body()}, status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["error"] = self._error
        await super().__call__(scope, receive, send)


def answer(
    error: CarpoolError,
    headers: Mapping[str, str] | None = None,
    root_path: str = "",
    status: int | None = None,
) -> ErrorResponse:
    """An error as a response; one that speaks of a job says where it is. `status` stands in for the code's own."""
    more = dict(headers or {})
    if error.code.status in (429, 503) or error.retry_after_s is not None:
        more["Retry-After"] = str(error.retry_after_s or 1)
    if error.job_id is not None:
        more.update(job_headers(error.job_id, root_path))
    return ErrorResponse(error, status or error.code.status, more)


def job_headers(id: str, root_path: str) -> dict[str, str]:
    """What every answer to a request that made a job carries."""
    return {"x-carpool-job-id": id, "Location": f"{root_path}/jobs/{id}"}


def error_of_job(id: str, status: str, error: Mapping[str, Any] | None, param: str | None = None) -> CarpoolError:
    """Why a job did not succeed, as the error of a request that waited for it."""
    found = error or {}
    fallback = {"cancelled": "cancelled", "expired": "deadline_exceeded"}.get(status, "internal_error")
    code = str(found.get("code"))
    return CarpoolError(
        code if code in CODES else fallback,
        str(found.get("message") or f"job {id} has {status}"),
        param=param or found.get("param"),
        job_id=id,
    )


@contextmanager
def naming_job(id: str) -> Iterator[None]:
    """What goes wrong in this block is told with the job's id: who asked would else ask again, and make another one."""
    try:
        yield
    except RedisError as error:
        found = of_redis(error)
        if found.code.name == "internal_error":
            _log.error("redis_refused_a_call", job_id=id, exc_info=error)
        found.job_id = id
        raise found from error
    except CarpoolError as error:
        error.job_id = error.job_id or id
        raise


def of_redis(error: RedisError) -> CarpoolError:
    """An error of Redis in the words of a user."""
    if is_full(error):
        return CarpoolError(
            "redis_full",
            "Redis has used up its memory, so no new job is taken; those that run will end. Wait for jobs to expire "
            "(CARPOOL_RETENTION_S), delete some with DELETE /jobs/{id}, or raise maxmemory",
            retry_after_s=5,
        )
    if is_pool_used_up(error):
        return CarpoolError(
            "server_busy",
            "this server has so many requests at hand that this one's turn to ask Redis did not come in time. Try "
            "again, or start further API processes",
            retry_after_s=5,
        )
    if isinstance(error, ConnectionError | TimeoutError):
        return CarpoolError("redis_unavailable", f"Redis does not answer ({error}). Try again", retry_after_s=1)
    if takes_no_writes(error):
        return CarpoolError("redis_unavailable", f"Redis takes no writes now ({error}). Try again", retry_after_s=1)
    return CarpoolError("internal_error", "Redis refused a call of this server; its log says more")


def of_validation(errors: Sequence[Mapping[str, Any]], fields: Sequence[str], body: Any = None) -> CarpoolError:
    """The first thing that is wrong with a request: names the field and the value.

    Args:
        fields: what the body may hold, for a hint at a misspelt name.
        body: the request's, parsed; None where the errors are not about one.
    """
    first = _deepest(errors, body)
    location = list(first["loc"])
    place, path = str(location[0]), location[1:]
    if place == "body" and isinstance(body, dict):
        path = _in_body(path, body)
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", "")).lower()
        return CarpoolError("invalid_json", f"the body is no JSON: {reason} at character {path[0] if path else 0}")
    param = _param(path) or None
    if (
        place == "body"
        and not path
        and first["type"] in ("missing", "model_attributes_type", "model_type", "dict_type")
    ):
        return CarpoolError("invalid_request", 'the body has to be a JSON object, as in {"prompt": "Hello, I am"}')
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1]), [name for name in fields if name != path[-1]], n=1)
        hint = f"Did you mean {near[0]}?" if near else "Leave it out"
        return CarpoolError("unsupported_field", f"the field {param} is not supported here. {hint}", param=param)
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if first["type"] == "missing":
        return CarpoolError("invalid_request", f"{param} is missing", param=param)
    if param is None:
        return CarpoolError("invalid_request", message)
    value = repr(first.get("input"))
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
    return CarpoolError("invalid_request", f"{param}: {message}, but it is {shown}", param=param)


def _in_body(path: Sequence[str | int], body: Any) -> list[str | int]:
    """The path without the names of the types that pydantic tried on the way."""
    found: list[str | int] = []
    for index, part in enumerate(path):
        if isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        elif isinstance(body, dict) and (part in body or index == len(path) - 1):
            body = body.get(part)
        else:
            continue
        found.append(part)
    return found


def _deepest(errors: Sequence[Mapping[str, Any]], body: Any) -> Mapping[str, Any]:
    """Of the errors of the first field that has any: where a value fits none of several types, the nearest miss."""
    first = errors[0]
    if not isinstance(body, dict):
        return first
    same = [error for error in errors if list(error["loc"][:2]) == list(first["loc"][:2])]
    return max(same, key=lambda error: len(_in_body(error["loc"][1:], body)))


def _param(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _body_fields(request: Request) -> list[str]:
    models: list[type[BaseModel]] = (
        [ChatRequest, CompletionRequest, ResponseRequest, CreateBatch]
        if is_openai(request)
        else [
            schemas.BasicGenerate,
            schemas.Generate,
            schemas.GenerateStream,
            schemas.GenerateVllm,
            schemas.SubmitJob,
        ]
    )
    return sorted({name for model in models for name in model.model_fields})


async def _carpool_error(request: Request, error: CarpoolError) -> Response:
    if is_openai(request):
        return answer(error, retry_header(error, request), root_path(request), status_of(error))
    return answer(error, root_path=root_path(request))


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    return await _carpool_error(request, of_validation(error.errors(), _body_fields(request), error.body))


async def _values_error(request: Request, error: ValidationError) -> Response:
    """A body that is fine by itself, and what is made of it is not."""
    raw = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
    return await _carpool_error(request, of_validation(raw, _body_fields(request)))


async def _redis_error(request: Request, error: RedisError) -> Response:
    found = of_redis(error)
    if found.code.name == "internal_error":
        _log.error("redis_refused_a_call", path=request.url.path, request_id=_request_id(request), exc_info=error)
    return answer(found)


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.url.path
    if error.status_code == 404:
        found = CarpoolError("not_found", f"there is nothing at {path[:_SHOWN]}. /docs lists what there is")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        found = CarpoolError(
            "method_not_allowed", f"{request.method} is not possible at {path[:_SHOWN]}: use {allowed}"
        )
    elif error.status_code == 413:
        found = CarpoolError("body_too_large", str(error.detail))
    elif error.status_code == 400:
        found = CarpoolError("invalid_json", "the body cannot be read as JSON: is it UTF-8, and not nested too deeply?")
    else:
        found = CarpoolError("invalid_request", str(error.detail))
    return answer(found, error.headers)


async def _client_left(request: Request, error: ClientLeft) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    request_id = _request_id(request)
    _log.error("request_failed", path=request.url.path, request_id=request_id, exc_info=error)
    response = answer(CarpoolError("internal_error", "this server met an error of its own; its log says more"))
    if request_id:  # this handler answers outside of all middleware
        response.headers["x-request-id"] = request_id
    return response


def _request_id(request: Request) -> str:
    return str(request.scope.get("state", {}).get("request_id", ""))


def root_path(request: Request) -> str:
    """Path under which a proxy serves this API, without a slash at its end."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def install(app: FastAPI) -> None:
    """Make every error of this application an answer from the table of codes."""
    handlers: list[tuple[type[Exception], Callable[..., Any]]] = [
        (CarpoolError, _carpool_error),
        (RequestValidationError, _validation_error),
        (ValidationError, _values_error),
        (RedisError, _redis_error),
        (HTTPException, _http_error),
        (ClientLeft, _client_left),
        (Exception, _unexpected),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)
