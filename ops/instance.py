"""An instance's data dir: where its files are, the lock that makes it one instance, and the run file others read."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ops.errors import PreconditionError
from ops.process import ProcessIdentity

Role = Literal["supervisor", "redis", "api", "worker", "model-worker", "webhooks", "flower"]
RUN_FILE_VERSION = 1


@dataclass(frozen=True, slots=True)
class DataDir:
    """The files of one instance. Every path lies below `root`, which only its owner may read."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "up.lock"

    @property
    def run_file(self) -> Path:
        return self.root / "run.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    def create(self) -> None:
        """Make the folders, mode 0700. Raises PreconditionError where that is not possible."""
        try:
            for folder in (self.root, self.logs, self.redis):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.chmod(0o700)
        except OSError as error:
            raise PreconditionError(
                f"The data dir {self.root} cannot be used: {error.strerror}", "Name another one with --data-dir"
            ) from error


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process of the instance as its supervisor last saw it.

    Attributes:
        created: start of the process, seconds since the epoch; with the pid it names this process and no later one.
        state: starting, running, restarting, stopping, stopped or failed.
        restarts: how often it was started again.
        cause: why it last ended, in words; "" where it has not.
    """

    role: Role
    name: str
    state: str
    pid: int | None = None
    created: float | None = None
    restarts: int = 0
    cause: str = ""

    @property
    def identity(self) -> ProcessIdentity | None:
        return ProcessIdentity(self.pid, self.created) if self.pid is not None and self.created is not None else None


@dataclass(frozen=True, slots=True)
class RunFile:
    """What an instance says of itself: where its API and its Redis are, and its processes. It holds a password."""

    api_url: str
    redis_url: str
    embedded_redis: bool
    pool: str
    engine: str
    drain_s: float
    started_at: str
    processes: tuple[ProcessEntry, ...] = ()
    v: int = RUN_FILE_VERSION

    @property
    def supervisor(self) -> ProcessEntry | None:
        return next((entry for entry in self.processes if entry.role == "supervisor"), None)

    def with_process(self, entry: ProcessEntry) -> RunFile:
        """The same with this process's entry new or replaced, in the order of the roles."""
        known = any(other.name == entry.name for other in self.processes)
        kept = tuple(entry if other.name == entry.name else other for other in self.processes)
        processes = kept if known else (*kept, entry)
        return replace(self, processes=tuple(sorted(processes, key=lambda one: get_args(Role).index(one.role))))

    def write(self, path: Path) -> None:
        """Write atomically, readable by the owner alone."""
        write_private(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> RunFile | None:
        """The run file, or None where there is none. Raises PreconditionError for one that cannot be understood."""
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise PreconditionError(f"The run file {path} cannot be read: {error}", "Remove it") from error
        if raw.get("v") != RUN_FILE_VERSION:
            raise PreconditionError(
                f"The run file {path} has version {raw.get('v')!r}, this release reads {RUN_FILE_VERSION}",
                "Use the release that wrote it, or remove the file once nothing of it runs",
            )
        return cls(**{**raw, "processes": tuple(ProcessEntry(**entry) for entry in raw["processes"])})


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step, mode 0600: a reader sees the old content or the new."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created with mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise


class FileLock:
    """An exclusive flock(2) on a file: it ends with the processes that hold its descriptor, however they end.

    The file's content says who holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def descriptor(self) -> int:
        """The locked descriptor; a child that inherits it holds the lock on. Raises RuntimeError without the lock."""
        if self._descriptor is None:
            raise RuntimeError(f"the lock {self._path} is not held")
        return self._descriptor

    def acquire(self, *, wait: bool = False) -> bool:
        """Take the lock, waiting for it or not; False where another process has it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(descriptor)
            return False
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return True

    def holder(self) -> str:
        """Process id of the holder as the file says it; "unknown" where it says nothing."""
        try:
            return self._path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
