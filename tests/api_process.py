"""The API as a process of its own, for tests that kill it or measure it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import httpx2
import psutil

from ops.process import with_parent_death_signal
from tasks.settings import Settings
from tests.redis_server import free_port
from tests.service import ROOT, eventually

_API = """
from api.server import serve
from tasks.settings import load_settings
serve(load_settings())
"""


class ApiProcess:
    """One API server on a loopback port: a free one, unless it is given.

    Attributes:
        url: where it answers.
    """

    def __init__(self, settings: Settings, folder: Path, port: int | None = None) -> None:
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"api-{port}.log"
        environment = {**settings.renders_as_environment, "CARPOOL_PORT": str(port)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal([sys.executable, "-c", _API], signal.SIGKILL),
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        eventually(f"{self.url} answers\n{self.log.read_text()}", self._answers)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def rss(self) -> int:
        """Bytes of memory that it takes now."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the API ended:\n{self.log.read_text()}")
        try:
            return httpx2.get(f"{self.url}/health/accepting", timeout=5, trust_env=False).status_code == 200
        except httpx2.TransportError:
            return False
