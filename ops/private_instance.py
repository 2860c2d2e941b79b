"""An instance for benches and soaks alone: everything as a user runs it, in a folder of its own, on free ports."""

from __future__ import annotations

import os
import shutil
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
from ops.leftovers import processes_of
from ops.process import ProcessIdentity, wait_until_ended, with_parent_death_signal
from ops.redis_guardian import read_server
from ops.status import spawned_children
from ops.up import carpool_command
from tasks.settings import PREFIX

#: A developer's settings would change what is measured, but the converted model may come from where they keep it.
KEPT: Final = frozenset({"CARPOOL_CACHE_DIR"})
#: A model's first conversion, on a machine that has other work too.
READY_S: Final = 300.0
_PROBE_S: Final = 0.1
_STOP_S: Final = 60.0
_ENDED_S: Final = 10.0
_SHOWN_LINES: Final = 15


class PrivateInstance:
    """`carpool up` in a folder of its own. It ends with the block, and with this process however that ends.

    Args:
        settings: those that differ from the defaults. Those of the environment do not count.
        purpose: a word in the folder's name.

    Attributes:
        folder: its files; they are removed at the end unless `keep` is set.
        left: processes that were still there after the end, and had to be killed; filled by it.
    """

    def __init__(self, settings: Mapping[str, Any], purpose: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"carpool-{purpose}-"))
        self.keep = False
        self.left: tuple[str, ...] = ()
        self._settings = {"port": 0, **settings}
        self._data = DataDir(self.folder / "data")
        self._output = self.folder / "up.out"
        self._process: subprocess.Popen[bytes] | None = None

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
        return self._run_file().api_url

    @property
    def redis_url(self) -> str:
        return self._run_file().redis_url

    @property
    def runs(self) -> bool:
        """Whether its supervisor lives."""
        return self._process is not None and self._process.poll() is None

    def process(self, role: Role) -> psutil.Process:
        """The first process of a role. Raises OperationError where it is gone."""
        for identity in self.processes(role):
            if (process := identity.process()) is not None:
                return process
        raise self._failed(f"its {role} has ended")

    def processes(self, role: Role) -> list[ProcessIdentity]:
        """The living processes of a role; of the embedded Redis the server, not its guardian."""
        if role == "redis":
            server = read_server(self._data.redis)
            return [server] if server is not None and server.alive else []
        if role == "model-worker":
            workers = [worker.process() for worker in self.processes("worker")]
            return [child for worker in workers for child in spawned_children(worker)]
        entries = [entry for entry in self._run_file().processes if entry.role == role]
        return [entry.identity for entry in entries if entry.identity is not None and entry.identity.alive]

    def last_words(self) -> tuple[str, ...]:
        """The end of what `carpool up` said."""
        lines = self._output.read_text(errors="replace").splitlines() if self._output.exists() else []
        return tuple(lines[-_SHOWN_LINES:])

    def _run_file(self) -> RunFile:
        run = RunFile.read(self._data.run_file)
        if run is None:
            raise self._failed("it has no run file")
        return run

    def _start(self) -> None:
        environment = {f"{PREFIX}{name.upper()}": str(value) for name, value in self._settings.items()}
        clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in KEPT}
        command = [*carpool_command("up"), "--data-dir", str(self._data.root)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                with_parent_death_signal(command, signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**clean, **environment},
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C is for our caller, who then ends us in order
            )

    def _await_ready(self) -> None:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            if not self.runs:
                raise self._failed("it ended before it was ready")
            run = RunFile.read(self._data.run_file)
            if run is not None and run.processes:
                with suppress(OperationError), ApiClient(run.api_url) as client:
                    client.get("/health/ready")
                    return
            time.sleep(_PROBE_S)  # a process of its own, which has no way to call us
        raise self._failed(f"it was not ready within {READY_S:g} s")

    def _failed(self, what: str) -> OperationError:
        return OperationError(
            f"The instance cannot be used: {what}", "Its last words are above", details=self.last_words()
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            # every process of it has its folder in its command or its environment
            found = {**dict(processes_of(str(self._data.root))), **dict(_children_in(str(self._data.root)))}
            alive = wait_until_ended(list(found), _ENDED_S)
            self.left = tuple(f"{identity.pid} {found[identity]}" for identity in alive)
            for identity in alive:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(identity.pid).kill()
            wait_until_ended(alive, _ENDED_S)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _children_in(folder: str) -> list[tuple[ProcessIdentity, str]]:
    """Living processes whose data dir is `folder`: a worker and its model process do not name it in their command."""
    wanted = f"{PREFIX}DATA_DIR"
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(wanted) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append((ProcessIdentity(process.pid, process.create_time()), " ".join(process.cmdline())))
    return found
