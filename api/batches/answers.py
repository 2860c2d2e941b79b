"""Answers as lines of a batch's output and error files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from api.batches import ids
from api.batches.requests import ENDPOINTS
from api.errors import error_of_job
from api.events import as_json
from api.openai.errors import status_of
from api.service import Service
from tasks import keys
from tasks.batch_types import Answer, BatchState
from tasks.codes import CarpoolError

#: So many answers are put together at once.
_PAGE: Final = 64
_ENDINGS: Final = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


def refusal(batch: str, line: int, custom_id: str | None, job: str, error: CarpoolError) -> str:
    """The answer to a request that did not succeed, as its own endpoint would have given it."""
    response = {"status_code": status_of(error), "request_id": job, "body": {"error": error.body()}}
    return _line(batch, line, custom_id, response, None)


def undone(batch: str, line: int, custom_id: str | None, ending: str) -> str:
    """The answer to a request that the batch's end came before. `ending`: expired or cancelled."""
    code, message = _ENDINGS[ending]
    return _line(batch, line, custom_id, None, {"code": code, "message": message})


async def read_answers(service: Service, batch: str, state: BatchState) -> list[Answer]:
    """The answers to lines whose jobs have ended and that are not written yet, some of them."""
    lines = [line for line, status in state.open.items() if status not in ("queued", "running")][:_PAGE]
    if not lines:
        return []
    jobs = [state.job(line) for line in lines]
    views = await service.ledger.run(service.calls.view(jobs))
    async with service.client.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.hget(keys.record(job), "request")
            pipeline.hget(keys.group(job), "request")
        kept = await pipeline.execute()
    requests = [json.loads(own or group or "{}") for own, group in zip(kept[::2], kept[1::2], strict=True)]
    return [
        await _answer(service, batch, state, line, view, request)
        for line, view, request in zip(lines, views, requests, strict=True)
    ]


async def _answer(
    service: Service,
    batch: str,
    state: BatchState,
    line: int,
    view: Mapping[str, Any] | None,
    request: Mapping[str, Any],
) -> Answer:
    custom_id, job = request.get("custom_id"), state.job(line)
    if view is None:
        error = CarpoolError("job_not_found", f"the record of job {job} is gone, and its answer with it", job_id=job)
        return Answer(line, "errors", refusal(batch, line, custom_id, job, error))
    status = view["status"]
    if status == "succeeded":
        body = await ENDPOINTS[state.endpoint].answer(service, view, request["answer"])
        response = {"status_code": 200, "request_id": job, "body": body}
        return Answer(line, "output", _line(batch, line, custom_id, response, None))
    if status == state.ending and status in _ENDINGS:
        return Answer(line, "errors", undone(batch, line, custom_id, status))
    error = error_of_job(job, status, view["error"])
    return Answer(line, "errors", refusal(batch, line, custom_id, job, error))


def _line(
    batch: str,
    line: int,
    custom_id: str | None,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> str:
    answer = {"id": ids.request_id(batch, line), "custom_id": custom_id, "response": response, "error": error}
    return as_json(answer) + "\n"
