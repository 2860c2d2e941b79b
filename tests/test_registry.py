"""What workers say of themselves, read by releases before and after theirs; and which model a request goes to."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import redis

from tasks import keys
from tasks.ledger import SyncLedger
from tasks.registry import (
    ModelInfo,
    WorkerInfo,
    choose_model,
    list_workers,
    parse_models,
    register_model,
    worker_fields,
)
from tasks.settings import Settings
from tasks.version import carpool_version
from worker.messages import ModelCard, Phase
from worker.registration import Condition, Registration, TokenRate

CARD = ModelCard("m", "simulated", "cpu", "none", "fp", 512, tokenizer_json='{"version": "1.0"}')
NEW_FIELDS = ("model", "dtype", "context_length", "version", "tokens_per_s")


def registration(alias: str = "m") -> Registration:
    return Registration(Settings(engine="simulated", served_model_name=alias), "w1", "worker-1")


def condition(state: str = "ready") -> Condition:
    return Condition(state, Phase("ready", 1.0), 4711, 3)


def beat(client: redis.Redis, url: str, fields: dict[str, str]) -> None:
    ledger = SyncLedger(client, Settings(redis_url=url))
    register_model(client, ModelInfo("m", "m", "simulated", registered_at=1.0))
    ledger.run(ledger.calls.heartbeat("w1", ["m"], 10_000, fields))


def test_a_heartbeat_says_what_is_served_and_how_busy_the_worker_is(redis_client: redis.Redis, redis_url: str) -> None:
    one = registration()
    one.loaded(CARD)
    said = one.describe(condition())
    beat(redis_client, redis_url, worker_fields(said))
    (heard,) = list_workers(redis_client)
    assert heard == said
    assert (heard.pool, heard.model, heard.engine, heard.device, heard.dtype) == (
        "m",
        "simulated",
        "simulated",
        "cpu",
        "none",
    )
    assert (heard.context_length, heard.slots, heard.free, heard.child_pid) == (512, 4, 3, 4711)
    assert heard.version == carpool_version() != "unknown"


def test_before_its_model_is_loaded_a_worker_says_what_it_knows(redis_client: redis.Redis, redis_url: str) -> None:
    beat(redis_client, redis_url, worker_fields(registration().describe(condition("loading"))))
    (heard,) = list_workers(redis_client)
    assert (heard.device, heard.dtype, heard.context_length) == ("auto", "", None)
    assert heard.serves


def test_a_heartbeat_of_an_older_release_is_read(redis_client: redis.Redis, redis_url: str) -> None:
    fields = worker_fields(registration().describe(condition()))
    beat(redis_client, redis_url, {name: value for name, value in fields.items() if name not in NEW_FIELDS})
    (heard,) = list_workers(redis_client)
    assert (heard.name, heard.free, heard.state) == ("worker-1", 3, "ready")
    assert [getattr(heard, name) for name in NEW_FIELDS] == ["", "", None, "", 0.0]


def test_a_heartbeat_that_has_run_out_is_no_worker_whatever_is_left_of_it(
    redis_client: redis.Redis, redis_url: str
) -> None:
    beat(redis_client, redis_url, worker_fields(registration().describe(condition())))
    redis_client.delete(keys.worker("w1"))
    redis_client.hset(keys.worker("w1"), "free", "2")
    assert list_workers(redis_client) == []


@pytest.mark.parametrize(
    ("state", "serves"),
    [("loading", True), ("ready", True), ("restarting", True), ("draining", False), ("broken", False)],
)
def test_a_worker_on_its_way_out_serves_no_more(state: str, serves: bool) -> None:
    assert registration().describe(condition(state)).serves is serves


def test_a_second_worker_of_a_pool_leaves_what_the_api_counts_with(redis_client: redis.Redis) -> None:
    first = registration()
    first.announce(redis_client)
    assert parse_models(redis_client.hgetall(keys.MODELS))["m"].context_length is None
    first.publish(redis_client, CARD)
    loaded = parse_models(redis_client.hgetall(keys.MODELS))["m"]
    assert (loaded.context_length, loaded.card) == (512, first.card_key)
    registration().announce(redis_client)
    assert parse_models(redis_client.hgetall(keys.MODELS))["m"] == loaded


def test_another_model_under_the_same_alias_is_not_counted_with_the_old_one(redis_client: redis.Redis) -> None:
    register_model(redis_client, ModelInfo("m", "other", "transformers", 1.0, context_length=9, card="c"))
    registration().announce(redis_client)
    entry = parse_models(redis_client.hgetall(keys.MODELS))["m"]
    assert (entry.model, entry.context_length, entry.card) == ("simulated", None, "")


def test_tokens_per_second_are_those_of_the_last_ten_seconds() -> None:
    now = 100.0
    rate = TokenRate(lambda: now)
    assert rate.per_s() == 0
    for _ in range(20):
        now += 1
        rate.note(30)
        rate.per_s()
    assert rate.per_s() == pytest.approx(30)
    now += 5
    assert rate.per_s() == pytest.approx(15, rel=0.2)
    now += 60
    rate.per_s()
    now += 10
    assert rate.per_s() == 0


def test_two_heartbeats_at_once_do_not_make_a_rate_of_thousands() -> None:
    now = 100.0
    rate = TokenRate(lambda: now)
    rate.note(4)
    now += 0.001
    assert rate.per_s() <= 4


def models(*aliases: str) -> list[ModelInfo]:
    return [ModelInfo(alias, alias, "simulated", registered_at=time.time() + n) for n, alias in enumerate(aliases)]


@pytest.mark.parametrize(
    ("known", "alive", "is_named", "chosen"),
    [
        ([], [], False, "d"),
        (["d", "a"], [], False, "d"),
        (["d", "a"], ["d", "a"], False, "d"),
        (["d", "a"], ["a"], False, "a"),
        (["a", "b"], ["a", "b"], False, "b"),
        (["a", "b"], ["a"], False, "a"),
        (["a", "b"], [], False, "b"),
        (["a", "b"], ["a", "b"], True, "d"),
        (["d", "a"], ["a"], True, "d"),
    ],
)
def test_a_request_that_names_no_model_gets_the_default_or_one_that_is_served(
    known: Sequence[str], alive: Sequence[str], is_named: bool, chosen: str
) -> None:
    assert choose_model(None, models(*known), "d", is_named=is_named, alive=alive) == chosen


@pytest.mark.parametrize(
    ("asked", "known", "is_named", "chosen"),
    [
        ("a", ["a"], False, "a"),
        ("x", ["a"], False, None),
        ("d", [], False, "d"),
        ("d", ["a"], False, None),
        ("d", ["a"], True, "d"),
    ],
)
def test_a_model_that_nobody_has_served_is_unknown_unless_somebody_has_named_it(
    asked: str, known: Sequence[str], is_named: bool, chosen: str | None
) -> None:
    assert choose_model(asked, models(*known), "d", is_named=is_named) == chosen


def test_a_worker_is_the_same_read_back(redis_client: redis.Redis, redis_url: str) -> None:
    worker = WorkerInfo("w1", "n", "h", 1, None, "loading", "x", None, "m", "e", "cuda:1", "", 4, 4, "org/m", "float16")
    beat(redis_client, redis_url, worker_fields(worker))
    assert list_workers(redis_client) == [worker]
