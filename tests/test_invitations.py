"""The message that a script puts into the broker's list is the one that kombu itself would put there."""

from __future__ import annotations

import json
from typing import Any

import redis

from tasks import keys
from tasks.app import create_celery
from tasks.invitations import INVITATION_HEADER, invitation_template
from tasks.ledger import SyncLedger
from tasks.settings import Settings
from tests.ledger_harness import POOL, acceptance


def _ready_ledger(redis_url: str, client: redis.Redis) -> tuple[Settings, SyncLedger]:
    settings = Settings(redis_url=redis_url)
    ledger = SyncLedger(client, settings, invitation_template(create_celery(settings)))
    ledger.run(ledger.calls.heartbeat("w1", [POOL], 60_000, {"state": "ready", "free": "2", "fingerprint": "fp"}))
    return settings, ledger


def test_a_script_s_message_is_kombu_s(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        settings, ledger = _ready_ledger(redis_url, client)
        ledger.run(ledger.calls.accept(acceptance("j-1"), invite=True))
        raw: Any = client.lpop(keys.queue(POOL))
        ours = json.loads(raw)
        celery = create_celery(settings)
        task = celery.amqp.as_task_v2("j-1", keys.TASK_NAME, (), {}, argsrepr="()", kwargsrepr="{}", ignore_result=True)
        with celery.connection() as connection:
            connection.Producer(serializer="json").publish(
                task.body, exchange="", routing_key=keys.queue(POOL), headers=task.headers, **task.properties
            )
        raw = client.lpop(keys.queue(POOL))
        kombu_s = json.loads(raw)
    assert ours["headers"].pop(INVITATION_HEADER) == 1
    assert ours["properties"].pop("delivery_tag") != kombu_s["properties"].pop("delivery_tag")
    assert ours == kombu_s


def test_each_invitation_has_a_delivery_tag_of_its_own(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        _, ledger = _ready_ledger(redis_url, client)
        for id in ("j-1", "j-2"):
            ledger.run(ledger.calls.accept(acceptance(id)))
        assert len(ledger.run(ledger.calls.pump(POOL))) == 2
        client.delete(keys.invited(POOL))  # as if they had been lost
        client.rename(keys.queue(POOL), "first")
        assert len(ledger.run(ledger.calls.pump(POOL))) == 2
        messages: Any = client.lrange("first", 0, -1) + client.lrange(keys.queue(POOL), 0, -1)
    tags = {json.loads(message)["properties"]["delivery_tag"] for message in messages}
    assert len(tags) == len(messages) == 4


def test_an_id_that_looks_like_a_placeholder_or_a_pattern_stays_as_it_is(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        _, ledger = _ready_ledger(redis_url, client)
        id = 'a%1"@tag@\\'
        ledger.run(ledger.calls.accept(acceptance(id), invite=True))
        raw: Any = client.lpop(keys.queue(POOL))
    message = json.loads(raw)
    assert message["headers"]["id"] == message["properties"]["correlation_id"] == id
