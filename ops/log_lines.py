"""Lines of logs, as the supervisor writes and shows them: JSON in files, text for people."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

import structlog

from ops.errors import OperationError

_log = structlog.get_logger("carpool.process")
#: What stands first in a line for people, and what they know.
_FIRST: Final = ("timestamp", "level", "event")
_KNOWN: Final = frozenset({"role", "process", "logger"})


def supervisor_line(event: str, **fields: Any) -> str:
    """A line of the supervisor's own, as JSON with the fields that all our logs have."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"role": "supervisor", **fields, "event": event, "level": "info", "timestamp": now})


def readable(line: str) -> str:
    """A line of a log for people: what is JSON becomes text, anything else stays as it is."""
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    if not isinstance(fields, dict) or "event" not in fields:
        return line
    rest = [f"{name}={value}" for name, value in fields.items() if name not in _KNOWN and name not in _FIRST]
    return " ".join([*(str(fields[name]) for name in _FIRST if name in fields), *rest])


def log_error(error: Exception, exit_code: int) -> None:
    """Why a process ends, as a line of its log."""
    if isinstance(error, OperationError):
        fix = {"fix": error.fix} if error.fix else {}
        _log.error("process_cannot_run", cause=error.cause, exit_code=int(exit_code), **fix)
    else:
        _log.error("process_cannot_run", cause=str(error), exit_code=int(exit_code))
