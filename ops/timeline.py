"""A job's life in lines: what `carpool jobs show` prints of `GET /jobs/{id}?include=events`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_COLORS = {"succeeded": "\x1b[32m", "failed": "\x1b[31m", "model_process_died": "\x1b[31m", "worker_lost": "\x1b[31m"}
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


def timeline(job: Mapping[str, Any], *, colors: bool = False) -> str:
    """The job's state, then a line an event with the seconds since it was accepted, as plain text or for a terminal."""
    begin = float(job["created_at"])
    lines = [
        f"job      {job['id']}",
        f"status   {_paint(_status(job), job['status'], colors)}",
        f"model    {job['model']}",
        f"accepted {_date(begin)}",
        "",
    ]
    width = len(_offset(max([event["at"] for event in job["events"]], default=begin) - begin))
    for event in job["events"]:
        offset = _offset(event["at"] - begin).rjust(width)
        child = f"[{event['job'].rpartition('.')[2]}] " if job.get("children") else ""
        text = _paint(_described(event), event.get("status") or event["event"], colors)
        lines.append(f"{_DIM}{offset}{_RESET}  {child}{text}" if colors else f"{offset}  {child}{text}")
    lines.append("")
    if job.get("error"):
        lines.append(f"error    {job['error']['code']}: {job['error']['message']}")
    webhook = job.get("webhook")
    if webhook and webhook["next_attempt_at"] is not None:
        lines.append(f"webhook  {webhook['status']}, the next attempt {_date(webhook['next_attempt_at'])}")
    elif webhook:
        lines.append(f"webhook  {webhook['status']}")
    if job["status"] in ("queued", "running"):
        lines.append(f"deadline {_date(job['deadline_at'])}")
    if job["expires_at"] is not None:
        lines.append(f"kept     until {_date(job['expires_at'])}")
    return "\n".join(lines)


def _status(job: Mapping[str, Any]) -> str:
    if job["status"] == "queued" and job["queue_position"]:
        eta = f", done in about {job['eta_s']:.0f} s" if job["eta_s"] is not None else ""
        return f"queued at position {job['queue_position']}{eta}"
    stopping = ", a cancel was asked for" if job["status"] == "running" and job["cancel_requested"] else ""
    return f"{job['status']}{stopping}"


def _described(event: Mapping[str, Any]) -> str:
    tokens = _tokens(event["tokens"])
    match event["event"]:
        case "accepted":
            by = f" by API key {event['key']}" if event.get("key") else ""
            return f"accepted{by}, priority {event['priority']}"
        case "invited":
            return "a worker was invited"
        case "claimed":
            position = f", at {tokens}" if event["tokens"] else ""
            waited = f"{event['waited_s']:.3f} s of waiting"
            return f"claimed by {event['worker']} (ride {event['ride']}) after {waited}{position}"
        case "first_token":
            return "first token" if event["tokens"] == 1 else f"first token of this ride: {tokens}"
        case "model_process_died":
            return f"the model process died under it: {event['cause']}; {tokens} kept"
        case "worker_lost":
            return f"{event['worker']} was lost: it died or lost touch; {tokens} kept"
        case "handed_back":
            return f"handed back to the queue; {tokens} kept"
        case "cancel_requested":
            return "a cancel was asked for"
        case "ended":
            rate = f", {event['tokens_per_s']:.1f} tokens/s" if event.get("tokens_per_s") is not None else ""
            return f"{event['status']} ({event['finish_reason']}), {tokens}{rate}"
        case "webhook_attempted":
            answer = event["error"] or f"HTTP {event['status_code']}"
            return f"webhook: {answer} after {event['duration_ms']} ms"
        case "omitted":
            return "… (the record keeps the first and the last events of a long life)"
        case other:  # of a newer server
            return str(other).replace("_", " ")


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def _offset(seconds: float) -> str:
    return f"+{max(0.0, seconds):.3f} s"


def _date(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _paint(text: str, what: str, colors: bool) -> str:
    color = _COLORS.get(what) if colors else None
    return f"{color}{text}{_RESET}" if color else text
