"""What the API tells of jobs in its log: what stands in no prompt."""

from __future__ import annotations

from typing import Any

import structlog

from tasks.ledger_types import Acceptance
from tasks.trace_context import trace_id_of

_log = structlog.get_logger("carpool.jobs")


def log_accepted(acceptance: Acceptance) -> None:
    """A job or group was accepted."""
    fields: dict[str, Any] = {"model": acceptance.pool, "owner": acceptance.owner, "priority": acceptance.priority}
    if acceptance.is_group:
        fields["jobs"] = len(acceptance.jobs)
    if trace_id := trace_id_of(acceptance.trace):
        fields["trace_id"] = trace_id
    _log.info("job_accepted", job_id=acceptance.id, **fields)
