"""A job's life as a list of events, for `GET /jobs/{id}?include=events`.

Most of it stands in the job's record anyway; what happened in between is noted by the ledger's scripts (`tasks.life`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from api.caller import Caller
from api.service import Service
from tasks import keys
from tasks.life import LifeEvent, parse_life

_FIELDS: Final = (
    "status",
    "created_at",
    "finished_at",
    "finish_reason",
    "k",
    "lease",
    "worker",
    "pool",
    "priority",
    "life",
    "first",
)


async def timeline_of(service: Service, view: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """What `include=events` adds to a job's object: `events` in their order, and `expires_at`.

    Of a group these are the events of its children, each with the id of its job. `caller` is whose job it is.
    """
    ids: Sequence[str] = view.get("children") or [view["id"]]
    async with service.client.pipeline(transaction=False) as pipeline:
        for id in ids:
            pipeline.hmget(keys.record(id), _FIELDS)
            pipeline.zscore(keys.invited(view["model"]), id)
        pipeline.pexpiretime(keys.group(view["id"]) if view.get("children") else keys.record(view["id"]))
        *found, expires_ms = await pipeline.execute()
    key_name = caller.key.name if caller.key is not None else None
    events: list[dict[str, Any]] = []
    for id, values, invited in zip(ids, found[::2], found[1::2], strict=True):
        record = dict(zip(_FIELDS, (value or "" for value in values), strict=True))
        if record["status"]:
            events += _events(id, record, invited, key_name)
    events += _deliveries(view)
    events.sort(key=lambda event: event["at"])  # stable: what has one time keeps its order
    return {"events": events, "expires_at": expires_ms / 1000 if expires_ms > 0 else None}


def _events(id: str, record: dict[str, str], invited: float | None, key_name: str | None) -> list[dict[str, Any]]:
    def event(name: str, at_ms: float, tokens: int, **more: Any) -> dict[str, Any]:
        return {"at": at_ms / 1000, "event": name, "job": id, "tokens": tokens, **more}

    tokens = int(record["k"])
    events = [event("accepted", int(record["created_at"]), 0, priority=int(record["priority"] or 5), key=key_name)]
    life = parse_life(record["life"] + record["first"])
    first: LifeEvent | None = None
    for one in life:
        match one.event:
            case "claimed":
                first = None
                if one.invited_ms:
                    events.append(event("invited", min(one.invited_ms, one.at_ms), one.tokens))
                waited_s = one.waited_ms / 1000
                more = {"worker": one.worker, "ride": one.epoch, "waited_s": waited_s}
                events.append(event("claimed", one.at_ms, one.tokens, **more))
            case "first_token":
                first = one
                events.append(event("first_token", one.at_ms, one.tokens))
            case "died":
                events.append(event("model_process_died", one.at_ms, one.tokens, cause=one.cause))
            case "lost":
                events.append(event("worker_lost", one.at_ms, one.tokens, worker=one.worker))
            case "cancel_asked":
                events.append(event("cancel_requested", one.at_ms, one.tokens))
            case other:
                events.append(event(other, one.at_ms or life[0].at_ms, one.tokens))
    now_ms = time.time() * 1000
    if record["status"] == "queued" and invited is not None:
        events.append(event("invited", float(invited), tokens))
    elif record["status"] == "running" and int(record["lease"]) < now_ms:
        events.append(event("worker_lost", int(record["lease"]), tokens, worker=record["worker"]))
    elif record["finished_at"]:
        ended_ms = int(record["finished_at"])
        rate = None
        if first is not None and tokens > first.tokens and ended_ms > first.at_ms:
            rate = round((tokens - first.tokens) / (ended_ms - first.at_ms) * 1000, 2)
        more = {"status": record["status"], "finish_reason": record["finish_reason"], "tokens_per_s": rate}
        events.append(event("ended", ended_ms, tokens, **more))
    return events


def _deliveries(view: dict[str, Any]) -> list[dict[str, Any]]:
    webhook = view.get("webhook")
    if not webhook:
        return []
    events: list[dict[str, Any]] = []
    for attempt in webhook["attempts"]:
        told = {name: attempt[name] for name in ("status_code", "error", "duration_ms")}
        tokens = view["usage"]["completion_tokens"]
        events.append({"at": attempt["at"], "event": "webhook_attempted", "job": view["id"], "tokens": tokens, **told})
    return events
