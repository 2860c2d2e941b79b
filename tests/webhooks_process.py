"""The worker that delivers webhooks as a process of its own, for tests that kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Self

from ops.process import with_parent_death_signal
from tasks.redis_clients import connect
from tasks.settings import Settings
from tasks.webhook_workers import list_webhook_workers
from tests.receiver import SECRET
from tests.service import BOUND_S, ROOT, eventually

_WEBHOOKS = """
import sys
from tasks.settings import load_settings
from worker.webhooks.main import run
sys.exit(run(load_settings(), sys.argv[1]))
"""


def webhook_settings(redis_url: str, **more: Any) -> Settings:
    """Settings under which a receiver of this machine is told, and soon told again."""
    given: dict[str, Any] = {
        "engine": "simulated",
        "simulated_step_ms": 0,
        "redis_url": redis_url,
        "webhook_secret": SECRET,
        "webhook_allow_private": True,
        "webhook_backoff_s": 0.2,
        "webhook_timeout_s": 2,
        **more,
    }
    return Settings(**given)


class WebhooksProcess:
    """`carpool webhooks` without its checks. It ends with the block."""

    def __init__(self, settings: Settings, folder: Path, name: str = "webhooks") -> None:
        self._settings = settings
        self.log = folder / f"{name}-{uuid.uuid4().hex[:6]}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal([sys.executable, "-c", _WEBHOOKS, name], signal.SIGKILL),
                cwd=ROOT,
                env={**os.environ, **settings.renders_as_environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> Self:
        """Wait until it looks at the outbox."""
        with connect(self._settings) as client:

            def looks() -> bool:
                assert self._process.poll() is None, f"it ended:\n{self.log.read_text()}"
                return self.pid in {worker.pid for worker in list_webhook_workers(client)}

            eventually("webhooks are delivered", looks)
        return self

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, bound_s: float = BOUND_S) -> int:
        return self._process.wait(bound_s)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.kill()
