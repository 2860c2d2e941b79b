"""Workers of webhooks without processes: the very scripts, a receiver that remembers, and what can be lost between."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from tasks import keys
from tasks.app import plain_celery
from tasks.invitations import invitation_template
from tasks.settings import Settings
from tasks.webhook_calls import Attempt, WebhookCalls, event_id, job_of_event
from tests.ledger_harness import LedgerOnAClock
from tests.ledger_workers import FaultyLedger

LEASE_S = 25
_MOST = 8
_nonces = itertools.count(1)


@cache
def _template() -> str:
    return invitation_template(plain_celery(Settings()), keys.WEBHOOK_TASK)


@dataclass(slots=True)
class Told:
    """What the receiver has heard: the statuses that each event came with."""

    events: dict[str, list[str]] = field(default_factory=dict)

    def hear(self, id: str, status: str) -> None:
        self.events.setdefault(event_id(id), []).append(status)

    def knows(self, id: str) -> bool:
        return event_id(id) in self.events


@dataclass(slots=True)
class _Attempt:
    """An attempt that has begun. `result`: what the receiver said, None before it was asked."""

    id: str
    nonce: str
    status: str
    result: Attempt | None = None


class Deliverer:
    """One worker of webhooks with one thread: takes a message, claims, sends, settles, each a step of its own."""

    def __init__(self, ledger: LedgerOnAClock, told: Told) -> None:
        self._ledger = FaultyLedger(ledger)
        self._told = told
        self.calls = WebhookCalls(ledger.settings, _template())
        self.paused = False
        self._attempt: _Attempt | None = None

    def pump(self) -> None:
        self._ledger.run(self.calls.pump_webhooks("1 here w", 5000, _MOST))

    def turn(self, fails: bool = False, faults: tuple[str, ...] = ()) -> None:
        """The next step; the receiver fails where it is asked in this one."""
        self._ledger.faults.extend(faults)
        try:
            self._step(fails)
        except RedisConnectionError:
            # a claim that is not known to have been made is dropped; an end is told again
            if self._attempt is not None and self._attempt.result is None:
                self._attempt = None
        self._ledger.faults.clear()

    def _step(self, fails: bool) -> None:
        attempt = self._attempt
        if attempt is None:
            self._begin()
        elif attempt.result is None:
            self._told.hear(attempt.id, attempt.status)
            attempt.result = Attempt("retry", 500, wait_s=5) if fails else Attempt("delivered", 200)
        else:
            verdict = self._ledger.run(self.calls.settle_delivery(attempt.id, attempt.nonce, attempt.result, _MOST))
            assert verdict in ("delivered", "pending", "fenced")
            self._attempt = None

    def _begin(self) -> None:
        message: Any = self._ledger.client.rpop(keys.WEBHOOK_QUEUE)
        if not message:
            return
        id, nonce = job_of_event(json.loads(message)["headers"]["id"]), f"attempt{next(_nonces)}"
        claim = self._ledger.run(self.calls.claim_delivery(id, nonce, LEASE_S * 1000))
        if claim.verdict == "ok":
            assert claim.job["id"] == id
            assert claim.job["status"] not in ("queued", "running"), "an event of a job that lives"
            self._attempt = _Attempt(id, nonce, claim.job["status"])
