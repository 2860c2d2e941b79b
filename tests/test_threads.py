"""The thread governor: all threads while the processors are free, one while they are not."""

from __future__ import annotations

import pytest

from worker.engines.threads import PERIOD_STEPS, TRIAL_STEPS, ThreadGovernor

CALM = {2: 0.028, 1: 0.042}
CONTENDED = {2: 0.300, 1: 0.060}


class Processor:
    """Steps whose time depends on the number of threads and on who else is running."""

    def __init__(self, num_threads: int = 2) -> None:
        self.chosen: list[int] = []
        self.governor = ThreadGovernor(num_threads, self.chosen.append)

    def run(self, seconds: dict[int, float], num_steps: int) -> list[int]:
        """The number of threads that each step had."""
        used = []
        for _ in range(num_steps):
            used.append(self.governor.num_threads)
            self.governor.note(seconds[self.governor.num_threads])
        return used


def test_on_free_processors_all_threads_are_used_but_for_a_short_trial_now_and_then() -> None:
    used = Processor().run(CALM, 10 * PERIOD_STEPS)

    assert used.count(1) / len(used) < 0.025
    assert used[-1] == 2


def test_a_process_that_wants_the_processors_brings_it_to_one_thread_within_a_few_steps() -> None:
    processor = Processor()
    processor.run(CALM, 50)

    used = processor.run(CONTENDED, PERIOD_STEPS)

    assert used[: TRIAL_STEPS + 1].count(2) <= TRIAL_STEPS
    assert set(used[TRIAL_STEPS:]) == {1}


def test_it_comes_back_to_all_threads_when_the_processors_are_free_again() -> None:
    processor = Processor()
    processor.run(CALM, 50)
    processor.run(CONTENDED, 100)

    used = processor.run(CALM, PERIOD_STEPS)

    assert used[-1] == 2


def test_a_start_among_busy_processes_finds_one_thread_too() -> None:
    used = Processor().run(CONTENDED, 50)

    assert set(used[TRIAL_STEPS:]) == {1}


def test_under_lasting_contention_all_threads_are_tried_seldom() -> None:
    used = Processor().run(CONTENDED, 10 * PERIOD_STEPS)

    assert used.count(2) / len(used) < 0.025


def test_a_context_that_grows_slowly_is_no_contention() -> None:
    processor = Processor()
    used = []
    for step in range(PERIOD_STEPS):
        growth = 1 + step / PERIOD_STEPS
        used += processor.run({threads: seconds * growth for threads, seconds in CALM.items()}, 1)

    assert used.count(1) <= 2 * TRIAL_STEPS


@pytest.mark.parametrize("num_threads", [1, 8])
def test_the_numbers_are_one_and_all(num_threads: int) -> None:
    processor = Processor(num_threads)
    processor.run({1: 0.03, num_threads: 0.01}, 2 * PERIOD_STEPS)

    assert set(processor.chosen) == ({1, 8} if num_threads == 8 else set())
