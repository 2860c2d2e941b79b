"""A real Model worker process with the simulated engine: what its parent sees, whatever happens to either of them."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from tasks.job_request import SamplingParams
from tasks.settings import Settings
from tests.child_ride import BOUND_S, PROMPT, Ride
from worker import model_worker, simulation
from worker.channel import UpdateWriter
from worker.messages import Abort, Aborted, Accepted, Add, Broken, Failed, Phase, Ready, Stepped
from worker.model_executor import ChildDied, ChildSaid, GaveUp, ModelExecutor

ChildPipe: TypeAlias = "Connection[Any, Any]"


# --- children that misbehave, each in a real process -----------------------------------------------------------------


def child_that_is_killed_after_fifty_updates(settings: Settings, commands: ChildPipe, updates: ChildPipe) -> None:
    writer = UpdateWriter(updates)
    for number in range(50):
        writer.send(Phase(f"number {number} {'x' * 900}"))
    os.kill(os.getpid(), signal.SIGKILL)


def child_that_is_killed_within_a_message(settings: Settings, commands: ChildPipe, updates: ChildPipe) -> None:
    UpdateWriter(updates).send(Phase("loading weights"))
    os.write(updates.fileno(), struct.pack("!i", 1000) + b"half of it")
    os.kill(os.getpid(), signal.SIGKILL)


def child_that_raises(settings: Settings, commands: ChildPipe, updates: ChildPipe) -> None:
    raise RuntimeError("an error that this test wants")


def child_without_its_engine(settings: Settings, commands: ChildPipe, updates: ChildPipe) -> None:
    model_worker.ENGINE_MODULES["simulated"] = "worker.engines.not_there"
    model_worker.main(settings, commands, updates)


def child_that_loads_for_ever(settings: Settings, commands: ChildPipe, updates: ChildPipe) -> None:
    UpdateWriter(updates).send(Phase("loading weights"))
    threading.Event().wait()


def child_that_lists_its_modules(settings: Settings, commands: ChildPipe, updates: ChildPipe) -> None:
    model_worker.engine_module(settings.engine)
    UpdateWriter(updates).send(Phase(",".join(sys.modules)))
    model_worker.main(settings, commands, updates)


# --- what the tests share --------------------------------------------------------------------------------------------


@pytest.fixture
def board() -> Iterator[Callable[..., Ride]]:
    """Starts executors; when the test is over they are closed, and no process or thread of theirs is left."""
    rides: list[Ride] = []
    threads_before = set(threading.enumerate())

    def start(*, wait: bool = True, **options: Any) -> Ride:
        ride = Ride(**options)
        rides.append(ride)
        ride.executor.start()
        if wait:
            ride.until_said(Ready)
        return ride

    yield start
    for ride in rides:
        ride.executor.close(BOUND_S)
        assert not [pid for pid in ride.pids if psutil.pid_exists(pid)]
    assert set(threading.enumerate()) <= threads_before


def is_gone(pid: int) -> bool:
    """Whether a process ends within the bound; one that only waits to be reaped has ended."""
    try:
        process = psutil.Process(pid)
        deadline = time.monotonic() + BOUND_S
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            try:
                process.wait(0.05)
            except psutil.TimeoutExpired:
                continue
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# --- riding ----------------------------------------------------------------------------------------------------------


def test_a_child_tells_its_phases_and_then_that_it_is_ready(board: Callable[..., Ride]) -> None:
    ride = board()
    updates = [event.update for event in ride.events if isinstance(event, ChildSaid)]

    assert all(isinstance(update, Phase) for update in updates[:-1])
    assert len(updates) > 1
    assert isinstance(updates[-1], Ready)
    assert updates[-1].card.fingerprint == "simulated-1"
    assert ride.executor.generation == 1


def test_sequences_join_late_and_leave_without_waiting_and_each_gets_its_own_text(board: Callable[..., Ride]) -> None:
    ride = board()
    lengths = {"a": 20, "b": 3, "c": 11}
    for id, length in lengths.items():
        ride.add(id, f"{PROMPT} {id}", max_tokens=length)
    texts = ride.until_ended("b")
    ride.add("late", "I come late", max_tokens=5)
    for id, text in ride.until_ended("a", "c", "late").items():
        texts[id] = texts.get(id, "") + text

    for id, length in lengths.items():
        assert texts[id] == simulation.completion(f"{PROMPT} {id}", 0, length)
    assert texts["late"] == simulation.completion("I come late", 0, 5)


@pytest.mark.parametrize("options", [{"simulated_prefill_ms": 60_000.0, "simulated_step_ms": 5.0}, {}])
def test_an_abort_in_prefill_or_decoding_frees_the_slot(board: Callable[..., Ride], options: dict[str, float]) -> None:
    ride = board(max_batch_size=1, **options)
    ride.add("a", max_tokens=8000)
    ride.next_step()
    ride.executor.send(Abort("a"))
    # steps that ran ahead before the abort was seen were told and are to be accepted, or there is none left for "b"
    ride.executor.send(Accepted(ride.until_said(Aborted, "a").step))
    ride.add("b", max_tokens=8000)

    assert [delta.id for delta in ride.next_step().deltas] == ["b"]


@pytest.mark.parametrize("run_ahead_steps", [1, 2, 3])
def test_a_child_runs_ahead_of_the_ledger_by_exactly_the_bound(
    board: Callable[..., Ride], run_ahead_steps: int
) -> None:
    ride = board(run_ahead_steps=run_ahead_steps)
    ride.add("a", max_tokens=100)
    told = [ride.until_said(Stepped).step for _ in range(run_ahead_steps)]

    assert told == [*range(1, run_ahead_steps + 1)]
    assert ride.num_steps_told() == run_ahead_steps

    ride.executor.send(Accepted(1))
    ride.until_said(Stepped)

    assert ride.num_steps_told() == run_ahead_steps + 1


def test_a_sequence_that_fails_leaves_its_neighbours_alone(board: Callable[..., Ride]) -> None:
    ride = board()
    ride.add("poison", "[[raise]]@3", max_tokens=10)
    ride.add("a")
    text = ride.until_ended("a")["a"]
    failed = [e.update for e in ride.events if isinstance(e, ChildSaid) and isinstance(e.update, Failed)]

    assert text == simulation.completion(PROMPT, 0, 10)
    assert [(update.id, update.code, update.step) for update in failed] == [("poison", "engine_error", 3)]


# --- dying -----------------------------------------------------------------------------------------------------------


def test_all_that_a_child_said_before_kill_9_is_told_before_its_death(board: Callable[..., Ride]) -> None:
    ride = board(child_main=child_that_is_killed_after_fifty_updates, restart_delays_s=(), wait=False)
    ride.until(lambda event: isinstance(event, GaveUp))
    said = [event.update.name.split()[1] for event in ride.events[:50] if isinstance(event, ChildSaid)]  # type: ignore[union-attr]

    assert said == [str(number) for number in range(50)]
    assert isinstance(ride.events[50], ChildDied)
    assert ride.events[50].cause.startswith("signal 9 (SIGKILL) while number 49")


def test_half_a_message_is_no_message_and_the_death_is_told_at_once(board: Callable[..., Ride]) -> None:
    ride = board(child_main=child_that_is_killed_within_a_message, restart_delays_s=(), wait=False)
    ride.until(lambda event: isinstance(event, GaveUp))

    assert ride.events[:2] == [
        ChildSaid(1, Phase("loading weights")),
        ChildDied(1, "signal 9 (SIGKILL) while loading weights"),
    ]


def test_after_kill_9_another_child_takes_over_and_the_text_has_no_gap(board: Callable[..., Ride]) -> None:
    ride = board(restart_delays_s=(600.0,))
    ride.add("a", max_tokens=1000)
    have: list[int] = []
    while len(have) < 5:
        have += [id for delta in ride.next_step().deltas for id in delta.ids]
    pid = ride.executor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while not isinstance(event := ride.next(), ChildDied):
        assert isinstance(event, ChildSaid)
        assert isinstance(event.update, Stepped)
        have += [id for delta in event.update.deltas for id in delta.ids]

    assert event == ChildDied(1, "signal 9 (SIGKILL) while decoding")

    ride.until_said(Ready)
    assert ride.executor.generation == 2
    assert ride.executor.pid != pid
    rest: dict[str, list[int]] = {}
    ride.add("a", max_tokens=len(have) + 5, ids=tuple(have))
    ride.until_ended("a", have=rest)

    assert have + rest["a"] == simulation.completion_ids(PROMPT, 0, len(have) + 5)


def test_an_exit_is_told_with_its_code(board: Callable[..., Ride]) -> None:
    ride = board()
    have: dict[str, list[int]] = {"poison": []}
    ride.add("poison", "[[exit 137]]@3")
    while not isinstance(event := ride.next(), ChildDied):
        if isinstance(event, ChildSaid) and isinstance(event.update, Stepped):
            ride.executor.send(Accepted(event.update.step))
            have["poison"] += [id for delta in event.update.deltas for id in delta.ids]

    assert event == ChildDied(1, "exit code 137 while decoding")
    assert len(have["poison"]) == 2


def test_an_idle_child_that_dies_is_said_to_have_been_idle(board: Callable[..., Ride]) -> None:
    ride = board()
    ride.add("a")
    ride.until_ended("a")
    assert ride.executor.pid is not None
    os.kill(ride.executor.pid, signal.SIGKILL)

    assert ride.until(lambda event: isinstance(event, ChildDied)) == ChildDied(1, "signal 9 (SIGKILL) while idle")


def test_a_child_that_hangs_is_killed_with_a_cause_and_another_one_serves(board: Callable[..., Ride]) -> None:
    ride = board()
    ride.add("a", "[[hang]]@2")
    ride.next_step()
    ride.executor.kill("no progress for 60 s", generation=2)
    ride.executor.kill("no progress for 60 s", generation=1)

    assert ride.until(lambda event: isinstance(event, ChildDied)) == ChildDied(1, "no progress for 60 s")

    ride.until_said(Ready)
    ride.add("b")
    assert ride.until_ended("b")["b"] == simulation.completion(PROMPT, 0, 10)


def test_a_command_for_a_dead_child_does_not_reach_the_next_one(board: Callable[..., Ride]) -> None:
    ride = board()
    ride.executor.kill("the test wants it")
    ride.until_said(Ready)
    ride.executor.send(Add("stale", PROMPT, None, SamplingParams(max_tokens=5), seed=0), generation=1)
    ride.executor.send(Add("fresh", PROMPT, None, SamplingParams(max_tokens=5), seed=0), generation=2)

    assert {delta.id for delta in ride.next_step().deltas} == {"fresh"}


def test_a_child_that_cannot_serve_is_given_up_at_once(board: Callable[..., Ride]) -> None:
    ride = board(child_main=child_without_its_engine, wait=False)
    gave_up = ride.until(lambda event: isinstance(event, GaveUp))

    assert isinstance(gave_up, GaveUp)
    assert "no engine 'simulated'" in gave_up.cause
    assert ride.events[-3] == ChildSaid(1, Broken(gave_up.cause))
    assert ride.events[-2] == ChildDied(1, "exit code 3 while importing the simulated engine")


def test_a_child_that_never_becomes_ready_is_given_up_after_five_deaths(board: Callable[..., Ride]) -> None:
    ride = board(child_main=child_that_raises, restart_delays_s=(0.0, 0.01, 0.01, 0.01), wait=False)
    gave_up = ride.until(lambda event: isinstance(event, GaveUp))

    assert ride.events[:-1] == [ChildDied(generation, "exit code 1 while starting") for generation in range(1, 6)]
    assert isinstance(gave_up, GaveUp)
    assert "died 5 times in a row" in gave_up.cause
    assert "exit code 1 while starting" in gave_up.cause


def test_ctrl_c_does_not_end_a_child_not_even_one_that_just_starts(board: Callable[..., Ride]) -> None:
    ride = board(wait=False)
    deadline = time.monotonic() + BOUND_S
    while (pid := ride.executor.pid) is None:
        assert time.monotonic() < deadline
        os.sched_yield()
    os.kill(pid, signal.SIGINT)
    ride.until_said(Ready)
    os.kill(pid, signal.SIGINT)
    ride.add("a")

    assert ride.until_ended("a")["a"] == simulation.completion(PROMPT, 0, 10)
    assert ride.executor.pid == pid


@pytest.mark.parametrize("prompt", [PROMPT, "[[hang]]@1"])
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, prompt: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
import threading
from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker.messages import Add, Ready
from worker.model_executor import ChildSaid, ModelExecutor

def on_event(event):
    if isinstance(event, ChildSaid) and isinstance(event.update, Ready):
        executor.send(Add("a", {prompt!r}, None, SamplingParams(max_tokens=100), seed=0))
        print(executor.pid, flush=True)

if __name__ == "__main__":
    executor = ModelExecutor(Settings(engine="simulated", simulated_step_ms=0), on_event)
    executor.start()
    threading.Event().wait()
"""
    )
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(BOUND_S)

        assert is_gone(child)


