"""Flower, run on our own Celery application: no `-A`, which would look for it in the user's working directory first."""

from __future__ import annotations

import atexit
import signal
from typing import Any

from flower.app import Flower
from flower.command import apply_env_options, apply_options, extract_settings, setup_logging, sigterm_handler
from flower.urls import settings as flower_settings
from flower.views.monitor import Metrics
from tornado.options import options
from tornado.web import authenticated

from tasks.app import create_celery
from tasks.lifeline import watch_lifeline
from tasks.logs import configure_logging
from tasks.settings import Settings


class _Metrics(Metrics):  # type: ignore[misc] # Flower has no types
    """Flower's own page of metrics asks nobody for the password."""

    @authenticated
    async def get(self) -> None:
        await super().get()


class _Flower(Flower):  # type: ignore[misc] # the same
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        # these come before Flower's own
        self.add_handlers(r".*", [(r"/metrics", _Metrics)])


def run_flower(settings: Settings, port: int) -> None:
    """Serve Flower on the loopback address until SIGTERM; the password stands in FLOWER_BASIC_AUTH."""
    watch_lifeline()
    # what the command `celery flower` does, with our application in the place of Flower's
    apply_env_options()
    apply_options("flower", ["--address=127.0.0.1", f"--port={port}"])
    extract_settings()
    configure_logging(settings, "flower")
    setup_logging()  # of Tornado, which leaves handlers that are there
    flower = _Flower(capp=create_celery(settings), options=options, **flower_settings)
    atexit.register(flower.stop)
    signal.signal(signal.SIGTERM, sigterm_handler)
    flower.start_http_server()
    try:
        flower.start()
    except (KeyboardInterrupt, SystemExit):
        return
