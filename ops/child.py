"""One supervised process: started, started again with backoff, given up, drained."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from ops.errors import ExitCode, OperationError
from ops.instance import ProcessEntry, Role
from ops.log_lines import readable, supervisor_line
from ops.logs import ChildLog
from ops.process import ProcessIdentity, describe_exit, signal_group

#: Exit codes that say: with these settings it cannot work, so there is no use in another try.
HOPELESS = frozenset({int(ExitCode.USAGE), int(ExitCode.PRECONDITION)})


class ChildGaveUp(OperationError):
    """A process died too often; carries why it died last and the end of its log."""

    def __init__(self, name: str, cause: str, times: int, log: ChildLog) -> None:
        how = f"ended before it could work ({cause})" if times == 1 else f"ended {times} times in a row (last: {cause})"
        super().__init__(f"{name} {how}", f"Its log: {log.path}", details=tuple(map(readable, log.tail())))


@dataclass(slots=True)
class RestartPolicy:
    """When to start a dead process again. The wait doubles from `first_s` to `longest_s`.

    One that was killed from outside while it served waits `longest_after_kill_s` at most: nothing is wrong with it.
    A process that was ready for `healthy_s` starts anew at the first wait. One that ends by itself `most_exits` times
    in a row without that is given up; one that is killed from outside gets `most_kills` tries: that says less about it.
    One that says that Redis was away is started again every `unavailable_s`, without end.
    """

    first_s: float = 0.25
    longest_s: float = 10.0
    longest_after_kill_s: float = 2.0
    healthy_s: float = 10.0
    most_exits: int = 5
    most_kills: int = 20
    unavailable_s: float = 1.0
    exits: int = 0
    kills: int = 0

    @property
    def deaths(self) -> int:
        """Deaths in a row, since it was last healthy."""
        return self.exits + self.kills

    def after_death(self, returncode: int, ready_s: float | None) -> float | None:
        """Seconds to wait before the next start, or None: give up.

        Args:
            returncode: as of `subprocess`: negative for a signal.
            ready_s: how long it had been ready; None where it never was.
        """
        if returncode == ExitCode.UNAVAILABLE:
            return self.unavailable_s
        if ready_s is not None and ready_s >= self.healthy_s:
            self.exits = self.kills = 0
        # apart: kills from outside, however many, must not turn the first exit after them into the last one
        if returncode < 0:
            self.kills += 1
        else:
            self.exits += 1
        if returncode in HOPELESS and ready_s is None:
            return None
        if self.exits >= self.most_exits or self.kills >= self.most_kills:
            return None
        longest_s = self.longest_after_kill_s if returncode < 0 and ready_s is not None else self.longest_s
        return float(min(longest_s, self.first_s * 2 ** (self.deaths - 1)))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start.

    Attributes:
        stop_s: how long its drain may take before it is killed.
        kill_signal: what ends it at once; a signal that it obeys at once where its files matter.
    """

    role: Role
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_s: float
    pass_fds: tuple[int, ...] = ()
    kill_signal: signal.Signals = signal.SIGKILL


@dataclass(slots=True)
class Child:
    """A process that is kept alive until it is stopped. `run` is its life; the other calls steer it.

    Args:
        on_change: hears of every change of state; called on the event loop.
    """

    spec: ChildSpec
    log: ChildLog
    on_change: Callable[[ProcessEntry], None]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    _entry: ProcessEntry = field(init=False)
    _process: asyncio.subprocess.Process | None = field(init=False, default=None)
    _ready_since: float | None = field(init=False, default=None)
    _stop: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _ended: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _is_ready: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _unready: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._entry = ProcessEntry(self.spec.role, self.spec.name, "starting")

    @property
    def entry(self) -> ProcessEntry:
        return self._entry

    @property
    def ready(self) -> bool:
        return self._ready_since is not None

    @property
    def running(self) -> bool:
        """Whether it has a process now."""
        return self._process is not None

    def mark_ready(self) -> None:
        """It serves now: whoever knows how to tell calls this, once per start."""
        if self._process is not None and self._ready_since is None:
            self._ready_since = asyncio.get_running_loop().time()
            self._unready.clear()
            self._is_ready.set()
            self._change(state="running", cause="")

    async def until_ready(self) -> None:
        """Return when it serves."""
        await self._is_ready.wait()

    async def unready(self) -> None:
        """Return when it has died after it was ready; at once where it is not ready now."""
        if self.ready:
            await self._unready.wait()

    async def run(self) -> None:
        """Start the process, and again when it dies, until it is stopped.

        Raises:
            ChildGaveUp: it died too often.
            OperationError: it cannot be started at all.
        """
        try:
            while not self._stop.is_set():
                process = await self._start()
                returncode = await process.wait()
                # What it leaves of its group has lost its parent: no use, and it may hold the device's memory.
                signal_group(process.pid, signal.SIGKILL)
                await self._after_death(returncode)
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Let it drain, and kill it where that takes longer than `stop_s`. Returns when it has ended."""
        self._stop.set()
        if self._process is not None:
            self._change(state="stopping")
            self._terminate(self._process)
        try:
            async with asyncio.timeout(self.spec.stop_s):
                await self._ended.wait()
        except TimeoutError:
            self.log.append(supervisor_line("did_not_drain", process=self.spec.name, killed_after_s=self.spec.stop_s))
            if self._process is not None:
                signal_group(self._process.pid, signal.SIGKILL)
            await self._ended.wait()

    def kill(self) -> None:
        """End it at once."""
        self._stop.set()
        if self._process is not None:
            signal_group(self._process.pid, self.spec.kill_signal)

    async def _start(self) -> asyncio.subprocess.Process:
        output = self.log.open()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self.spec.environment),
                pass_fds=self.spec.pass_fds,
                # A session of its own: Ctrl-C reaches the supervisor alone, which drains in order.
                start_new_session=True,
            )
        except OSError as error:
            raise OperationError(
                f"{self.spec.name} cannot be started: {error}", "Install Carpool anew, or raise this user's limits"
            ) from error
        finally:
            os.close(output)
        self._ready_since = None
        pid = self._process.pid
        try:
            created = ProcessIdentity.of(pid).created
        except psutil.NoSuchProcess:
            created = None
        self._change(state="starting", pid=pid, created=created)
        if self._stop.is_set():  # the stop came while it was being started
            self._terminate(self._process)
        return self._process

    @staticmethod
    def _terminate(process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):  # it ended just now
            process.send_signal(signal.SIGTERM)

    async def _after_death(self, returncode: int) -> None:
        self._process = None
        now = asyncio.get_running_loop().time()
        ready_s = now - self._ready_since if self._ready_since is not None else None
        self._ready_since = None
        self._unready.set()
        self._is_ready.clear()
        cause = describe_exit(returncode)
        if self._stop.is_set():
            self._change(state="stopped", cause=cause)
            return
        delay = self.policy.after_death(returncode, ready_s)
        if delay is None:
            self._change(state="failed", cause=cause)
            raise ChildGaveUp(self.spec.name, cause, self.policy.deaths, self.log)
        self._change(state="restarting", cause=cause, restarts=self._entry.restarts + 1)
        try:
            async with asyncio.timeout(delay):
                await self._stop.wait()
            self._change(state="stopped")
        except TimeoutError:
            pass

    def _change(self, **fields: object) -> None:
        self._entry = replace(self._entry, **fields)  # type: ignore[arg-type] # fields of the entry, by name
        self.on_change(self._entry)
