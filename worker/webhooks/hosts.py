"""A share of the threads for each host: one that does not answer must not keep the events of all others waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

_SHORTEST_S: Final = 0.1
_LONGEST_S: Final = 60.0
#: How much the last attempt counts in the mean.
_WEIGHT: Final = 0.3


@dataclass(slots=True)
class _Host:
    """What is known of a host while attempts go to it: how many, which jobs were put off, and how long one takes."""

    num_attempts: int = 0
    put_off: set[str] = field(default_factory=set)
    mean_s: float = _SHORTEST_S


class Hosts:
    """Counts the attempts that go to each host now.

    Args:
        most: attempts at once to one host.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._hosts: dict[str, _Host] = {}

    @contextmanager
    def enter(self, host: str, job: str) -> Iterator[float]:
        """Yields 0 where there is room; else the seconds after which there may be, and nothing is to be sent.

        Those that are put off come back one after the other, about as fast as the host takes them.
        """
        wait_s = self._take(host, job)
        began = time.monotonic()
        try:
            yield wait_s
        finally:
            if not wait_s:
                self._leave(host, time.monotonic() - began)

    def _take(self, host: str, job: str) -> float:
        with self._lock:
            found = self._hosts.setdefault(host, _Host())
            if found.num_attempts < self._most:
                found.num_attempts += 1
                found.put_off.discard(job)
                return 0.0
            found.put_off.add(job)
            return min(_LONGEST_S, max(_SHORTEST_S, len(found.put_off) / self._most * found.mean_s))

    def _leave(self, host: str, seconds: float) -> None:
        with self._lock:
            found = self._hosts[host]
            found.mean_s += _WEIGHT * (seconds - found.mean_s)
            found.num_attempts -= 1
            if not found.num_attempts:
                del self._hosts[host]
