"""The Model executor: the parent's handle on the Model worker. It starts the process, watches and restarts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Final

from tasks.settings import Settings
from worker import model_worker
from worker.messages import Broken, Close, Command, Update
from worker.model_process import ChildMain, ModelProcess

#: Waits before another start, after the first, second, … death in a row of a child that never became ready; one more
#: death and it is given up.
RESTART_DELAYS_S: Final = (1.0, 2.0, 5.0, 10.0)
#: How long a child that got SIGTERM may take before it gets SIGKILL.
_TERMINATE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ChildSaid:
    """The child of this generation sent an update."""

    generation: int
    update: Update


@dataclass(frozen=True, slots=True)
class ChildDied:
    """The child of this generation is dead, everything it sent has been reported; what rode in it is gone."""

    generation: int
    cause: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """There is no child and there will be none. The cause names one thing to do."""

    cause: str


ExecutorEvent = ChildSaid | ChildDied | GaveUp


@dataclass(frozen=True, slots=True)
class _Death:
    cause: str
    was_ready: bool = False
    broken: str | None = None


class ModelExecutor:
    """Owns the Model worker, through all its incarnations.

    Args:
        settings: handed to the child.
        on_event: called from one thread, in order: all updates of generation g, its ChildDied, then those of g + 1.
            It must not call `close`.
        restart_delays_s: see `RESTART_DELAYS_S`.
        child_main: body of the child process; tests give one that misbehaves.

    Attributes:
        generation: number of the newest child, 0 before the first.
    """

    def __init__(
        self,
        settings: Settings,
        on_event: Callable[[ExecutorEvent], None],
        *,
        restart_delays_s: Sequence[float] = RESTART_DELAYS_S,
        child_main: ChildMain = model_worker.main,
    ) -> None:
        self.generation = 0
        self._settings = settings
        self._on_event = on_event
        self._restart_delays_s = tuple(restart_delays_s)
        self._child_main = child_main
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._child: ModelProcess | None = None
        self._kill_cause: str | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        child = self._child
        return child.pid if child is not None else None

    def start(self) -> None:
        """Start the first child; returns at once, events tell the rest."""
        self._thread = threading.Thread(target=self._supervise, name="model-executor", daemon=True)
        self._thread.start()

    def send(self, command: Command, generation: int | None = None) -> None:
        """Hand a command to the child; never blocks.

        It is dropped where no child is up, and where `generation` is given and is not the child's: a command that was
        meant for a dead child must not reach its successor.
        """
        child = self._child
        if child is not None and generation in (None, child.generation):
            child.send(command)

    def kill(self, cause: str, generation: int | None = None) -> None:
        """End a child that hangs, at once; its ChildDied carries `cause`. Another one is started."""
        with self._lock:
            if self._child is not None and generation in (None, self._child.generation):
                self._kill_cause = cause
                self._child.kill()

    def close(self, timeout_s: float) -> None:
        """End the child and the executor: no process and no thread is left when this returns.

        From here on no event is delivered. A ready child gets `timeout_s` seconds to end its step and to close the
        engine, then SIGTERM, then SIGKILL; one that still loads gets SIGTERM at once.
        """
        self._closing.set()
        if self._thread is None:
            return
        self._signal(_end)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._signal(ModelProcess.terminate)
            self._thread.join(_TERMINATE_S)
        if self._thread.is_alive():
            self._signal(ModelProcess.kill)
            self._thread.join()

    def _signal(self, action: Callable[[ModelProcess], None]) -> None:
        with self._lock:
            if self._child is not None:
                action(self._child)

    def _supervise(self) -> None:
        # A child inherits the mask of the thread that starts it: with SIGINT blocked, a Ctrl-C that comes before it can
        # ignore the signal does not end it. The tracker's start lifts the block, so it goes first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        deaths_before_ready = 0
        while not self._closing.is_set():
            self.generation += 1
            death = self._run_child(self.generation)
            if self._closing.is_set():
                return
            self._on_event(ChildDied(self.generation, death.cause))
            deaths_before_ready = 0 if death.was_ready else deaths_before_ready + 1
            if death.broken is not None:
                self._on_event(GaveUp(death.broken))
                return
            if deaths_before_ready > len(self._restart_delays_s):
                self._on_event(GaveUp(_given_up(deaths_before_ready, death.cause)))
                return
            if deaths_before_ready:
                self._closing.wait(self._restart_delays_s[deaths_before_ready - 1])

    def _run_child(self, generation: int) -> _Death:
        """Start a child and report what it says until it is dead."""
        try:
            child = ModelProcess(self._settings, generation, self._child_main)
        except OSError as error:
            return _Death(f"a failed start of its process ({error})")
        with self._lock:
            self._child = child
        if self._closing.is_set():
            self._signal(_end)
        broken = None
        try:
            for update in child.updates():
                if isinstance(update, Broken):
                    broken = update.message
                if not self._closing.is_set():
                    self._on_event(ChildSaid(generation, update))
        except BaseException:  # From on_event: no child may outlive the thread that watches it.
            child.kill()
            raise
        finally:
            with self._lock:  # From here on nobody signals a pid that may soon be another process's.
                self._child = None
                kill_cause, self._kill_cause = self._kill_cause, None
            cause = child.reap()
        return _Death(kill_cause or cause, child.is_ready, broken)


def _end(child: ModelProcess) -> None:
    if child.is_ready:
        child.send(Close())
    else:
        child.terminate()  # A load does not look at its commands.


def _given_up(deaths: int, cause: str) -> str:
    return (
        f"the model process died {deaths} times in a row before it was ready, the last time by {cause}. "
        "Look for the reason in its output above, mend it, and start the worker again"
    )
