"""Puts the load on: clients that ask one request after another, or requests that come at their times whatever happens.

Two sides are measured in turn, round by round, so that a machine that changes its speed changes both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, Final

from ops.bench.serving.call import Outcome, cancel_unfinished, measure
from ops.bench.serving.plan import Plan
from ops.bench.serving.target import Target
from ops.bench.serving.workload import Request, Workload, arrivals

_LAG_EVERY_S: Final = 0.01
#: A client of a closed loop that meets no server asks again so soon.
_PAUSE_S: Final = 0.5


@dataclass(slots=True)
class Round:
    """One measurement of one side: from the first request to the last end, as of `time.perf_counter`."""

    began: float
    ended: float
    outcomes: list[Outcome]


@dataclass(slots=True)
class Side:
    """A target, and what was measured of it."""

    target: Target
    workload: Workload
    rounds: list[Round] = field(default_factory=list)
    _next: int = 0

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for round in self.rounds for outcome in round.outcomes]

    @property
    def seconds(self) -> float:
        """Measured time of all rounds."""
        return sum(round.ended - round.began for round in self.rounds)

    def take(self) -> Request:
        """The next request."""
        self._next += 1
        return self.workload.request(self._next - 1)


class LoopLag:
    """How late this process' event loop is: what it adds to every time that it takes. Use it as a context.

    Attributes:
        samples: seconds, a hundred a second.
    """

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoopLag:
        self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _LAG_EVERY_S
        self._timer = loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self.samples.append(max(0.0, asyncio.get_running_loop().time() - due))
        self._arm()


class Runner:
    """Measures sides under one plan.

    Attributes:
        lags: seconds that this process' event loop was late, while it measured.

    Args:
        on_progress: called at the end of each request with the share that is done, 0 to 1, and how many requests have
            ended and failed.
    """

    def __init__(self, plan: Plan, sides: Sequence[Side], on_progress: Callable[[float, int, int], None]) -> None:
        self.lags: list[float] = []
        self._plan = plan
        self._sides = sides
        self._on_progress = on_progress
        self._stopping = asyncio.Event()
        self._began = 0.0
        self._ended = 0
        self._failed = 0

    @property
    def was_stopped(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Give up what is under way; what has ended stays measured."""
        self._stopping.set()

    async def run(self) -> None:
        """Warm up, then measure each side's rounds in turn."""
        for side in self._sides:
            await self._warm_up(side)
        self._began = time.perf_counter()
        with LoopLag() as lag:
            self.lags = lag.samples
            for number in range(self._plan.rounds):
                # whoever goes first goes second in the next round
                for side in self._sides if number % 2 == 0 else self._sides[::-1]:
                    if not self.was_stopped:
                        await self._round(side, number)

    async def _warm_up(self, side: Side) -> None:
        until = time.perf_counter() + self._plan.timeout_s
        requests = (side.workload.request(-1 - number) for number in range(self._plan.warmups))
        await self._closed_loop(side, requests, until, [], is_counted=False)

    async def _round(self, side: Side, number: int) -> None:
        plan = self._plan
        count = _shares(plan.requests, plan.rounds)[number]
        bound_s = plan.duration_s / plan.rounds
        round = Round(time.perf_counter(), 0.0, [])
        side.rounds.append(round)
        if plan.rate is None:
            requests = (side.take() for _ in range(count))
            await self._closed_loop(side, requests, round.began + bound_s, round.outcomes)
        else:
            offsets = takewhile(lambda at: at <= bound_s, islice(arrivals(plan, number), count))
            await self._open_loop(side, list(offsets), round, bound_s)
        round.ended = max((outcome.ended for outcome in round.outcomes), default=time.perf_counter())

    async def _closed_loop(
        self,
        side: Side,
        requests: Iterator[Request],
        until: float,
        outcomes: list[Outcome],
        *,
        is_counted: bool = True,
    ) -> None:
        async def client() -> None:
            # the clock comes first: a request that was taken is sent, so that both sides get the same ones
            while time.perf_counter() < until and (request := next(requests, None)) is not None:
                outcome = await self._call(side, request, None, outcomes)
                if is_counted:
                    self._count(outcome)
                if outcome.is_refused or outcome.error == "connect":
                    # as a well-behaved client: it comes again when it was asked to
                    pause = outcome.retry_after_s or _PAUSE_S
                    await asyncio.sleep(max(0.0, min(pause, until - time.perf_counter())))

        await self._until_stopped([client() for _ in range(self._plan.clients)])
        await self._free_slots(side, outcomes)

    async def _open_loop(self, side: Side, offsets: Sequence[float], round: Round, bound_s: float) -> None:
        room = asyncio.Semaphore(self._plan.clients)
        round.began = time.perf_counter()

        async def call(scheduled: float, request: Request) -> None:
            async with room:
                now = time.perf_counter()
                if now > round.began + bound_s:  # it waited for others until the round was over
                    outcome = Outcome(request.number, scheduled, now, now, error="not_sent")
                    round.outcomes.append(outcome)
                else:
                    outcome = await self._call(side, request, scheduled, round.outcomes)
                self._count(outcome)

        async def timetable() -> None:
            async with asyncio.TaskGroup() as group:
                for offset in offsets:
                    request = side.take()  # made before its time, so that it is not late for that
                    await asyncio.sleep(max(0.0, round.began + offset - time.perf_counter()))
                    group.create_task(call(round.began + offset, request))

        await self._until_stopped([timetable()])
        await self._free_slots(side, round.outcomes)

    async def _call(self, side: Side, request: Request, scheduled: float | None, outcomes: list[Outcome]) -> Outcome:
        body = side.target.body(request, self._plan)
        started = time.perf_counter()
        outcome = Outcome(request.number, started if scheduled is None else scheduled, started)
        outcomes.append(outcome)
        await measure(side.target, body, outcome, self._plan.timeout_s)
        return outcome

    def _count(self, outcome: Outcome) -> None:
        self._ended += 1
        self._failed += not outcome.succeeded
        sides = len(self._sides)
        by_time = (time.perf_counter() - self._began) / (self._plan.duration_s * sides)
        share = max(by_time, self._ended / (self._plan.requests * sides))
        self._on_progress(min(1.0, share), self._ended, self._failed)

    async def _until_stopped(self, parts: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run all parts to their end, or cut them off."""
        work: asyncio.Future[Any] = asyncio.gather(*parts)
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            is_cut = not work.done() and work.cancel()
        with suppress(*([asyncio.CancelledError] if is_cut else [])):
            await work

    async def _free_slots(self, side: Side, outcomes: Sequence[Outcome]) -> None:
        await asyncio.gather(*(cancel_unfinished(side.target, outcome) for outcome in outcomes))


def _shares(count: int, parts: int) -> list[int]:
    """So even that they differ by one at most."""
    return [count // parts + (part < count % parts) for part in range(parts)]
