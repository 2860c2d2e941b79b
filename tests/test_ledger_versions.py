"""During a rolling upgrade two releases share a ledger: what is written is what the older one reads."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import redis

from tasks import entries, keys
from tasks.job_request import SamplingParams
from tasks.ledger_types import Rider
from tasks.redis_clients import ServerRefused, check_server
from tasks.registry import ModelInfo, WorkerInfo, list_workers, parse_models, worker_fields
from tasks.settings import Settings
from tests.ledger_harness import LedgerOnAClock, listening, write
from worker.workload_manager import Ride

OLD, NEW = entries.VERSION, entries.VERSION + 1
#: A process that is not heard for so long does not live.
GONE_S = 60


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def agree(ledger: LedgerOnAClock, version: int) -> int:
    """A process that reads up to `version` says that it lives."""
    ledger.version = version
    return ledger.run(ledger.calls.agree())


def live(ledger: LedgerOnAClock, seconds: int, *versions: int) -> int:
    """Time in which processes of these versions live, and one of them reaps; returns what is written at its end."""
    written = 0
    for _ in range(seconds):
        ledger.reap()
        for version in versions:
            written = agree(ledger, version)
        ledger.advance(1)
    return written


def upgraded(ledger: LedgerOnAClock) -> None:
    """A ledger that nobody older than NEW has to do with any more."""
    agree(ledger, OLD)
    assert live(ledger, GONE_S + 20, NEW) == NEW


def test_a_new_ledger_is_written_in_the_version_of_its_first_process(ledger: LedgerOnAClock) -> None:
    assert agree(ledger, NEW) == NEW
    ledger.accept("j")
    assert ledger.field("j", "v") == str(NEW)


def test_while_a_process_of_the_older_release_lives_its_version_is_written(ledger: LedgerOnAClock) -> None:
    agree(ledger, OLD)
    assert live(ledger, GONE_S + 20, NEW, OLD) == OLD
    agree(ledger, NEW)
    ledger.accept("j")
    ledger.accept_group("g")
    assert [ledger.field(id, "v") for id in ("j", "g.0")] == [str(OLD)] * 2
    assert ledger.client.hget(keys.group("g"), "v") == str(OLD)


def test_the_new_version_is_written_once_the_last_old_process_has_been_silent_for_a_minute(
    ledger: LedgerOnAClock,
) -> None:
    live(ledger, 20, OLD, NEW)
    assert live(ledger, GONE_S - 2, NEW) == OLD
    assert live(ledger, 4, NEW) == NEW


def test_after_an_outage_the_old_processes_are_heard_before_the_new_version_is_written(ledger: LedgerOnAClock) -> None:
    live(ledger, 20, OLD, NEW)
    ledger.advance(10 * GONE_S)
    assert agree(ledger, NEW) == OLD
    ledger.reap()
    assert agree(ledger, NEW) == OLD
    assert live(ledger, 20, NEW, OLD) == OLD


def test_a_process_that_cannot_read_what_is_written_is_told_and_does_not_count(ledger: LedgerOnAClock) -> None:
    upgraded(ledger)
    before = ledger.dump()
    assert agree(ledger, OLD) == NEW
    assert ledger.dump() == before


def test_a_process_two_releases_ahead_is_told_and_does_not_count(ledger: LedgerOnAClock) -> None:
    upgraded(ledger)
    before = ledger.dump()
    assert agree(ledger, NEW + 2) == NEW
    assert ledger.dump() == before


def test_a_process_that_cannot_read_what_is_written_makes_jobs_that_all_can_read(ledger: LedgerOnAClock) -> None:
    upgraded(ledger)
    ledger.version = OLD
    ledger.accept("j")
    assert ledger.field("j", "v") == str(OLD)


def test_the_whole_log_of_a_job_has_the_version_of_its_record(ledger: LedgerOnAClock) -> None:
    agree(ledger, OLD)
    ledger.version = NEW
    ledger.accept("old")
    upgraded(ledger)
    ledger.accept("new")
    for id, version in (("old", OLD), ("new", NEW)):
        claim, nonce = ledger.try_claim(id)
        assert (claim.verdict, claim.version) == ("ok", version)
        rider = Rider(id, claim.epoch, nonce)
        ledger.step(write(rider, 1, 2, version=claim.version))
        ledger.finish(rider)
        log = [json.loads(fields["d"]) for _, fields in ledger.raw_log(id)]
        assert [(entry["t"], entry["v"]) for entry in log] == [
            ("marker", version),
            ("tokens", version),
            ("end", version),
        ]


def test_a_group_s_end_has_the_version_of_its_record(ledger: LedgerOnAClock) -> None:
    agree(ledger, OLD)
    ledger.version = NEW
    ledger.accept_group("g", 1)
    with listening(ledger.client, keys.channel(0, "g")) as next_message:
        ledger.finish(ledger.claim("g.0"))
        assert json.loads(next_message())["v"] == OLD


def test_a_record_of_the_newer_release_is_left_to_a_worker_that_reads_it(ledger: LedgerOnAClock) -> None:
    upgraded(ledger)
    ledger.accept("j")
    before = ledger.dump()
    ledger.version = OLD
    assert ledger.try_claim("j")[0].verdict == "newer"
    assert ledger.dump() == before
    ledger.version = NEW
    assert ledger.try_claim("j")[0].verdict == "ok"


def test_a_job_that_asks_for_a_parameter_of_a_newer_release_is_left_to_a_worker_that_knows_it(
    ledger: LedgerOnAClock,
) -> None:
    ledger.accept("j", params='{"max_tokens":8,"warmth":0.5}')
    before = ledger.dump()
    assert ledger.try_claim("j")[0].verdict == "newer"
    assert ledger.dump() == before


def test_a_parameter_of_a_newer_release_that_is_not_asked_for_is_in_nobody_s_way(ledger: LedgerOnAClock) -> None:
    ledger.accept("j", params='{"max_tokens":8,"warmth":null}')
    claim, nonce = ledger.try_claim("j")
    assert claim.verdict == "ok"
    assert Ride.from_claim("j", nonce, claim).params == SamplingParams(max_tokens=8)


def test_what_a_newer_release_says_of_its_models_and_workers_besides_is_passed_over(ledger: LedgerOnAClock) -> None:
    client = ledger.client
    model = ModelInfo("m", "m", "simulated", registered_at=1.0)
    client.hset(keys.MODELS, "m", json.dumps({**asdict(model), "family": "next"}))
    worker = WorkerInfo("w1", "w1", "here", 1, 2, "ready", "ready", 1.0, "m", "simulated", "cpu", "fp", 4, 4)
    ledger.run(ledger.calls.heartbeat("w1", ["m"], 10_000, {**worker_fields(worker), "rack": "next"}))
    assert parse_models(client.hgetall(keys.MODELS)) == {"m": model}
    assert list_workers(client) == [worker]


@pytest.mark.parametrize(
    ("found", "advice"),
    [(entries.VERSION + 1, "pip install --upgrade carpool"), (entries.VERSION - 2, "an upgrade skips none")],
)
def test_a_ledger_that_this_release_cannot_read_is_refused_with_one_thing_to_do(
    redis_client: redis.Redis, redis_url: str, found: int, advice: str
) -> None:
    redis_client.set(keys.SCHEMA, found)
    with pytest.raises(ServerRefused, match=advice) as caught:
        check_server(redis_client, redis_url)
    assert f"version {found}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert redis_client.get(keys.SCHEMA) == str(found)


@pytest.mark.parametrize("found", [None, entries.VERSION - 1, entries.VERSION])
def test_a_ledger_of_this_release_or_the_one_before_is_taken(
    redis_client: redis.Redis, redis_url: str, found: int | None
) -> None:
    if found is not None:
        redis_client.set(keys.SCHEMA, found)
    check_server(redis_client, redis_url)
    assert redis_client.get(keys.SCHEMA) == str(entries.VERSION if found is None else found)
