"""What a worker tells of its rides: a line in the log for each turn of a job's life, and its spans where it is traced.

The engine's thread notes what is to be told, and another one tells it.
"""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from tasks.ledger_types import Claim
from tasks.life import until_claim
from tasks.reports import Reports
from tasks.trace_context import trace_id_of
from worker.workload_manager import Ride

if TYPE_CHECKING:
    from worker.ride_spans import RideSpans

_log = structlog.get_logger("carpool.jobs")
_NS = 1e9


class RideReports:
    """Tells of the rides of one worker. Every method returns at once.

    Args:
        reports: tells, on its thread; None: nothing is told.
        spans: None where traces are off.
        worker: its name.
        model: the name that it serves its model under.
    """

    def __init__(
        self, reports: Reports | None = None, spans: RideSpans | None = None, worker: str = "", model: str = ""
    ) -> None:
        self._reports = reports
        self._spans = spans
        self._worker = worker
        self._model = model
        self._logs = logging.getLogger("carpool.jobs").isEnabledFor(logging.INFO)

    def claimed(self, ride: Ride, claim: Claim) -> None:
        """A job takes a slot."""
        self._put(partial(self._tell_claim, ride.id, ride.trace, claim, ride.times.claimed_ns))

    def first_token(self, ride: Ride) -> None:
        """The first token since it boarded has come."""
        if self._logs:
            times = ride.times
            after_s = (times.legs[-1].first_token_ns - times.claimed_ns) / _NS
            self._line("job_first_token", ride, after_s=round(after_s, 4))

    def model_died(self, ride: Ride, cause: str) -> None:
        """The model process died while it had this sequence."""
        if self._logs:
            self._line("job_lost_its_model_process", ride, cause=cause)

    def over(self, ride: Ride, outcome: str) -> None:
        """A ride is over. `outcome`: the final status that this owner wrote, or handed_back."""
        self._put(partial(self._tell_end, ride, outcome, time.time_ns()))

    def _put(self, report: Any) -> None:
        if self._reports is not None and (self._logs or self._spans is not None):
            self._reports.put(report)

    def _line(self, event: str, ride: Ride, **fields: Any) -> None:
        if self._reports is not None:
            fields |= {"job_id": ride.id, "ride": ride.epoch, "tokens": len(ride.ids), **_traced(ride.trace)}
            self._reports.put(partial(_log.info, event, **fields))

    # --- on the thread of the reports --------------------------------------------------------------------------------

    def _tell_claim(self, job: str, trace: str, claim: Claim, claimed_ns: int) -> None:
        *before, own = events = until_claim(claim.life, claim.epoch)
        if self._logs:
            was_lost = bool(before) and before[-1].event == "lost"
            _log.info(
                "job_recovered" if was_lost else "job_claimed",
                job_id=job,
                ride=claim.epoch,
                tokens=claim.k,
                waited_s=own.waited_ms / 1000,
                **({"lost_worker": before[-1].worker} if was_lost else {}),
                **_traced(trace),
            )
        if self._spans is not None and trace:
            self._spans.claimed(job, trace, events, claimed_ns, self._model)

    def _tell_end(self, ride: Ride, outcome: str, end_ns: int) -> None:
        end, times = ride.end, ride.times
        handed_back = outcome == "handed_back"
        finish_reason = "" if handed_back else (end.finish_reason if end and end.finish_reason else outcome)
        error = {"failed": "worker_died", "expired": "deadline_exceeded"}.get(outcome, "")
        if outcome == "failed" and end is not None and end.error:
            error = str(json.loads(end.error)["code"])
        if self._logs:
            first_ns = times.legs[-1].first_token_ns if times.legs else 0
            generated = len(ride.ids) - times.legs[-1].position if times.legs else 0
            rate = (generated - 1) / (end_ns - first_ns) * _NS if first_ns and generated > 1 else None
            _log.info(
                "job_handed_back" if handed_back else "job_ended",
                job_id=ride.id,
                ride=ride.epoch,
                tokens=len(ride.ids),
                ride_s=round((end_ns - times.claimed_ns) / _NS, 4),
                **({} if handed_back else {"status": outcome, "finish_reason": finish_reason}),
                **({"error": error} if error else {}),
                **({"tokens_per_s": round(rate, 1)} if rate else {}),
                **_traced(ride.trace),
            )
        if self._spans is not None and ride.trace:
            from worker.ride_spans import RideReport

            self._spans.over(
                RideReport(
                    job=ride.id,
                    trace=ride.trace,
                    epoch=ride.epoch,
                    worker=self._worker,
                    claimed_ns=times.claimed_ns,
                    end_ns=end_ns,
                    legs=tuple(times.legs),
                    stop_ns=times.stop_ns,
                    tokens_before=ride.claimed_at,
                    tokens=len(ride.ids),
                    prompt_tokens=ride.prompt_tokens,
                    outcome=outcome,
                    finish_reason=finish_reason,
                    error_type=error,
                    request=self._request(ride),
                )
            )

    def _request(self, ride: Ride) -> dict[str, Any]:
        """What was asked for, by the names of OpenTelemetry's conventions; never what is said in it."""
        asked = {
            "gen_ai.operation.name": "chat" if ride.messages is not None else "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": ride.params.max_tokens,
            "gen_ai.request.temperature": ride.params.temperature,
            "gen_ai.request.top_p": ride.params.top_p,
            "gen_ai.request.top_k": ride.params.top_k,
            "gen_ai.request.frequency_penalty": ride.params.frequency_penalty,
            "gen_ai.request.presence_penalty": ride.params.presence_penalty,
            "gen_ai.request.seed": ride.seed,
        }
        return {name: value for name, value in asked.items() if value is not None}


def _traced(trace: str) -> dict[str, str]:
    trace_id = trace_id_of(trace)
    return {"trace_id": trace_id} if trace_id else {}
