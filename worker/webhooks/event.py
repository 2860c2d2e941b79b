"""The event that a receiver gets: what it says, and how it is signed (Standard Webhooks)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from standardwebhooks.webhooks import Webhook

from tasks.webhook_calls import event_id

#: A longer event goes without the job's text, which `GET /jobs/{id}` has.
MAX_EVENT_BYTES: Final = 256 * 1024


def event_body(job: Mapping[str, Any], ended_ms: int) -> bytes:
    """The body for the end of a job: byte for byte the same at every attempt.

    Args:
        job: the object of `GET /jobs/{id}`; its delivery log is left out, which changes from attempt to attempt.
        ended_ms: when it has ended, in ms since 1970.
    """
    shown = {name: value for name, value in job.items() if name != "webhook"}
    ended = datetime.fromtimestamp(ended_ms // 1000, UTC).replace(microsecond=ended_ms % 1000 * 1000)
    event = {
        "id": event_id(str(job["id"])),
        "type": f"job.{job['status']}",
        "timestamp": ended.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "text_omitted": False,
        "data": shown,
    }
    body = _encoded(event)
    if len(body) > MAX_EVENT_BYTES:
        body = _encoded({**event, "text_omitted": True, "data": {**shown, "text": None}})
    return body


def signed_headers(secrets: Sequence[str], id: str, body: bytes, now: datetime) -> list[tuple[str, str]]:
    """The headers that go with a body: its id, the time of this attempt, and one signature for each secret."""
    text = body.decode()
    signatures = " ".join(Webhook(secret).sign(id, now, text) for secret in secrets)
    return [
        ("Content-Type", "application/json"),
        ("webhook-id", id),
        ("webhook-timestamp", str(int(now.timestamp()))),
        ("webhook-signature", signatures),
    ]


def _encoded(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
