"""The calls of the ledger for webhooks, with typed arguments and answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.calls import Call, Calls

Outcome = Literal["delivered", "failed", "retry", "busy"]


@dataclass(frozen=True, slots=True)
class DeliveryClaim:
    """The answer to a claim. `verdict`: ok, gone, live (the job has not ended), over, taken, early, newer.

    The rest is set for ok.

    Attributes:
        number: of the attempt, from 1.
        ended_ms: when the job has ended, in ms since 1970.
        job: the object of `GET /jobs/{id}`.
        trace: the trace that the job is a part of, "" where it is not traced.
    """

    verdict: str
    number: int = 0
    url: str = ""
    ended_ms: int = 0
    job: dict[str, Any] = field(default_factory=dict)
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of an attempt.

    Attributes:
        outcome: delivered; failed, for good; retry; busy (nothing was sent, and it does not count).
        status_code: of the receiver's answer, None where there was none.
        error: why it was not delivered, for the user; "" where it was.
        duration_ms: how long it took.
        wait_s: until the next one, where there is to be one.
    """

    outcome: Outcome
    status_code: int | None = None
    error: str = ""
    duration_ms: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """How many messages were sent, and in how many seconds it makes sense to look again; None: others will."""

    num_messages: int
    look_again_s: float | None


def event_id(job: str) -> str:
    """Id of the event of a job's end, the same for every attempt."""
    return f"evt_{job}"


def job_of_event(event: str) -> str:
    """The job whose end an event tells of."""
    return event.removeprefix("evt_")


class WebhookCalls(Calls):
    """The calls of the ledger, and those for webhooks.

    Args:
        invitation: template of the message of a delivery, for the worker of webhooks.
    """

    def pump_webhooks(self, worker: str, ttl_ms: int, most: int) -> Call[Sent]:
        """Send messages for what is due, up to `most` in the broker, and say that a worker of webhooks lives."""
        return self._call("webhook_pump", [], (self._invitation, most, worker, ttl_ms), _parse_sent)

    def claim_delivery(self, id: str, nonce: str, lease_ms: int) -> Call[DeliveryClaim]:
        """Begin an attempt; after `lease_ms` another worker may begin the next."""
        return self._call("webhook_claim", [id], (id, nonce, lease_ms), _parse_claim)

    def settle_delivery(self, id: str, nonce: str, attempt: Attempt, most: int) -> Call[str]:
        """End an attempt, and send what is due next. Answers delivered, failed, pending or fenced (another began)."""
        args = (
            id,
            nonce,
            attempt.outcome,
            "" if attempt.status_code is None else attempt.status_code,
            attempt.error,
            attempt.duration_ms,
            round(attempt.wait_s * 1000),
            self._invitation,
            most,
        )
        return self._call("webhook_settle", [id], args, lambda answer: str(answer[0]))


def _parse_sent(answer: list[Any]) -> Sent:
    wait_ms = int(answer[1])
    return Sent(int(answer[0]), None if wait_ms < 0 else wait_ms / 1000)


def _parse_claim(answer: list[str]) -> DeliveryClaim:
    if answer[0] != "ok":
        return DeliveryClaim(str(answer[0]))
    _, number, url, ended_ms, job, trace = answer
    return DeliveryClaim("ok", int(number), url, int(ended_ms), json.loads(job), trace)
