"""One attempt to deliver an event: claimed in the ledger, sent, and settled there."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog
from redis.exceptions import ConnectionError, TimeoutError

from tasks.ledger import SyncLedger
from tasks.settings import Settings
from tasks.trace_context import trace_id_of
from tasks.webhook_calls import Attempt, DeliveryClaim, WebhookCalls, event_id
from tasks.webhook_urls import WebhookUrl, parse_webhook_url
from worker.webhooks.backoff import retry_after_seconds, wait_before_next
from worker.webhooks.event import event_body, signed_headers
from worker.webhooks.hosts import Hosts
from worker.webhooks.sender import DeliveryError, Sender

if TYPE_CHECKING:
    from worker.webhooks.spans import WebhookSpans

_log = structlog.get_logger("carpool.webhooks")
#: Beyond the attempt's own bound, so that its end can be told also where Redis was away for a moment.
_LEASE_MARGIN_S: Final = 10.0
_SETTLE_AGAIN_S: Final = 0.5
_GONE: Final = 410


class Deliverer:
    """Delivers; one for all threads of a process.

    Args:
        secrets: each signs, so that receivers may change theirs one after the other.
        most_messages: in the broker at once.
        spans: None where traces are off.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: SyncLedger,
        calls: WebhookCalls,
        sender: Sender,
        secrets: Sequence[str],
        most_messages: int,
        spans: WebhookSpans | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._calls = calls
        self._sender = sender
        self._secrets = secrets
        self._most_messages = most_messages
        self._spans = spans
        self._hosts = Hosts(max(1, settings.webhook_concurrency // 2))
        self._user_agent = f"Carpool/{version('carpool')}"
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Begin no further attempt; those that run come to their end."""
        self._stopping.set()

    def deliver(self, id: str) -> None:
        """Make the next attempt for this job, if there is one to be made now.

        Raises:
            RedisError: the ledger cannot be reached. The outbox then has the job looked at again.
        """
        if self._stopping.is_set():
            return
        nonce = uuid.uuid4().hex
        lease_s = self._settings.webhook_timeout_s + _LEASE_MARGIN_S
        until = time.monotonic() + lease_s
        claim = self._ledger.run(self._calls.claim_delivery(id, nonce, round(lease_s * 1000)))
        if claim.verdict != "ok":
            _log.debug("webhook_not_due", job_id=id, verdict=claim.verdict)
            return
        began_ns = time.time_ns()
        attempt = self._attempt(id, claim)
        if self._spans is not None and claim.trace and attempt.outcome != "busy":
            self._spans.attempted(id, claim, attempt, began_ns)
        verdict = self._settle(id, nonce, attempt, until)
        log = _log.debug if attempt.outcome == "busy" else _log.info
        # neither URL nor answer: a URL may hold a secret
        log(
            "webhook_attempted",
            job_id=id,
            attempt=claim.number,
            verdict=verdict,
            status_code=attempt.status_code,
            error=attempt.error.partition(":")[0],
            duration_ms=attempt.duration_ms,
            **({"trace_id": trace_id_of(claim.trace)} if claim.trace else {}),
        )

    def _attempt(self, id: str, claim: DeliveryClaim) -> Attempt:
        try:
            url = parse_webhook_url(claim.url)
        except ValueError as error:  # a release with other rules took it
            return Attempt("failed", error=f"url: {error}")
        with self._hosts.enter(url.host, id) as put_off_s:
            if put_off_s:
                return Attempt("busy", wait_s=put_off_s)
            return self._send(id, claim, url)

    def _send(self, id: str, claim: DeliveryClaim, url: WebhookUrl) -> Attempt:
        body = event_body(claim.job, claim.ended_ms)
        headers = [
            ("User-Agent", self._user_agent),
            *signed_headers(self._secrets, event_id(id), body, datetime.now(UTC)),
        ]
        began = time.monotonic()
        retry_after_s, status_code, error = 0.0, None, ""
        try:
            answer = self._sender.post(url, headers, body)
        except DeliveryError as failed:
            error = str(failed)
        else:
            status_code, retry_after_s = answer.status_code, retry_after_seconds(answer.retry_after)
        duration_ms = round((time.monotonic() - began) * 1000)
        if status_code is not None and 200 <= status_code < 300:
            return Attempt("delivered", status_code, duration_ms=duration_ms)
        if status_code == _GONE:
            return Attempt("failed", status_code, duration_ms=duration_ms)  # the receiver wants no more of them
        wait_s = wait_before_next(claim.number, self._settings.webhook_backoff_s, retry_after_s)
        return Attempt("retry", status_code, error, duration_ms, wait_s)

    def _settle(self, id: str, nonce: str, attempt: Attempt, until: float) -> str:
        call = self._calls.settle_delivery(id, nonce, attempt, self._most_messages)
        while True:
            try:
                return self._ledger.run(call)
            except (ConnectionError, TimeoutError):
                # from then on another attempt may have begun: its receiver knows the event by its id
                if time.monotonic() >= until:
                    raise
            time.sleep(_SETTLE_AGAIN_S)
