"""Processes as the supervisor sees them: who one is, whether it still lives, and how one ends with its children."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Kernels count a process's start in ticks of 10 ms.
_SAME_START_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process id and when it started (seconds since the epoch): together they name one process for ever."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of a living process. Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    def process(self) -> psutil.Process | None:
        """A handle on the process, or None where it has ended (a zombie has ended)."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.created) < _SAME_START_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        return self.process() is not None


def wait_until_ended(identities: Sequence[ProcessIdentity], timeout_s: float) -> list[ProcessIdentity]:
    """Wait for processes that need not be our children; returns those that are still alive after `timeout_s`.

    A process whose parent does not collect it has ended all the same.
    """
    until = time.monotonic() + timeout_s
    for identity in identities:
        with suppress(ProcessLookupError):
            _wait_for(identity, until)
    return [identity for identity in identities if identity.alive]


def _wait_for(identity: ProcessIdentity, until: float) -> None:
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(identity.pid)
        try:
            if identity.alive:  # else the descriptor is of a later process with its number
                select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        finally:
            os.close(descriptor)
        return
    while identity.alive and time.monotonic() < until:
        time.sleep(0.1)  # macOS has no event for a process that is not our child


def with_parent_death_signal(command: Sequence[str], sig: signal.Signals) -> list[str]:
    """The command so that the kernel sends it `sig` when the thread that starts it ends (Linux; elsewhere as it is)."""
    if not sys.platform.startswith("linux"):
        return list(command)
    program = Path(__file__).with_name("die_with_parent.py")
    return [sys.executable, "-I", "-S", str(program), str(int(sig)), str(os.getpid()), *command]


def signal_group(pid: int, sig: signal.Signals) -> None:
    """Send `sig` to the process group that `pid` leads; a group that has no process left is no error."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)


def describe_exit(returncode: int) -> str:
    """How a process ended, in words: "exit code 3" or "killed by SIGKILL"."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
