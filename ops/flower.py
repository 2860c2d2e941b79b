"""Flower, run on our own Celery application: no `-A`, which would look for it in the user's working directory first."""

from __future__ import annotations

from tasks.app import create_celery
from tasks.lifeline import watch_lifeline
from tasks.settings import Settings


def run_flower(settings: Settings, port: int) -> None:
    """Serve Flower on the loopback address until SIGTERM; the password stands in FLOWER_BASIC_AUTH."""
    watch_lifeline()
    create_celery(settings).start(["flower", "--address=127.0.0.1", f"--port={port}"])
