"""What this process has answered, counted: by endpoint and status, and its refusals by code."""

from __future__ import annotations

from collections import Counter
from typing import Final

from starlette.types import Scope

from tasks.codes import CarpoolError

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER: Final = "other"


class HttpCounts:
    """Counts requests when their answers start; used by the event loop alone.

    Attributes:
        requests: by method, endpoint and status. An endpoint is the path as it was declared (`/jobs/{id}`), so that
            nobody can make up new ones.
        refusals: by error code, of requests that made no job: how those ended that did is counted in the ledger.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.refusals: Counter[str] = Counter()

    def note(self, scope: Scope, status: int) -> None:
        """The answer to this request starts."""
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        endpoint = getattr(scope.get("route"), "path", _OTHER)
        self.requests[method, endpoint, status] += 1
        error = scope["state"].get("error")
        if isinstance(error, CarpoolError):
            if error.job_id is None:
                self.refusals[error.code.name] += 1
        elif status == 500:
            self.refusals["internal_error"] += 1
