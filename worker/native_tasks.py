"""Tasks sent with plain Celery (`app.send_task("carpool.generate", …)`): they become jobs like any other."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tasks import keys
from tasks.acceptance import job_acceptance
from tasks.codes import CarpoolError
from tasks.job_request import JobRequest
from tasks.ledger import SyncLedger
from tasks.registry import choose_model, parse_models
from tasks.settings import Settings
from worker.delivery import Delivery

#: Task ids from outside become parts of key names.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def accept_native(ledger: SyncLedger, delivery: Delivery, settings: Settings) -> bool:
    """Record the task as a job, once. Returns whether it is one of our pool that can be claimed now.

    A task that cannot be run becomes a job that has failed, so that whoever sent it is told.
    """
    if not _ID.fullmatch(delivery.id):
        _refuse_id(ledger, delivery.id, settings)
        return False
    request, error = _read(delivery)
    pool = choose_model(request.model, parse_models(ledger.client.hgetall(keys.MODELS)).values(), settings.pool)
    if pool is None:
        error = CarpoolError(
            "model_not_found", f"no model {request.model!r} is served here; GET /jobs lists none for it"
        )
        pool = settings.pool
    acceptance = replace(job_acceptance(delivery.id, pool, request, settings, native=True), trace=delivery.trace)
    accepted = ledger.run(ledger.calls.accept(acceptance))
    if accepted.verdict == "tomb":
        return False
    if error is not None:
        ledger.run(ledger.calls.fail(delivery.id, error.body()))
        return False
    return pool == settings.pool


def _refuse_id(ledger: SyncLedger, id: str, settings: Settings) -> None:
    """Tell who waits for the task: as Celery's own record, since there can be no job of that id."""
    message = (
        f"the task id {id[:128]!r} cannot be a job's: take letters, digits, '.', '_' and '-', at most 128 of them, or "
        "let Celery choose one"
    )
    record: dict[str, Any] = {
        "status": "FAILURE",
        "result": {
            "exc_type": "JobFailed",
            "exc_message": [message, "invalid_request", id],
            "exc_module": "tasks.codes",
        },
        "traceback": None,
        "children": [],
        "date_done": datetime.datetime.now(datetime.UTC).isoformat(),
        "task_id": id,
    }
    data = json.dumps(record)
    ledger.client.set(keys.celery_result(id), data, px=round(settings.retention_s * 1000))
    ledger.client.publish(keys.celery_result(id), data)


def _read(delivery: Delivery) -> tuple[JobRequest, CarpoolError | None]:
    """The job that a message asks for; where it asks for none, a stand-in and the error that it ends with."""
    stand_in = JobRequest(prompt="-")
    try:
        given_args, given_kwargs, embedded = delivery.payload
        args, kwargs, embedded = list(given_args), dict(given_kwargs), dict(embedded or {})
    except (TypeError, ValueError):
        return stand_in, CarpoolError("invalid_request", "the body is no task of Celery's second protocol")
    if len(args) == 1 and "prompt" not in kwargs:
        kwargs["prompt"] = args.pop()
    if args:
        return stand_in, CarpoolError(
            "invalid_request", f"{len(args)} positional arguments: give the prompt, and everything else by name"
        )
    unsupported = [name for name in ("callbacks", "errbacks", "chain", "chord") if embedded.get(name)]
    if delivery.request.eta is not None:
        unsupported.append("eta")
    if unsupported:
        return stand_in, CarpoolError(
            "eta_unsupported",
            f"{', '.join(unsupported)} is not possible for carpool.generate: send the task when it is to run, "
            "and chain on its result",
        )
    if delivery.request.expires is not None:
        left = delivery.request.expires - datetime.datetime.now(datetime.UTC)
        kwargs.setdefault("deadline_s", max(0.001, left.total_seconds()))
    try:
        return JobRequest(**kwargs), None
    except ValidationError as invalid:
        first = invalid.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return stand_in, CarpoolError("invalid_request", f"{where}: {first['msg']}", param=where)
