"""One soak from its start to its report."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import httpx2
import redis.asyncio

from ops.errors import OperationError
from ops.private_instance import PrivateInstance
from ops.soak.clients import Client
from ops.soak.faults import WEIGHTS, Faults
from ops.soak.judge import Finding, Verdict, judge
from ops.soak.ledger_view import read_jobs, read_leftovers, wait_until_settled
from ops.soak.observations import Sighting
from ops.soak.plans import draw_plan
from ops.soak.recovery import Recoveries
from ops.soak.report import Outcome
from tasks.redis_clients import connect_async
from tasks.settings import Settings

#: Short leases, so that a soak of minutes sees many recoveries.
SHORT: Final[dict[str, Any]] = {
    "lease_s": 3,
    "renew_s": 0.8,
    "grace_s": 2,
    "heartbeat_s": 0.5,
    "reaper_tick_s": 0.5,
    "step_timeout_s": 5,
    "visibility_s": 20,
    "sse_heartbeat_s": 1,
}
#: After the last fault: so long may the slowest job need, hung steps and charged deaths included.
SETTLE_S: Final = 120.0
#: What a job leaves in the broker and in the queues is gone soon after its end.
_LEFTOVERS_S: Final = 20.0
_POOL: Final = "simulated"
_PROGRESS_S: Final = 10.0
_LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """What a soak is asked for.

    Attributes:
        minutes: of faults; starting, settling and judging come on top.
        seed: of plans, cuts and faults. Times are the machine's own, so that no two soaks are quite the same.
        clients: how many ask at once.
        gap_s: seconds between two faults, on average.
        kinds: of faults; empty: all.
        poison: some prompts kill or hang the process that runs them.
        default_settings: leases and timeouts as the product has them.
        keep: leave the instance's files where they are, also where everything holds.
    """

    minutes: float
    seed: int
    clients: int = 24
    workers: int = 2
    gap_s: float = 3.0
    step_ms: float = 10.0
    kinds: Sequence[str] = ()
    poison: bool = True
    default_settings: bool = False
    appendfsync: Literal["always", "everysec"] = "always"
    keep: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the instance that differ from the defaults."""
        return {
            "engine": "simulated",
            "port": 0,
            "workers": self.workers,
            "simulated_step_ms": self.step_ms,
            "simulated_prefill_ms": 10,
            "drain_s": 5,
            "appendfsync": self.appendfsync,
            **({} if self.default_settings else SHORT),
        }


def run_soak(options: Options) -> Outcome:
    """Start an instance, torment it, let it settle, judge it, and end it.

    Raises:
        OperationError: the instance cannot be started.
        KeyboardInterrupt: it was interrupted; everything has been ended.
    """
    with PrivateInstance(options.settings, "soak") as instance:
        outcome = asyncio.run(_Soak(options, instance).run())
        instance.keep = options.keep or not outcome.verdict.holds
        if instance.keep:
            _say(f"the instance's files are kept in {instance.folder}")
    if instance.left:
        left = Finding("left", "", f"processes that outlived the instance: {', '.join(instance.left)}")
        verdict = outcome.verdict
        outcome = _with_verdict(outcome, Verdict((*verdict.findings, left), verdict.lost_writes, verdict.death_bound))
    return outcome


def _with_verdict(outcome: Outcome, verdict: Verdict) -> Outcome:
    return Outcome(
        outcome.options,
        outcome.sightings,
        outcome.jobs,
        outcome.strikes,
        outcome.num_killed,
        outcome.recoveries,
        outcome.settled_s,
        verdict,
    )


class _Soak:
    def __init__(self, options: Options, instance: PrivateInstance) -> None:
        self._options = options
        self._instance = instance
        self._settings = Settings(redis_url=instance.redis_url, **options.settings)
        self._draw = random.Random(options.seed)  # noqa: S311 - to be drawn again, not to be secret
        self._sightings: list[Sighting] = []
        self._is_over = False

    async def run(self) -> Outcome:
        """Raises OperationError where the instance ends by itself, which is a fault of its own."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a soak runs in a task")
        # as Ctrl-C does: what was started is ended on the way out
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with AsyncExitStack() as stack:
            client = connect_async(self._settings)
            stack.push_async_callback(client.aclose)
            http = await stack.enter_async_context(_http_client(self._instance.url))
            recoveries = Recoveries(client)
            faults = self._faults(client, recoveries)
            stack.push_async_callback(faults.heal)
            settled_s = await self._torment(client, http, recoveries, faults)
            if not self._instance.runs:
                self._instance.keep = True
                cause = f"carpool up has ended by itself; its logs are in {self._instance.folder}. It said"
                raise OperationError(cause, "", details=self._instance.last_words())
            jobs = await read_jobs(client)
            leftovers = await read_leftovers(client, _POOL, _LEFTOVERS_S)
        may_lose_writes = self._options.appendfsync != "always"
        return Outcome(
            {**asdict(self._options), "settings": self._options.settings},
            self._sightings,
            jobs,
            faults.strikes,
            faults.num_killed,
            recoveries.found,
            settled_s,
            judge(self._sightings, jobs, leftovers, strikes=faults.strikes, may_lose_writes=may_lose_writes),
        )

    async def _torment(
        self, client: redis.asyncio.Redis, http: httpx2.AsyncClient, recoveries: Recoveries, faults: Faults
    ) -> float:
        """Clients and faults, then no more faults until all has settled; returns how many seconds that took."""
        async with asyncio.TaskGroup() as group:
            aside = [group.create_task(run()) for run in (recoveries.run, self._show_progress)]
            injecting = group.create_task(faults.run())
            clients = [group.create_task(self._client(http, recoveries)) for _ in range(self._options.clients)]
            ended = group.create_task(self._until_it_ends())
            await asyncio.wait([ended], timeout=60 * self._options.minutes)
            injecting.cancel()
            await asyncio.wait([injecting])
            await faults.heal()
            self._is_over = True
            _say(f"{len(faults.strikes)} faults are in; it may settle now")
            settling = time.monotonic()
            all_done = group.create_task(_all_of(clients))
            await asyncio.wait([ended, all_done], timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await wait_until_settled(client, SETTLE_S)
            settled_s = time.monotonic() - settling
            for task in (*clients, *aside, ended, all_done):
                task.cancel()
        return settled_s

    async def _until_it_ends(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._instance.runs:
                return

    def _faults(self, client: redis.asyncio.Redis, recoveries: Recoveries) -> Faults:
        options = self._options
        return Faults(
            self._instance,
            client,
            recoveries,
            random.Random(self._draw.getrandbits(64)),  # noqa: S311
            pool=_POOL,
            gap_s=options.gap_s,
            lease_s=self._settings.lease_s,
            redis_timeout_s=self._settings.redis_timeout_s,
            weights={kind: WEIGHTS[kind] for kind in options.kinds or WEIGHTS},
        )

    async def _client(self, http: httpx2.AsyncClient, recoveries: Recoveries) -> None:
        draw = random.Random(self._draw.getrandbits(64))  # noqa: S311
        client = Client(http, draw, SETTLE_S, recoveries.note_stream)
        while not self._is_over:
            sighting = Sighting(draw_plan(self._draw, len(self._sightings), poison=self._options.poison))
            self._sightings.append(sighting)
            await client.run(sighting)

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            ended = sum(bool(sighting.status) for sighting in self._sightings)
            _say(f"{len(self._sightings)} requests, {ended} ended")


async def _all_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


def _http_client(url: str) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        base_url=url,
        timeout=httpx2.Timeout(60, connect=5),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
