"""Logs: one event a line, with fields; text on a terminal, JSON elsewhere. Neither shows variables of a traceback.

JSON means every line that Python writes: those of libraries, warnings, and exceptions that nobody caught, too.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog

from tasks.process_name import process_name
from tasks.settings import Settings

#: Of roles that a supervisor starts, and of the Model worker.
LogRole = Literal["api", "worker", "model-worker", "webhooks", "flower"]
_log = structlog.get_logger("carpool.process")


class JsonHandler(logging.StreamHandler[TextIO]):
    """A handler that writes JSON."""


def configure_logging(settings: Settings, role: LogRole, name: str = "", stream: TextIO = sys.stderr) -> None:
    """Set up this process's logs, those of its libraries included. Prompts are never logged.

    Args:
        role: stands in every line of JSON, as does `name`, which process of that role it is.
    """
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not stream.isatty())
    who = {"role": role, "process": name or process_name(role)}

    def add_who(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.update(who)
        return event

    shared: list[Any] = [
        *([add_who] if as_json else []),
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer(ensure_ascii=False)
        if as_json
        # local variables may hold prompts, so no rich traceback
        else structlog.dev.ConsoleRenderer(
            colors=stream.isatty() and "NO_COLOR" not in os.environ,
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    handler = JsonHandler(stream) if as_json else logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("carpool").setLevel(settings.log_level.upper())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    if as_json:
        _log_what_python_prints()


def logs_are_json() -> bool:
    """Whether this process writes its logs as JSON: then a plain line does not belong among them."""
    return any(isinstance(handler, JsonHandler) for handler in logging.getLogger().handlers)


def _log_what_python_prints() -> None:
    logging.captureWarnings(True)

    def of_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            _log.critical("process_ended_by_exception", exc_info=(kind, error, trace))

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not issubclass(arguments.exc_type, SystemExit):
            thread = arguments.thread.name if arguments.thread else None
            caught = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
            _log.error("thread_ended_by_exception", thread=thread, exc_info=caught)

    sys.excepthook = of_process
    threading.excepthook = of_thread
