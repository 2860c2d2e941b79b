"""`carpool redis`: the process that owns the embedded Redis server and lets it outlive everyone who uses it.

When the supervisor is killed, the workers and the API drain by themselves and need Redis to the end. So the server is
not the supervisor's child but this process's, which ends it when

- it gets SIGTERM (the supervisor does that last of all), or
- nobody holds the write end of the tenants' pipe any more: the supervisor and everyone it started has ended, or
- the supervisor has ended and the bound of the drain has passed.

If this process itself is killed, the kernel ends the server (Linux). A lock, whose descriptor the server inherits,
keeps two servers off one append-only file.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from dataclasses import asdict
from enum import Enum, auto
from pathlib import Path
from types import FrameType

import psutil

from ops.embedded_redis import find_program
from ops.errors import ExitCode
from ops.instance import FileLock, write_private
from ops.process import ProcessIdentity, with_parent_death_signal
from tasks.lifeline import watch_lifeline

SERVER_FILE = "server.json"
#: Longest wait for an orderly end of the server, which flushes its append-only file.
STOP_S = 20.0
#: Beyond the workers' own drain: time for the hand-back of what did not finish.
MARGIN_S = 30.0


class _Event(Enum):
    SERVER_ENDED = auto()
    STOP = auto()
    TENANTS_GONE = auto()
    SUPERVISOR_GONE = auto()


def read_server(folder: Path) -> ProcessIdentity | None:
    """The server that a guardian last started in this folder, whether it lives or not."""
    try:
        raw = json.loads((folder / SERVER_FILE).read_text())
        return ProcessIdentity(pid=int(raw["pid"]), created=float(raw["created"]))
    except (OSError, ValueError, KeyError):
        return None


class RedisGuardian:
    """Runs one server on a prepared folder until nobody needs it."""

    def __init__(self, folder: Path, drain_s: float) -> None:
        self._folder = folder
        self._bound_s = drain_s + MARGIN_S
        # SimpleQueue: a signal handler may put into it while the main thread waits in it.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._lock = FileLock(folder / "server.lock")

    def run(self, tenants: int | None) -> int:
        """Start the server and stay until it has ended.

        Args:
            tenants: read end of the tenants' pipe, where there is one.

        Returns:
            0 after a stop that was asked for, 1 where the server ended by itself. Where the server was killed, this
            process ends by the same signal: the supervisor tells one from the other.
        """
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, self._on_signal)
        watch_lifeline(lambda: self._events.put(_Event.SUPERVISOR_GONE))
        if tenants is not None:
            threading.Thread(target=self._watch_tenants, args=(tenants,), name="tenants", daemon=True).start()
        self._take_lock()
        server = self._start()
        threading.Thread(target=self._watch_server, args=(server,), name="server", daemon=True).start()
        if self._wait_for_reason() is _Event.SERVER_ENDED:
            if server.returncode < 0:
                _end_by(-server.returncode)
            return ExitCode.FAILED
        self._stop(server)
        return ExitCode.OK

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._events.put(_Event.STOP)

    def _watch_tenants(self, tenants: int) -> None:
        while os.read(tenants, 4096):
            pass
        self._events.put(_Event.TENANTS_GONE)

    def _watch_server(self, server: subprocess.Popen[bytes]) -> None:
        server.wait()
        self._events.put(_Event.SERVER_ENDED)

    def _take_lock(self) -> None:
        if self._lock.acquire():
            return
        # A guardian was killed and its server lives on (where the kernel does not end it): it has no owner any more.
        orphan = read_server(self._folder)
        process = orphan.process() if orphan else None
        if process is not None:
            process.terminate()
        self._lock.acquire(wait=True)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [str(find_program()), str(self._folder / "redis.conf")]
        server = subprocess.Popen(
            with_parent_death_signal(command, signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            pass_fds=(self._lock.descriptor,),
            start_new_session=True,
        )
        identity = ProcessIdentity.of(server.pid)
        write_private(self._folder / SERVER_FILE, json.dumps(asdict(identity)) + "\n")
        return server

    def _wait_for_reason(self) -> _Event:
        event = self._events.get()
        if event is not _Event.SUPERVISOR_GONE:
            return event
        try:
            return self._events.get(timeout=self._bound_s)
        except queue.Empty:
            return _Event.STOP

    def _stop(self, server: subprocess.Popen[bytes]) -> None:
        server.terminate()
        until = time.monotonic() + STOP_S
        while (left := until - time.monotonic()) > 0:
            try:
                if self._events.get(timeout=left) is _Event.SERVER_ENDED:
                    return
            except queue.Empty:
                break
        server.kill()
        server.wait()


def _end_by(number: int) -> None:
    if number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def serve(folder: Path, drain_s: float, tenants: int | None) -> int:
    """Entry point of `carpool redis`; the arguments as of `RedisGuardian`."""
    try:
        return RedisGuardian(folder, drain_s).run(tenants)
    except psutil.NoSuchProcess:
        return ExitCode.FAILED  # the server ended before it could be seen; its log says why