# --- closing ---------------------------------------------------------------------------------------------------------


def test_close_ends_a_riding_child_and_tells_nothing_more(board: Callable[..., Ride]) -> None:
    ride = board(run_ahead_steps=64)
    ride.add("a", max_tokens=8000)
    ride.next_step()
    pid = ride.executor.pid
    ride.executor.close(BOUND_S)
    ride.executor.close(BOUND_S)

    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert ride.executor.pid is None
    assert not any(isinstance(event, ChildDied) for event in ride.events)


def test_close_ends_a_child_that_hangs(board: Callable[..., Ride]) -> None:
    ride = board()
    ride.add("a", "[[hang]]@1")
    started = time.monotonic()
    ride.executor.close(0.1)

    assert ride.executor.pid is None
    assert time.monotonic() - started < 5


def test_close_does_not_wait_for_a_load(board: Callable[..., Ride]) -> None:
    ride = board(child_main=child_that_loads_for_ever, wait=False)
    ride.until_said(Phase)
    started = time.monotonic()
    ride.executor.close(BOUND_S)

    assert time.monotonic() - started < BOUND_S / 2


def test_close_does_not_wait_for_a_restart(board: Callable[..., Ride]) -> None:
    ride = board(child_main=child_that_raises, restart_delays_s=(600.0,), wait=False)
    ride.until(lambda event: isinstance(event, ChildDied))
    started = time.monotonic()
    ride.executor.close(BOUND_S)

    assert time.monotonic() - started < BOUND_S / 2


def test_an_executor_that_was_never_started_takes_commands_and_closes() -> None:
    executor = ModelExecutor(Settings(engine="simulated"), lambda event: None)
    executor.send(Abort("a"))
    executor.kill("nothing")
    executor.close(1)

    assert executor.pid is None


# --- the process -----------------------------------------------------------------------------------------------------


def test_a_child_with_the_simulated_engine_loads_no_torch(board: Callable[..., Ride]) -> None:
    ride = board(child_main=child_that_lists_its_modules)
    modules = next(e.update.name for e in ride.events if isinstance(e, ChildSaid) and isinstance(e.update, Phase))

    assert "worker.engines.simulated" in modules.split(",")
    assert not {"torch", "transformers"} & {*modules.split(",")}


@pytest.mark.skipif(sys.platform != "linux", reason="the name of a process is set on Linux")
def test_a_child_carries_a_name_that_ps_shows(board: Callable[..., Ride]) -> None:
    assert psutil.Process(board().executor.pid).name() == "carpool-model"
