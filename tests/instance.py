"""A whole instance under `carpool up`, as a user would run it, for tests of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from ops.instance import RunFile
from ops.redis_guardian import read_server

CARPOOL = str(Path(sys.executable).with_name("carpool"))
READY_S = 60.0


def plain_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without a developer's settings, with these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CARPOOL_", "FLOWER_"))}
    return {**kept, **(settings or {})}


def carpool(
    *arguments: str, settings: Mapping[str, str] | None = None, cwd: Path | None = None, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [CARPOOL, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=plain_environment(settings),
        cwd=cwd,
        input=stdin,
    )


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    """Wait for other processes to have done something that they cannot tell us."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)  # as said: they cannot tell


class Instance:
    """`carpool up` on the simulated engine, a free port and a folder of its own."""

    def __init__(self, folder: Path, *options: str, settings: Mapping[str, str] | None = None) -> None:
        self.data_dir = folder / "data"
        self.settings = {"CARPOOL_SIMULATED_STEP_MS": "10", **(settings or {})}
        self.options = ("--engine", "simulated", "--port", "0", "--data-dir", str(self.data_dir), *options)
        self.output_path = folder / "up.out"
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: set[int] = set()

    def start(self) -> Self:
        """Start it; it is not ready yet."""
        with self.output_path.open("ab") as output:
            self._process = subprocess.Popen(
                [CARPOOL, "up", *self.options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=plain_environment(self.settings),
                cwd=self.output_path.parent,
                start_new_session=True,
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def ready(self, seconds: float = READY_S) -> Self:
        """Return when the closing box has been shown."""

        def shown() -> bool:
            assert self.process.poll() is None, f"up ended with {self.process.returncode}:\n{self.output}"
            return "Carpool is ready" in self.output

        until(shown, "the box is shown", seconds)
        return self

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command on this instance."""
        return carpool(*command.split(), "--data-dir", str(self.data_dir), *arguments)

    def status(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("status", "--json").stdout)
        self._pids |= {process["pid"] for process in found if process["pid"]}
        return found

    def pid(self, role: str) -> int:
        """Process id of the first process of a role."""
        pids = [process["pid"] for process in self.status() if process["role"] == role]
        assert pids, f"no {role} in the status"
        assert pids[0] is not None, f"the {role} has no process"
        return int(pids[0])

    def all_pids(self) -> set[int]:
        """Every process of this instance and theirs, that is or was seen."""
        self.status()
        for pid in tuple(self._pids):
            try:
                self._pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
            except psutil.NoSuchProcess:
                continue
        return set(self._pids)

    def left(self) -> set[int]:
        """Those of the processes seen so far that still run."""
        return {pid for pid in self._pids if not ended(pid)}

    def api_url(self) -> str:
        run = RunFile.read(self.data_dir / "run.json")
        assert run is not None
        return run.api_url

    def redis_url(self) -> str:
        run = RunFile.read(self.data_dir / "run.json")
        assert run is not None
        return run.redis_url

    def interrupt(self, sig: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(sig)

    def close(self) -> None:
        """End whatever is left of it."""
        if self._process is None:
            return
        pids = set()
        if self._process.poll() is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            pids = {child.pid for child in children}
            self._process.kill()
        self._process.wait()
        server = read_server(self.data_dir / "redis")
        if server is not None and server.alive:
            pids.add(server.pid)
        for pid in pids:
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
