"""What a revoked API key has left behind: its jobs and batches, cancelled where they have not ended."""

from __future__ import annotations

from tasks import keys
from tasks.batch_calls import BatchCalls
from tasks.ledger import SyncLedger
from tasks.redis_clients import connect
from tasks.settings import Settings


def cancel_everything(settings: Settings, owner: str) -> int:
    """Cancel all that an API key has running or waiting. Returns how many jobs were cancelled; raises RedisError.

    Lines of its batches that wait or ride are stopped by who serves the batch.
    """
    with connect(settings) as client:
        ledger = SyncLedger(client, settings)
        calls = BatchCalls(settings)
        for batch in client.zrange(keys.batches(owner), 0, -1):
            ledger.run(calls.cancel_batch(str(batch), owner))
        live = client.zrange(keys.live(owner), 0, -1)
        for job in live:
            ledger.run(calls.cancel(str(job), owner))
        return len(live)
