"""A private instance of Carpool for a bench: everything as a user runs it, in a folder that goes when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from ops.client import ApiClient
from ops.errors import OperationError
from ops.instance import DataDir, Role, RunFile
from ops.process import ProcessIdentity, signal_group, wait_until_ended, with_parent_death_signal
from ops.up import carpool_command
from tasks.settings import PREFIX

#: A model's first conversion, on a machine that has other work too.
READY_S: Final = 300.0
_PROBE_S: Final = 0.1
_DRAIN_S: Final = 2
_STOP_S: Final = 30.0
_SHOWN_LINES: Final = 15


class BenchInstance:
    """`carpool up` on free ports. It ends with the block, and with this process however that ends.

    Args:
        settings: those that differ from the defaults.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = {"drain_s": _DRAIN_S, "port": 0, **settings}
        self._folder = tempfile.TemporaryDirectory(prefix="carpool-bench-", ignore_cleanup_errors=True)
        self._data = DataDir(Path(self._folder.name) / "data")
        self._output = Path(self._folder.name) / "up.out"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[ProcessIdentity] = set()

    def __enter__(self) -> Self:
        try:
            self._start()
            self._await_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def url(self) -> str:
        """Where its API is."""
        return self._run_file().api_url

    @property
    def redis_url(self) -> str:
        return self._run_file().redis_url

    def process(self, role: Role) -> psutil.Process:
        """The first process of this role. Raises OperationError where it is gone."""
        for entry in self._run_file().processes:
            process = entry.identity.process() if entry.role == role and entry.identity is not None else None
            if process is not None:
                return process
        raise self._failed(f"its {role} has ended")

    def _run_file(self) -> RunFile:
        run = RunFile.read(self._data.run_file)
        if run is None:
            raise self._failed("it has no run file")
        return run

    def _start(self) -> None:
        environment = {f"{PREFIX}{name.upper()}": str(value) for name, value in self._settings.items()}
        command = [*carpool_command("up"), "--data-dir", str(self._data.root)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                with_parent_death_signal(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd=self._folder.name,
                start_new_session=True,  # Ctrl-C is for the bench, which then ends it in order
            )

    def _await_ready(self) -> None:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                raise self._failed("it ended before it was ready")
            run = RunFile.read(self._data.run_file)
            if run is not None and run.processes:
                with suppress(OperationError), ApiClient(run.api_url) as client:
                    client.get("/health/ready")
                    return
            time.sleep(_PROBE_S)  # a process of its own, which has no way to call us
        raise self._failed(f"it was not ready within {READY_S:g} s")

    def _failed(self, what: str) -> OperationError:
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        shown = "\n".join(lines[-_SHOWN_LINES:])
        return OperationError(f"The instance cannot be measured: {what}. It said:\n{shown}", "")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._note_processes(process.pid)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            for left in wait_until_ended(list(self._seen), _DRAIN_S):
                signal_group(left.pid, signal.SIGKILL)
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(left.pid).kill()
        self._folder.cleanup()

    def _note_processes(self, supervisor: int) -> None:
        """All that belong to it, so that none is left, even of a supervisor that did not end them."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(supervisor).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    self._seen.add(ProcessIdentity(child.pid, child.create_time()))
