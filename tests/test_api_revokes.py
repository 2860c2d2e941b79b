"""Celery's revoke, while no worker is up to hear of it."""

from __future__ import annotations

import httpx2
import pytest

from tasks.app import create_celery
from tasks.settings import Settings
from tests.api_server import running_api
from tests.redis_server import RedisServer
from tests.service import eventually


def revoked(client: httpx2.Client, settings: Settings, *, terminate: bool) -> str:
    """The status of a job after it was revoked; the broadcast is repeated, since it is heard only once subscribed."""
    job = client.post("/jobs", json={"prompt": "Hello"}).json()["id"]
    celery = create_celery(settings)

    def cancelled() -> bool:
        celery.control.revoke(job, terminate=terminate)
        return bool(client.get(f"/jobs/{job}", params={"wait": 0.2}).json()["status"] == "cancelled")

    try:
        eventually("the job is cancelled", cancelled, 15)
    finally:
        celery.close()
    return str(client.get(f"/jobs/{job}").json()["status"])


@pytest.mark.parametrize("terminate", [False, True])
def test_a_revoke_is_heard_by_the_api_and_is_a_cancel_in_the_ledger(redis_url: str, terminate: bool) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated")
    with running_api(settings) as api, api.client() as client:
        assert revoked(client, settings, terminate=terminate) == "cancelled"


def test_it_is_heard_again_after_redis_was_away(own_redis: RedisServer) -> None:
    settings = Settings(redis_url=own_redis.url, engine="simulated")
    with running_api(settings) as api, api.client() as client:
        assert revoked(client, settings, terminate=False) == "cancelled"
        own_redis.kill()
        own_redis.start()
        eventually("it accepts again", lambda: client.get("/health/accepting").status_code == 200)
        assert revoked(client, settings, terminate=False) == "cancelled"
