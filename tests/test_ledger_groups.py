"""The ledger's scripts on a real server: groups of jobs, and the record that Celery reads."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
import redis
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from redis.exceptions import ResponseError

from tasks import keys
from tasks.app import create_celery
from tasks.codes import JobFailed
from tasks.settings import Settings
from tests.ledger_harness import POOL, LedgerOnAClock, listening


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def error_of(message: str) -> str:
    return f'{{"message":"{message}","type":"server_error","param":null,"code":"engine_error"}}'


# --- groups -----------------------------------------------------------------------------------------------------------


def end_all(ledger: LedgerOnAClock, statuses: dict[str, str]) -> None:
    for id, status in statuses.items():
        error = error_of(f"{id} broke") if status == "failed" else ""
        ledger.finish(ledger.claim(id), status, error=error, tail=f"<{id}>")


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("succeeded", "succeeded", "succeeded"), "succeeded"),
        (("succeeded", "expired", "succeeded"), "expired"),
        (("expired", "cancelled", "expired"), "cancelled"),
        (("failed", "cancelled", "expired"), "failed"),
        (("cancelled", "succeeded", "failed"), "failed"),
    ],
)
def test_a_group_ends_with_its_last_child_and_the_worst_end_of_all(
    ledger: LedgerOnAClock, statuses: tuple[str, ...], expected: str
) -> None:
    group_ends_as(ledger, statuses, expected)


def group_ends_as(ledger: LedgerOnAClock, statuses: tuple[str, ...], expected: str) -> None:
    ledger.accept_group("g", n=3)
    end_all(ledger, {f"g.{i}": status for i, status in enumerate(statuses[:2])})
    assert ledger.view("g")["status"] == "running"
    assert ledger.celery_record("g") == {}
    end_all(ledger, {"g.2": statuses[2]})
    view = ledger.view("g")
    assert view["status"] == expected
    assert view["texts"] == ["<g.0>", "<g.1>", "<g.2>"]
    if expected == "failed":
        assert view["error"]["message"] == f"g.{statuses.index('failed')} broke"


def test_the_children_of_a_group_are_kept_until_the_group_has_ended_and_then_all_share_one_expiry(
    ledger: LedgerOnAClock,
) -> None:
    ledger.accept_group("g", n=2, deadline_s=3600)
    end_all(ledger, {"g.0": "succeeded"})
    assert ledger.client.pexpiretime(keys.log("g.0")) == int(ledger.field("g.0", "deadline")) + 86_400_000
    end_all(ledger, {"g.1": "succeeded"})
    of_the_group = [keys.group("g"), "celery-task-meta-g"]
    for child in ("g.0", "g.1"):
        of_the_group += [keys.record(child), keys.log(child), keys.text(child), f"celery-task-meta-{child}"]
    assert {ledger.client.pexpiretime(key) for key in of_the_group} == {ledger.now_ms + 86_400_000}


def test_a_cancel_of_a_group_stops_what_rides_and_ends_what_waits(ledger: LedgerOnAClock) -> None:
    ledger.accept_group("g", n=3)
    end_all(ledger, {"g.0": "succeeded"})
    rider = ledger.claim("g.1")
    assert ledger.run(ledger.calls.cancel("g")) == "requested"
    assert [ledger.status(f"g.{i}") for i in range(3)] == ["succeeded", "running", "cancelled"]
    ledger.finish(rider, "cancelled")
    assert ledger.view("g")["status"] == "cancelled"
    assert ledger.run(ledger.calls.cancel("g")) == "cancelled"


def test_a_group_is_forgotten_with_its_children(ledger: LedgerOnAClock) -> None:
    ledger.accept_group("g", n=2)
    assert ledger.run(ledger.calls.forget("g")) == "riding"
    end_all(ledger, {"g.0": "succeeded", "g.1": "succeeded"})
    assert ledger.run(ledger.calls.forget("g.0")) == "child"
    assert ledger.run(ledger.calls.forget("g")) == "forgotten"
    assert not [key for key in ledger.dump() if key not in (keys.POOLS, keys.use(POOL), keys.rate(POOL), keys.SEEN)]


# --- Celery's record --------------------------------------------------------------------------------------------------


def celery_result(redis_url: str, id: str) -> AsyncResult[Any]:
    return AsyncResult(id, app=create_celery(Settings(redis_url=redis_url)))


def test_celery_reads_the_end_of_a_job_as_its_object(ledger: LedgerOnAClock, redis_url: str) -> None:
    rider = ledger.ride("j", tokens=1)
    assert celery_result(redis_url, "j").state == "STARTED"
    ledger.finish(rider)
    result = celery_result(redis_url, "j")
    assert (result.state, result.get(timeout=1)) == ("SUCCESS", ledger.view("j"))
    assert result.date_done is not None


def test_celery_raises_what_ended_a_failed_or_expired_or_cancelled_job(ledger: LedgerOnAClock, redis_url: str) -> None:
    ledger.finish(ledger.ride("failed"), "failed", error=error_of("broke"))
    ledger.accept("expired", deadline_s=1)
    ledger.accept("cancelled")
    ledger.run(ledger.calls.cancel("cancelled"))
    ledger.advance(2)
    ledger.reap()
    for id, state, raised in (
        ("failed", "FAILURE", JobFailed),
        ("expired", "FAILURE", JobFailed),
        ("cancelled", "REVOKED", TaskRevokedError),
    ):
        result = celery_result(redis_url, id)
        assert result.state == state
        with pytest.raises(raised):
            result.get(timeout=1)
    with pytest.raises(JobFailed, match="broke"):
        celery_result(redis_url, "failed").get(timeout=1)


@pytest.mark.parametrize("day", ["2096-02-29", "2096-03-01", "2099-12-31", "2100-02-28", "2100-03-01"])
def test_celery_s_date_is_the_time_of_the_end(ledger: LedgerOnAClock, day: str) -> None:
    ended = datetime.fromisoformat(f"{day}T23:59:59.999000+00:00")
    ledger.now_ms = round(ended.timestamp() * 1000) - 2
    ledger.accept("j")
    ledger.run(ledger.calls.cancel("j"))
    assert ledger.celery_record("j")["date_done"] == f"{day}T23:59:59.999000+00:00"


def test_a_result_is_announced_as_celery_does(ledger: LedgerOnAClock) -> None:
    rider = ledger.ride("j")
    with listening(ledger.client, "celery-task-meta-j") as next_message:
        ledger.finish(rider)
        heard = next_message()
    assert heard == ledger.client.get("celery-task-meta-j")


def test_a_wrong_key_stops_a_script_before_it_writes(ledger: LedgerOnAClock) -> None:
    ledger.accept("j")
    ledger.client.set(keys.log("j"), "no stream")
    with pytest.raises(ResponseError):
        ledger.run(ledger.calls.cancel("j"))
    assert ledger.status("j") == "queued"
