"""Logs: one event a line, with fields; text on a terminal, JSON elsewhere. Neither shows variables of a traceback."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

import structlog

from tasks.settings import Settings


def configure_logging(settings: Settings, stream: TextIO = sys.stderr) -> None:
    """Set up this process's logs, those of its libraries included. Prompts are never logged."""
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not stream.isatty())
    shared: list[Any] = [
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
    handler = logging.StreamHandler(stream)
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
