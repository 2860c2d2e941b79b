"""A span for each attempt to deliver a webhook, in the trace of its job."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.trace import SpanKind, StatusCode

from tasks.tracing import Tracing
from tasks.webhook_calls import Attempt, DeliveryClaim


class WebhookSpans:
    """Makes them; one for all threads of a process."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def attempted(self, job: str, claim: DeliveryClaim, attempt: Attempt, began_ns: int) -> None:
        """An attempt is over. Its URL is not told, for it may hold a secret."""
        attributes: dict[str, Any] = {
            "carpool.job.id": job,
            "carpool.webhook.attempt": claim.number,
            "carpool.outcome": attempt.outcome,
            "http.request.method": "POST",
        }
        if attempt.status_code is not None:
            attributes["http.response.status_code"] = attempt.status_code
        span = self._tracing.tracer.start_span(
            "webhook",
            self._tracing.context_of(claim.trace),
            SpanKind.CLIENT,
            attributes=attributes,
            start_time=began_ns,
        )
        if attempt.outcome != "delivered":
            span.set_attribute("error.type", attempt.error.partition(":")[0] or str(attempt.status_code))
            span.set_status(StatusCode.ERROR)
        span.end(time.time_ns())
