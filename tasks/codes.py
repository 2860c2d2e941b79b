"""Every error that a user can meet: one table of codes, with HTTP status and OpenAI error type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of error. `name` is also the metric label."""

    name: str
    status: int
    type: str


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

CODES: Final[dict[str, Code]] = {
    code.name: code
    for code in (
        Code("invalid_request", 422, _INVALID),
        Code("unsupported_field", 422, _INVALID),
        Code("webhooks_not_configured", 422, _INVALID),
        Code("invalid_json", 400, _INVALID),
        Code("invalid_http", 400, _INVALID),
        Code("context_length_exceeded", 400, _INVALID),
        Code("chat_template_missing", 400, _INVALID),
        Code("eta_unsupported", 400, _INVALID),
        Code("bad_cursor", 400, _INVALID),
        Code("group_too_large", 400, _INVALID),
        Code("larger_than_queue", 400, _INVALID),
        Code("invalid_api_key", 401, _INVALID),
        Code("host_not_allowed", 403, "permission_error"),
        Code("origin_not_allowed", 403, "permission_error"),
        Code("priority_not_allowed", 403, "permission_error"),
        Code("not_found", 404, _INVALID),
        Code("job_not_found", 404, _INVALID),
        Code("model_not_found", 404, _INVALID),
        Code("file_not_found", 404, _INVALID),
        Code("batch_not_found", 404, _INVALID),
        Code("method_not_allowed", 405, _INVALID),
        Code("cancelled", 409, "cancelled"),
        Code("idempotency_conflict", 409, _INVALID),
        Code("job_not_ended", 409, _INVALID),
        Code("file_in_use", 409, _INVALID),
        Code("body_too_large", 413, _INVALID),
        Code("file_too_large", 413, _INVALID),
        Code("files_full", 413, _INVALID),
        Code("head_too_large", 431, _INVALID),
        Code("request_timeout", 408, _INVALID),
        Code("unsupported_media_type", 415, _INVALID),
        Code("rate_limit_exceeded", 429, "rate_limit_error"),
        Code("too_many_jobs", 429, "rate_limit_error"),
        Code("too_many_queued", 429, "rate_limit_error"),
        Code("internal_error", 500, _SERVER),
        Code("worker_died", 500, _SERVER),
        Code("claims_exhausted", 500, _SERVER),
        Code("engine_error", 500, _SERVER),
        Code("model_changed", 500, _SERVER),
        Code("no_worker", 503, _SERVER),
        Code("redis_unavailable", 503, _SERVER),
        Code("redis_full", 503, _SERVER),
        Code("server_busy", 503, _SERVER),
        Code("too_many_streams", 503, _SERVER),
        Code("queue_full", 503, _SERVER),
        Code("would_be_late", 503, _SERVER),
        Code("wait_exceeded", 504, _SERVER),
        Code("deadline_exceeded", 504, _SERVER),
    )
}


class CarpoolError(Exception):
    """An error for a user: what was wrong, with its value, and one thing to do.

    Args:
        code: a key of `CODES`.
        message: cause, value and advice, in plain words.
        param: the field of the request that is at fault.
        job_id: the job that the error speaks of, if one was made.
        retry_after_s: whole seconds after which it makes sense to try again.
        is_final: the same request will never do better.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        job_id: str | None = None,
        retry_after_s: int | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = CODES[code]
        self.message = message
        self.param = param
        self.job_id = job_id
        self.retry_after_s = retry_after_s
        self.is_final = is_final

    def body(self) -> dict[str, Any]:
        """The error as it stands in JSON answers, in job records and in streams."""
        return {"message": self.message, "type": self.code.type, "param": self.param, "code": self.code.name}


class JobFailed(Exception):
    """What `AsyncResult.get()` raises for a job that failed or expired.

    Its arguments are the message, the error code and the job's id, all strings, so that it crosses Celery's JSON.
    """
