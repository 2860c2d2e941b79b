"""What is special about errors under `/v1`: the statuses and headers that OpenAI's clients act upon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request

from tasks.codes import CarpoolError

PREFIX: Final = "/v1/"
#: Errors after which the same request, with the same Idempotency-Key, gets on with the same job.
_GOES_ON: Final = frozenset({"wait_exceeded", "redis_unavailable"})


def is_openai(request: Request) -> bool:
    """Whether a request came to one of OpenAI's endpoints."""
    root = str(request.scope.get("root_path", "")).rstrip("/")
    return str(request.scope["path"]).removeprefix(root).startswith(PREFIX)


def status_of(error: CarpoolError) -> int:
    """HTTP status under `/v1`: what is wrong with a request is 400 there, for which a client has BadRequestError."""
    return 400 if error.code.status == 422 else error.code.status


def retry_header(error: CarpoolError, request: Request) -> dict[str, str]:
    """Whether a client is to try again on its own, which OpenAI's do twice after any 409 and 5xx.

    An error that speaks of a job must not make another one: a job that kills its workers would be run three times.
    With an Idempotency-Key the same job is waited for again where it goes on.
    """
    if error.is_final:
        return {"x-should-retry": "false"}
    if error.job_id is None:
        return {}
    again = "idempotency-key" in request.headers and error.code.name in _GOES_ON
    return {"x-should-retry": "true" if again else "false"}


@contextmanager
def naming(prompt: str, max_tokens: str = "max_tokens") -> Iterator[None]:
    """Give errors the names of an endpoint's fields: the machinery below knows prompts, messages and max_tokens."""
    try:
        yield
    except CarpoolError as error:
        if error.param == "max_tokens":
            error.param = max_tokens
        elif error.param in ("prompt", "messages"):
            error.param = prompt
        elif error.param is not None and error.param.startswith("prompts["):
            index = error.param.removeprefix("prompts")
            error.param = f"{prompt}{index}" if prompt == "prompt" else prompt
        raise
