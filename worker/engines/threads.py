"""How many threads a step takes: all, or one while other processes want the processors too."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final

#: Steps that a number of threads is judged by.
TRIAL_STEPS: Final = 4
#: Steps after which the other number is tried again in any case.
PERIOD_STEPS: Final = 200
#: Steps of which each takes this many times what was usual mean that something has changed.
SLOWDOWN: Final = 1.8


class ThreadGovernor:
    """Keeps whichever is faster, all threads or one, by trying.

    The threads of a matrix product wait for each other some hundred times per step. With the processors to themselves
    two are faster than one by a third. Beside a busy process each wait lasts until the scheduler brings the other
    thread back, and a step takes up to ten times as long, where one thread alone hardly notices.

    Args:
        num_threads: all threads.
        set_num_threads: is called with the number for the next step; 1 or `num_threads`.
    """

    def __init__(self, num_threads: int, set_num_threads: Callable[[int], None]) -> None:
        self.num_threads = num_threads
        self._most = num_threads
        self._set_num_threads = set_num_threads
        self._times: list[float] = []
        self._num_steps = 0
        self._usual: float | None = None
        #: What the number that was in use before took, while the other one is on trial.
        self._incumbent: float | None = None

    def note(self, seconds: float) -> None:
        """A decoding step took so long. May change the number of threads for the next one."""
        if self._most == 1:
            return
        self._num_steps += 1
        self._times = [*self._times[1 - TRIAL_STEPS :], seconds]
        if len(self._times) < TRIAL_STEPS:
            return
        taken = median(self._times)
        if self._incumbent is not None:
            self._judge(taken, self._incumbent)
        elif self._usual is None or self._num_steps >= PERIOD_STEPS or min(self._times) > SLOWDOWN * self._usual:
            self._incumbent = taken
            self._switch()

    def _judge(self, challenger: float, incumbent: float) -> None:
        self._usual = min(challenger, incumbent)
        self._incumbent = None
        self._num_steps = 0
        if challenger < incumbent:
            self._times.clear()
        else:
            self._switch()

    def _switch(self) -> None:
        self.num_threads = 1 if self.num_threads == self._most else self._most
        self._set_num_threads(self.num_threads)
        self._times.clear()
