"""Who used the processor in a window of time, part by part, and how much of the machine was idle."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from ops.instance import Role
from ops.private_instance import PrivateInstance

#: Parts of an instance, in the words of the table.
PARTS: Final[Mapping[Role, str]] = {
    "api": "api",
    "redis": "redis",
    "worker": "workers' parents",
    "model-worker": "model workers",
}
LOAD_GENERATOR: Final = "load generator"


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """One window.

    Attributes:
        parts: processor seconds of each part, the load generator's (this process's) too.
        idle: share of all cores' time that nobody used.
    """

    seconds: float
    parts: Mapping[str, float]
    idle: float


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    parts: Mapping[str, float]
    machine: float
    idle: float


class ProcessorClock:
    """Reads the processor time of an instance's parts; the processes are those that lived when it was made."""

    def __init__(self, instance: PrivateInstance) -> None:
        self._processes: dict[str, Sequence[psutil.Process]] = {
            name: [process for identity in instance.processes(role) if (process := identity.process()) is not None]
            for role, name in PARTS.items()
        }
        self._start = self._look()

    def start(self) -> None:
        """The window begins."""
        self._start = self._look()

    def read(self) -> ProcessorTime:
        """The window from its start until now."""
        start, now = self._start, self._look()
        machine = now.machine - start.machine
        return ProcessorTime(
            now.at - start.at,
            {name: used - start.parts[name] for name, used in now.parts.items()},
            (now.idle - start.idle) / machine if machine else 0.0,
        )

    def _look(self) -> _Look:
        parts = {name: sum(map(_seconds, processes)) for name, processes in self._processes.items()}
        own = os.times()
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return _Look(time.perf_counter(), {**parts, LOAD_GENERATOR: own.user + own.system}, sum(times), idle)


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
