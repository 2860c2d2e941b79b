"""A worker that a test moves by hand: it claims jobs and writes their tokens through the ledger's own scripts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tasks import keys
from tasks.entries import TokenLogprob
from tasks.ledger import SyncLedger
from tasks.ledger_types import Rider, SlotWrite
from tasks.redis_clients import connect
from tasks.registry import ModelInfo, WorkerInfo, register_model, worker_fields
from tasks.settings import Settings

BOUND_S = 10.0


@dataclass
class Ride:
    """One claimed job."""

    id: str
    epoch: int
    nonce: str
    k: int
    stop: str = ""

    @property
    def rider(self) -> Rider:
        return Rider(self.id, self.epoch, self.nonce)


class ScriptedOwner:
    """Serves `settings.pool` without a model: tokens are what the test says.

    Args:
        state: of the heartbeat; "ready" has the ledger invite jobs.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str = "worker-1",
        engine: str = "simulated",
        fingerprint: str = "scripted",
        context_length: int | None = None,
        card: str = "",
    ) -> None:
        self.settings = settings
        self.client = connect(settings)
        self.ledger = SyncLedger(self.client, settings)
        self.calls = self.ledger.calls
        self.name = name
        self.engine = engine
        self.fingerprint = fingerprint
        self.incarnation = uuid.uuid4().hex
        register_model(
            self.client,
            ModelInfo(
                settings.pool,
                settings.pool,
                engine,
                time.time(),
                context_length=context_length,
                card=card,
                fingerprint=fingerprint,
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()

    def heartbeat(self, state: str = "ready", *, phase: str = "", progress: float | None = None) -> None:
        """Say that this worker lives, for a minute."""
        info = WorkerInfo(
            self.incarnation,
            self.name,
            "test",
            1,
            None,
            state,
            phase,
            progress,
            self.settings.pool,
            self.engine,
            "cpu",
            self.fingerprint,
            4,
            4,
        )
        self.ledger.run(self.calls.heartbeat(self.incarnation, [self.settings.pool], 60_000, worker_fields(info)))

    def next_job(self, timeout_s: float = BOUND_S) -> str:
        """The id of the job that is first in the queue, once there is one."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            waiting = self.client.zrange(keys.wait(self.settings.pool), 0, 0)
            if waiting:
                return str(waiting[0])
            time.sleep(0.005)  # the queue is a sorted set: nothing can be waited for
        raise AssertionError("no job was queued in time")

    def claim(self, id: str | None = None) -> Ride:
        """Claim a job, the first one in the queue unless it is named, and board it."""
        chosen = id or self.next_job()
        nonce = uuid.uuid4().hex
        claim = self.ledger.run(self.calls.claim(chosen, nonce, self.fingerprint, self.incarnation, self.name, 1))
        if claim.verdict != "ok":
            raise AssertionError(f"job {chosen} was not granted: {claim.verdict}")
        ride = Ride(chosen, claim.epoch, nonce, claim.k)
        self._step(ride, SlotWrite(chosen, claim.epoch, nonce, claim.k + 1, board=True, prompt_tokens=3))
        return ride

    def write(self, ride: Ride, *texts: str, lp: Sequence[TokenLogprob] = ()) -> Ride:
        """Write one entry with a token per text, and their logprobs where there are any."""
        ids = tuple(range(ride.k + 1, ride.k + len(texts) + 1))
        self._step(ride, SlotWrite(ride.id, ride.epoch, ride.nonce, ride.k + 1, ids, texts, tuple(lp)))
        return ride

    def finish(
        self, ride: Ride, status: str = "succeeded", reason: str = "length", *, tail: str = "", error: str = ""
    ) -> None:
        """End a job."""
        self._step(
            ride,
            SlotWrite(
                ride.id, ride.epoch, ride.nonce, ride.k + 1, final=status, finish_reason=reason, tail=tail, error=error
            ),
        )

    def run(self, texts: Sequence[str], id: str | None = None) -> str:
        """Claim a job, write these tokens, one entry each, and end it. Returns its id."""
        ride = self.claim(id)
        for text in texts:
            self.write(ride, text)
        self.finish(ride)
        return ride.id

    def look(self, ride: Ride) -> str:
        """Renew, and learn which stop is wanted."""
        self._step(ride, SlotWrite(ride.id, ride.epoch, ride.nonce, first=0))
        return ride.stop

    def _step(self, ride: Ride, write: SlotWrite) -> None:
        answer = self.ledger.run(self.calls.step([write]))[0]
        if answer.verdict not in ("ok", "ended"):
            raise AssertionError(f"the ledger refused a write: {answer}")
        ride.k, ride.stop = answer.k, answer.stop
