"""Which errors an endpoint may answer with, by code, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Final

from tasks.codes import CODES

#: Extension of an operation that names its codes.
EXTENSION: Final = "x-error-codes"

#: Whoever asks, whatever for.
ANY: Final = (
    "invalid_http",
    "invalid_api_key",
    "host_not_allowed",
    "request_timeout",
    "head_too_large",
    "internal_error",
    "redis_unavailable",
    "server_busy",
)
#: A request with a JSON body.
BODY: Final = (
    "invalid_request",
    "unsupported_field",
    "invalid_json",
    "body_too_large",
    "unsupported_media_type",
)
#: A request that makes jobs.
ACCEPT: Final = (
    "context_length_exceeded",
    "larger_than_queue",
    "priority_not_allowed",
    "model_not_found",
    "idempotency_conflict",
    "rate_limit_exceeded",
    "too_many_jobs",
    "too_many_queued",
    "no_worker",
    "redis_full",
    "queue_full",
    "would_be_late",
)
#: The end of a job that somebody waits for, or whose stream somebody follows.
END: Final = (
    "cancelled",
    "worker_died",
    "claims_exhausted",
    "engine_error",
    "model_changed",
    "deadline_exceeded",
)
_WAIT: Final = (*END, "wait_exceeded")
_TEXT: Final = (*BODY, *ACCEPT, *_WAIT)
_QUERY: Final = ("invalid_request",)
_COUNTED: Final = ("rate_limit_exceeded", "redis_full", "idempotency_conflict")

#: By method and path, the codes beside those of any request.
_OF: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("post", "/basic_generate"): _TEXT,
    ("post", "/generate"): _TEXT,
    ("post", "/generate_vllm"): _TEXT,
    ("post", "/generate_stream"): (*BODY, *ACCEPT, "too_many_streams"),
    ("post", "/jobs"): (*BODY, *ACCEPT, "chat_template_missing", "webhooks_not_configured"),
    ("get", "/jobs"): _QUERY,
    ("get", "/jobs/{id}"): (*_QUERY, "job_not_found"),
    ("delete", "/jobs/{id}"): ("job_not_found", "job_not_ended", "invalid_request"),
    ("post", "/jobs/{id}/cancel"): ("job_not_found",),
    ("get", "/jobs/{id}/stream"): (
        *_QUERY,
        "job_not_found",
        "bad_cursor",
        "group_too_large",
        "too_many_streams",
    ),
    ("post", "/v1/completions"): (*_TEXT, "group_too_large", "too_many_streams"),
    ("post", "/v1/chat/completions"): (*_TEXT, "chat_template_missing", "group_too_large", "too_many_streams"),
    ("post", "/v1/responses"): (
        *_TEXT,
        "chat_template_missing",
        "job_not_found",
        "too_many_streams",
        "webhooks_not_configured",
    ),
    ("get", "/v1/responses/{id}"): (
        *_QUERY,
        "unsupported_field",
        "job_not_found",
        "bad_cursor",
        "too_many_streams",
    ),
    ("delete", "/v1/responses/{id}"): ("job_not_found", "job_not_ended"),
    ("post", "/v1/responses/{id}/cancel"): ("job_not_found",),
    ("post", "/v1/files"): (
        *_COUNTED,
        "invalid_request",
        "unsupported_field",
        "origin_not_allowed",
        "file_too_large",
        "files_full",
        "unsupported_media_type",
    ),
    ("get", "/v1/files"): (*_QUERY, "file_not_found"),
    ("get", "/v1/files/{id}"): ("file_not_found",),
    ("delete", "/v1/files/{id}"): ("file_not_found", "file_in_use"),
    ("get", "/v1/files/{id}/content"): ("file_not_found",),
    ("post", "/v1/batches"): (*BODY, *_COUNTED, "file_not_found"),
    ("get", "/v1/batches"): (*_QUERY, "batch_not_found"),
    ("get", "/v1/batches/{id}"): ("batch_not_found",),
    ("post", "/v1/batches/{id}/cancel"): ("batch_not_found",),
    ("get", "/v1/models"): (),
    ("get", "/v1/models/{model}"): ("model_not_found",),
}


def codes_of(method: str, path: str) -> tuple[str, ...] | None:
    """Every code of an endpoint, in the order of the table of codes; None of one that is not listed here."""
    found = _OF.get((method.lower(), path))
    if found is None:
        return None
    return tuple(name for name in CODES if name in ANY or name in found)


def status_of(code: str, path: str) -> int:
    """The HTTP status of a code at a path: what is 422 elsewhere is 400 under `/v1`."""
    status = CODES[code].status
    return 400 if status == 422 and path.startswith("/v1/") else status


def describe(described: dict[str, Any]) -> None:
    """Give each endpoint of an OpenAPI description that is listed here its codes, and the statuses of these alone."""
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            codes = codes_of(method, path)
            if codes is None:
                continue
            operation[EXTENSION] = list(codes)
            responses = {status: answer for status, answer in operation["responses"].items() if int(status) < 400}
            for status in sorted({status_of(code, path) for code in codes}):
                names = [f"`{code}`" for code in codes if status_of(code, path) == status]
                responses[str(status)] = {
                    "description": ", ".join(names),
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}},
                }
            operation["responses"] = responses
