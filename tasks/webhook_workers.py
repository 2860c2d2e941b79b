"""Who delivers webhooks: workers that say that they live, each time they look at the outbox."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from tasks import keys

#: So long a worker counts as alive after it was heard.
ALIVE_S = 5.0


@dataclass(frozen=True, slots=True)
class WebhookWorker:
    """One worker."""

    name: str
    host: str
    pid: int

    def encode(self) -> str:
        return f"{self.pid} {self.host} {self.name}"

    @classmethod
    def decode(cls, text: str) -> WebhookWorker:
        pid, host, name = text.split(" ", 2)
        return cls(name, host, int(pid))


def list_webhook_workers(client: redis.Redis) -> list[WebhookWorker]:
    """All that were heard within the last seconds, by name."""
    seconds, _ = client.time()
    return _workers(client.zrangebyscore(keys.HOOK_WORKERS, int(seconds) * 1000, "+inf"))


async def list_webhook_workers_async(client: redis.asyncio.Redis) -> list[WebhookWorker]:
    """All that were heard within the last seconds, by name."""
    seconds, _ = await client.time()
    return _workers(await client.zrangebyscore(keys.HOOK_WORKERS, int(seconds) * 1000, "+inf"))


def _workers(found: Iterable[Any]) -> list[WebhookWorker]:
    return sorted((WebhookWorker.decode(str(one)) for one in found), key=lambda worker: worker.name)
