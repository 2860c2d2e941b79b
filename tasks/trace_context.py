"""The trace that a job is a part of, as its record keeps it: W3C's traceparent, and behind a blank its tracestate.

Nothing here needs OpenTelemetry: a process that makes no spans passes a trace on all the same.
"""

from __future__ import annotations

import re
from typing import Final

_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
#: What every participant has to pass on, by W3C's recommendation.
_MOST_STATE: Final = 512
_SAMPLED: Final = 1


def trace_context(traceparent: str, tracestate: str = "") -> str:
    """A trace from these two headers; "" where they name none, or one that is not sampled."""
    if not _TRACEPARENT.fullmatch(traceparent) or not int(traceparent[-2:], 16) & _SAMPLED:
        return ""
    state = tracestate if len(tracestate) <= _MOST_STATE and tracestate.isascii() and tracestate.isprintable() else ""
    return f"{traceparent} {state}".rstrip()


def headers_of(trace: str) -> dict[str, str]:
    """The two headers of a trace."""
    traceparent, _, tracestate = trace.partition(" ")
    return {"traceparent": traceparent, **({"tracestate": tracestate} if tracestate else {})}


def trace_id_of(trace: str) -> str | None:
    """Its id, for a log; None where there is no trace."""
    return trace[3:35] or None
