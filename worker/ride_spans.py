"""Spans of rides: `queue` before each, `ride` from claim to end, in it `prefill` and `decode`; all in the job's trace.

A ride's span has an id that follows from job and ride. So the next ride can link to it; and where a worker was killed
before it could tell, its successor tells what the ledger knows of that ride.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)

from tasks.life import LifeEvent
from tasks.tracing import Tracing
from worker.ride_times import Leg

_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class RideReport:
    """A ride that is over, as it is told.

    Attributes:
        outcome: the job's final status, or handed_back.
        error_type: code of the error that it ended with, "" where it ended with none.
        request: attributes of what was asked for.
    """

    job: str
    trace: str
    epoch: int
    worker: str
    claimed_ns: int
    end_ns: int
    legs: tuple[Leg, ...]
    stop_ns: int
    tokens_before: int
    tokens: int
    prompt_tokens: int | None
    outcome: str
    finish_reason: str
    error_type: str
    request: Mapping[str, Any]


class RideSpans:
    """Makes the spans of one worker's rides. Called by one thread."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._tracer = tracing.tracer

    def claimed(self, job: str, trace: str, events: list[LifeEvent], claimed_ns: int, model: str) -> None:
        """A job was claimed: tell how long it had waited, and of the ride before, where its worker could not.

        Args:
            events: what happened to the job, up to this claim.
        """
        parent = self._tracing.context_of(trace)
        own = events[-1]
        attributes: dict[str, Any] = {"carpool.job.id": job, "carpool.ride": own.epoch, "gen_ai.request.model": model}
        start_ns = claimed_ns - own.waited_ms * _MS
        queue = self._tracer.start_span("queue", parent, SpanKind.INTERNAL, attributes=attributes, start_time=start_ns)
        if start_ns <= (invited_ns := self._local(own.invited_ms, own, claimed_ns)) <= claimed_ns:
            queue.add_event("invited", timestamp=invited_ns)
        queue.end(claimed_ns)
        if len(events) > 1 and events[-2].event == "lost":
            self._lost(job, parent, events, claimed_ns, model)

    def over(self, ride: RideReport) -> None:
        """A ride is over, by this worker's own word."""
        parent = self._tracing.context_of(ride.trace)
        attributes = {
            **ride.request,
            **_ride_attributes(ride.job, ride.epoch, ride.worker, ride.tokens_before, ride.tokens, ride.outcome),
        }
        if ride.prompt_tokens is not None:
            attributes["gen_ai.usage.input_tokens"] = ride.prompt_tokens
        if ride.finish_reason:
            attributes["gen_ai.response.finish_reasons"] = (ride.finish_reason,)
        span = self._ride_span(ride.job, ride.epoch, parent, attributes, ride.claimed_ns)
        if ride.stop_ns:
            span.add_event("stop requested", {"carpool.outcome": ride.outcome}, ride.stop_ns)
        within = set_span_in_context(span, parent)
        for leg in ride.legs:
            self._leg(within, leg, ride.end_ns)
            if leg.cause:
                span.add_event("model process died", {"carpool.cause": leg.cause}, leg.end_ns)
        for before, leg in pairwise(ride.legs):
            if before.cause:
                span.add_event("boarded again", {"carpool.position": leg.position}, leg.boarded_ns)
        if ride.error_type:
            span.set_attribute("error.type", ride.error_type)
            span.set_status(StatusCode.ERROR)
        span.end(ride.end_ns)

    def _lost(self, job: str, parent: Context, events: list[LifeEvent], now_ns: int, model: str) -> None:
        """The ride whose worker was lost, from the ledger's notes: they are of another clock than ours."""
        own, lost = events[-1], events[-2]
        begin = next((i for i in reversed(range(len(events) - 1)) if events[i].event == "claimed"), None)
        if begin is None:
            return
        claim = events[begin]
        leg = Leg(self._local(claim.at_ms, own, now_ns), claim.tokens)
        end_ns = self._local(lost.at_ms, own, now_ns)
        attributes = _ride_attributes(job, claim.epoch, claim.worker, claim.tokens, lost.tokens, "lost")
        attributes |= {"gen_ai.request.model": model, "error.type": "worker_lost"}
        span = self._ride_span(job, claim.epoch, parent, attributes, leg.boarded_ns)
        within = set_span_in_context(span, parent)
        for event in events[begin + 1 : -2]:
            at_ns = self._local(event.at_ms, own, now_ns)
            if event.event == "first_token":
                leg.first_token_ns = at_ns
            elif event.event == "died":
                leg.end_ns = at_ns
                self._leg(within, leg, at_ns)
                span.add_event("model process died", {"carpool.cause": event.cause}, at_ns)
                leg = Leg(at_ns, event.tokens)
        self._leg(within, leg, end_ns)
        span.add_event("worker lost", {"carpool.position": lost.tokens}, end_ns)
        span.set_status(StatusCode.ERROR)
        span.end(end_ns)

    @staticmethod
    def _local(at_ms: int, own: LifeEvent, claimed_ns: int) -> int:
        """A time of the ledger's clock by ours; the claim is known by both."""
        return claimed_ns + (at_ms - own.at_ms) * _MS

    def _ride_span(self, job: str, epoch: int, parent: Context, attributes: Mapping[str, Any], start_ns: int) -> Span:
        links = []
        if epoch > 1:
            trace_id = get_current_span(parent).get_span_context().trace_id
            before = SpanContext(trace_id, ride_span_id(job, epoch - 1), True, TraceFlags(TraceFlags.SAMPLED))
            links.append(Link(before, {"carpool.link": "the ride before"}))
        self._tracing.preset.set(ride_span_id(job, epoch))
        return self._tracer.start_span(
            "ride", parent, SpanKind.CONSUMER, attributes=attributes, links=links, start_time=start_ns
        )

    def _leg(self, within: Context, leg: Leg, end_ns: int) -> None:
        end_ns = leg.end_ns or end_ns
        prefill = self._tracer.start_span(
            "prefill", within, attributes={"carpool.position": leg.position}, start_time=leg.boarded_ns
        )
        prefill.end(leg.first_token_ns or end_ns)
        if leg.first_token_ns:
            self._tracer.start_span("decode", within, start_time=leg.first_token_ns).end(end_ns)


def ride_span_id(job: str, epoch: int) -> int:
    """The id of a ride's span: the same for whoever tells of it."""
    digest = hashlib.blake2b(f"{job}\n{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) or 1


def _ride_attributes(job: str, epoch: int, worker: str, before: int, tokens: int, outcome: str) -> dict[str, Any]:
    return {
        "carpool.job.id": job,
        "carpool.ride": epoch,
        "carpool.worker": worker,
        "carpool.position": before,
        "carpool.outcome": outcome,
        "gen_ai.provider.name": "carpool",
        "gen_ai.response.id": job,
        "gen_ai.usage.output_tokens": tokens,
    }
