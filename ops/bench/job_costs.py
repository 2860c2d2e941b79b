"""What a job costs the server besides its tokens, and what a pump costs that has many workers to look at."""

from __future__ import annotations

import os
import socket
import uuid
from typing import Final

from ops.bench.step_writers import POOL, claim_job
from tasks.ledger import SyncLedger
from tasks.ledger_types import SlotWrite
from tasks.redis_clients import connect
from tasks.registry import WorkerInfo, worker_fields
from tasks.settings import Settings

_SLOTS: Final = 4
_LIVES_MS: Final = 60_000


def end_jobs(redis_url: str, num_jobs: int) -> None:
    """Accept, claim and end so many jobs of one token each."""
    settings = Settings(redis_url=redis_url)
    with connect(settings) as client:
        ledger = SyncLedger(client, settings)
        for _ in range(num_jobs):
            job = claim_job(ledger)
            last = SlotWrite(
                job.id, job.epoch, job.nonce, 1, (10_000,), (" the",), final="succeeded", finish_reason="length"
            )
            ledger.run(ledger.calls.step([last]))


def heartbeats(redis_url: str, num_workers: int) -> None:
    """So many full workers of a pool say that they live."""
    settings = Settings(redis_url=redis_url)
    with connect(settings) as client:
        ledger = SyncLedger(client, settings)
        for number in range(num_workers):
            worker = WorkerInfo(
                incarnation=uuid.uuid4().hex,
                name=f"worker-{number + 1}",
                host=socket.gethostname(),
                pid=os.getpid(),
                child_pid=None,
                state="ready",
                phase="ready",
                progress=1.0,
                pool=POOL,
                engine="simulated",
                device="cpu",
                fingerprint="wall",
                slots=_SLOTS,
                free=0,
            )
            ledger.run(ledger.calls.heartbeat(worker.incarnation, [POOL], _LIVES_MS, worker_fields(worker)))


def pumps(redis_url: str, times: int) -> None:
    """Look for jobs to invite, so often."""
    settings = Settings(redis_url=redis_url)
    with connect(settings) as client:
        ledger = SyncLedger(client, settings)
        for _ in range(times):
            ledger.run(ledger.calls.pump(POOL))
