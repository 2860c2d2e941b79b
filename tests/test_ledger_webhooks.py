"""The ledger's scripts on a real server: an end and its event are one step, and it stays until it is delivered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tasks import keys
from tasks.app import plain_celery
from tasks.invitations import INVITATION_HEADER, invitation_template
from tasks.settings import Settings
from tasks.webhook_calls import Attempt, DeliveryClaim, WebhookCalls, event_id
from tests.ledger_harness import LedgerOnAClock, acceptance, listening, restore, snapshot
from tests.mutation import Mutation, one

URL = "https://example.com/hooks?token=abc"
LEASE_MS = 25_000
RETRY = Attempt("retry", 500, duration_ms=12, wait_s=60)
DELIVERED = Attempt("delivered", 204, duration_ms=12)
DAY_S = 86400
#: The release before this one: its scripts know nothing of webhooks when they end a job.
WITHOUT_WEBHOOKS = Mutation(
    "the release before",
    "",
    one("  if j.webhook ~= '' then\n    into_outbox(id, NOW, at)", "  if false then\n    into_outbox(id, NOW, at)"),
    (),
)


class Webhooks:
    """The calls of a worker that delivers, on a ledger with a clock."""

    def __init__(self, ledger: LedgerOnAClock) -> None:
        self.ledger = ledger
        template = invitation_template(plain_celery(ledger.settings), keys.WEBHOOK_TASK)
        self.calls = WebhookCalls(ledger.settings, template)

    def pump(self, most: int = 32) -> int:
        return self.ledger.run(self.calls.pump_webhooks("1 here webhooks", 5000, most)).num_messages

    def claim(self, id: str = "j", nonce: str = "n1") -> DeliveryClaim:
        return self.ledger.run(self.calls.claim_delivery(id, nonce, LEASE_MS))

    def settle(self, attempt: Attempt, id: str = "j", nonce: str = "n1") -> str:
        return self.ledger.run(self.calls.settle_delivery(id, nonce, attempt, 32))

    def messages(self) -> list[str]:
        """Task ids of the messages that lie in the broker, the oldest first; they are taken out."""
        raw = self.ledger.client.lrange(keys.WEBHOOK_QUEUE, 0, -1)
        self.ledger.client.delete(keys.WEBHOOK_QUEUE)
        return [json.loads(str(one))["headers"]["id"] for one in reversed(raw)]

    def due(self, id: str = "j") -> float | None:
        score = self.ledger.client.zscore(keys.HOOKS, id)
        return None if score is None else float(str(score))

    def view(self, id: str = "j") -> dict[str, object]:
        view: dict[str, object] = self.ledger.view(id)["webhook"]
        return view


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def ended(ledger: LedgerOnAClock, id: str = "j") -> Webhooks:
    """A job with a webhook that has succeeded."""
    ledger.accept(id, webhook=URL)
    ledger.finish(ledger.claim(id))
    return Webhooks(ledger)


# --- the outbox -------------------------------------------------------------------------------------------------------


def by_its_owner(ledger: LedgerOnAClock) -> str:
    ledger.finish(ledger.claim())
    return "succeeded"


def as_failed(ledger: LedgerOnAClock) -> str:
    ledger.finish(ledger.claim(), "failed", error='{"message":"x","code":"engine_error"}')
    return "failed"


def by_a_cancel(ledger: LedgerOnAClock) -> str:
    ledger.run(ledger.calls.cancel("j"))
    return "cancelled"


def by_a_cancel_of_a_rider(ledger: LedgerOnAClock) -> str:
    rider = ledger.claim()
    ledger.run(ledger.calls.cancel("j"))
    ledger.run(ledger.calls.release(rider))
    return "cancelled"


def by_its_deadline(ledger: LedgerOnAClock) -> str:
    ledger.advance(3601)
    ledger.pass_grace()
    return "expired"


def by_one_death_too_many(ledger: LedgerOnAClock) -> str:
    rider = ledger.claim()
    for generation in range(1, 4):
        ledger.board(rider)
        ledger.run(ledger.calls.child_died(f"w1.{generation}", "exit code 137", [rider]))
    return "failed"


ENDS = (by_its_owner, as_failed, by_a_cancel, by_a_cancel_of_a_rider, by_its_deadline, by_one_death_too_many)


@pytest.mark.parametrize("end", ENDS)
def test_every_end_of_a_job_with_a_webhook_is_in_the_outbox_with_it(
    ledger: LedgerOnAClock, end: Callable[[LedgerOnAClock], str]
) -> None:
    ledger.accept(webhook=URL)
    with listening(ledger.client, keys.webhooks_channel(0)) as next_message:
        status = end(ledger)
        assert next_message() == "j"
    webhooks = Webhooks(ledger)
    due = webhooks.due()
    assert due is not None
    assert due <= ledger.now_ms
    assert webhooks.pump() == 1
    assert webhooks.messages() == [event_id("j")]
    claim = webhooks.claim()
    assert (claim.verdict, claim.number, claim.url, claim.job["status"]) == ("ok", 1, URL, status)
    assert claim.ended_ms == int(ledger.field("j", "finished_at"))


def test_a_job_without_a_webhook_leaves_nothing_behind(ledger: LedgerOnAClock) -> None:
    ledger.accept()
    ledger.finish(ledger.claim())
    assert not ledger.client.exists(keys.HOOKS)
    assert ledger.view("j")["webhook"] is None
    assert Webhooks(ledger).claim().verdict == "gone"


@pytest.mark.parametrize("more", [{"is_group": True}, {"batch": "b"}])
def test_groups_and_lines_of_batches_have_no_webhook(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of one job alone"):
        acceptance("j", webhook=URL, **more)


def test_a_job_accepted_twice_has_one_webhook(ledger: LedgerOnAClock) -> None:
    ledger.accept(webhook=URL)
    before = ledger.dump()
    ledger.accept(webhook=URL)
    ledger.accept(webhook="https://example.org/other")
    assert ledger.dump() == before


def test_an_end_that_a_release_without_webhooks_wrote_is_found_within_a_minute(ledger: LedgerOnAClock) -> None:
    old = LedgerOnAClock(ledger.client, Settings(), WITHOUT_WEBHOOKS.scripts())
    ledger.accept(webhook=URL)
    old.finish(old.claim())
    webhooks = Webhooks(ledger)
    assert webhooks.pump() == 0
    assert webhooks.view()["status"] == "pending"
    ledger.advance(61)
    assert webhooks.pump() == 1
    assert webhooks.claim().verdict == "ok"


def test_a_live_job_is_looked_at_now_and_then_and_nothing_is_sent(ledger: LedgerOnAClock) -> None:
    ledger.accept(webhook=URL)
    webhooks = Webhooks(ledger)
    for _ in range(3):
        ledger.advance(61)
        assert webhooks.pump() == 0
        assert webhooks.due() == ledger.now_ms + 60_000
    assert webhooks.claim().verdict == "live"
    assert webhooks.view() == {
        "url": "https://example.com/hooks?…",
        "event_id": "evt_j",
        "status": "waiting",
        "attempts": [],
        "next_attempt_at": None,
    }


def test_a_message_that_nobody_takes_is_sent_again(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    assert (webhooks.pump(), webhooks.pump()) == (1, 0)
    webhooks.messages()  # lost
    ledger.advance(10.1)
    assert webhooks.pump() == 1


def test_few_messages_are_in_the_broker_and_the_longest_due_come_first(ledger: LedgerOnAClock) -> None:
    for number in range(9):
        ledger.accept(f"j{number}", webhook=URL)
    for number in (4, 3, 8, 0, 1, 2, 5, 6, 7):
        ledger.run(ledger.calls.cancel(f"j{number}"))
    webhooks = Webhooks(ledger)
    assert [webhooks.pump(3), webhooks.pump(3)] == [3, 0]
    assert webhooks.messages() == ["evt_j4", "evt_j3", "evt_j8"]
    assert webhooks.claim("j4").verdict == "ok"
    assert webhooks.settle(DELIVERED, "j4") == "delivered"
    assert webhooks.messages() == [f"evt_j{number}" for number in (0, 1, 2, 5, 6, 7)], "who settles sends what is next"


def test_the_message_is_a_celery_task_on_the_webhooks_own_queue(ledger: LedgerOnAClock) -> None:
    ended(ledger).pump()
    message = json.loads(str(ledger.client.lindex(keys.WEBHOOK_QUEUE, 0)))
    assert message["headers"]["task"] == "carpool.deliver_webhook"
    assert INVITATION_HEADER in message["headers"]
    assert message["properties"]["delivery_info"]["routing_key"] == "carpool.webhooks"
    assert URL not in json.dumps(message)


# --- attempts ---------------------------------------------------------------------------------------------------------


def test_one_attempt_at_a_time(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    assert webhooks.claim(nonce="n1").verdict == "ok"
    before = ledger.dump()
    assert webhooks.claim(nonce="n2").verdict == "taken"
    assert webhooks.settle(DELIVERED, nonce="n2") == "fenced"
    assert ledger.dump() == before


def test_a_claim_whose_reply_was_lost_is_the_same_attempt(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    first = webhooks.claim()
    before = ledger.dump()
    assert webhooks.claim() == first
    assert ledger.dump() == before


def test_an_end_of_an_attempt_that_is_told_twice_counts_once(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    assert webhooks.settle(RETRY) == "pending"
    before = ledger.dump()
    assert webhooks.settle(RETRY) == "fenced"
    assert ledger.dump() == before


def test_what_failed_is_tried_again_when_its_time_has_come_and_not_before(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    webhooks.settle(RETRY)
    next_ms = ledger.now_ms + 60_000
    assert webhooks.due() == next_ms
    assert webhooks.view()["next_attempt_at"] == next_ms / 1000
    assert (webhooks.pump(), webhooks.claim(nonce="n2").verdict) == (0, "early"), "a doubled message begins nothing"
    ledger.advance(60)
    assert (webhooks.pump(), webhooks.claim(nonce="n2").number) == (1, 2)


def test_a_delivered_event_is_over(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    began = ledger.now_ms
    assert webhooks.settle(DELIVERED) == "delivered"
    assert webhooks.due() is None
    assert webhooks.view() == {
        "url": "https://example.com/hooks?…",
        "event_id": "evt_j",
        "status": "delivered",
        "attempts": [{"at": began / 1000, "status_code": 204, "error": None, "duration_ms": 12}],
        "next_attempt_at": None,
    }
    ledger.advance(3600)
    assert (webhooks.pump(), webhooks.claim(nonce="n2").verdict) == (0, "over")


def test_a_worker_that_dies_in_an_attempt_leaves_it_to_the_next_one(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.pump()
    webhooks.claim()
    ledger.advance(24)
    assert webhooks.pump() == 0
    ledger.advance(1)
    assert webhooks.pump() == 1
    claim = webhooks.claim(nonce="n2")
    assert (claim.verdict, claim.number) == ("ok", 2)
    assert webhooks.settle(DELIVERED, nonce="n1") == "fenced", "the sleeper woke up"
    assert webhooks.settle(DELIVERED, nonce="n2") == "delivered"
    attempts = webhooks.view()["attempts"]
    assert isinstance(attempts, list)
    assert [attempt["status_code"] for attempt in attempts] == [None, 204]
    assert attempts[0]["error"].startswith("interrupted")


def test_a_lease_that_ran_out_may_still_be_settled_while_nobody_else_has_begun(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    ledger.advance(100)
    assert webhooks.settle(DELIVERED) == "delivered"


def test_an_attempt_that_sent_nothing_does_not_count(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    assert webhooks.settle(Attempt("busy", wait_s=2)) == "pending"
    assert webhooks.due() == ledger.now_ms + 2000
    assert webhooks.view()["attempts"] == []
    ledger.advance(2)
    assert webhooks.claim(nonce="n2").number == 1


def test_a_receiver_that_wants_no_more_ends_it(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    assert webhooks.settle(Attempt("failed", 410)) == "failed"
    assert (webhooks.view()["status"], webhooks.due()) == ("failed", None)


def test_the_last_attempt_comes_at_the_end_of_the_span_and_then_it_is_given_up(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    end_ms = int(ledger.field("j", "finished_at"))
    ledger.advance(DAY_S - 100)
    webhooks.claim()
    assert webhooks.settle(Attempt("retry", 503, wait_s=3600)) == "pending"
    assert webhooks.due() == end_ms + DAY_S * 1000
    ledger.advance(100)
    assert webhooks.claim(nonce="n2").verdict == "ok"
    assert webhooks.settle(RETRY, nonce="n2") == "failed"
    assert (webhooks.view()["status"], webhooks.due()) == ("failed", None)


def test_attempts_that_kill_their_worker_are_given_up_too(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    ledger.advance(DAY_S)
    assert webhooks.claim(nonce="n2").verdict == "over"
    assert webhooks.view()["status"] == "failed"


def test_an_event_that_no_worker_was_there_for_is_tried_once_whatever_the_span(ledger: LedgerOnAClock) -> None:
    ledger = LedgerOnAClock(ledger.client, Settings(webhook_retry_s=0), ledger.changed)
    webhooks = ended(ledger)
    ledger.advance(1800)
    assert webhooks.claim().verdict == "ok"
    assert webhooks.settle(RETRY) == "failed"


def test_the_log_keeps_the_last_fifty_attempts(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    for number in range(1, 61):
        assert webhooks.claim(nonce=str(number)).number == number
        webhooks.settle(Attempt("retry", 400 + number, wait_s=1), nonce=str(number))
        ledger.advance(1)
    attempts = webhooks.view()["attempts"]
    assert isinstance(attempts, list)
    assert [attempt["status_code"] for attempt in attempts] == list(range(411, 461))
    assert len([name for name in ledger.record("j") if name.startswith("hook_")]) < 60


# --- how long it is kept ----------------------------------------------------------------------------------------------


def expiries(ledger: LedgerOnAClock, id: str = "j") -> set[int]:
    names = (keys.record(id), keys.log(id), keys.text(id), "{carpool}:idem:i", keys.celery_result(id))
    return {int(str(ledger.client.pexpiretime(name))) for name in names}


def test_a_job_is_kept_until_its_event_is_delivered_and_then_for_its_retention(ledger: LedgerOnAClock) -> None:
    ledger = LedgerOnAClock(ledger.client, Settings(retention_s=600, idempotency_s=600), ledger.changed)
    ledger.accept(webhook=URL, idempotency="i", body_hash="b", deadline_s=60)
    rider = ledger.claim()
    kept_s = DAY_S + 3600
    assert expiries(ledger) == {int(ledger.field("j", "deadline")) + kept_s * 1000}
    ledger.finish(rider)
    assert expiries(ledger) == {ledger.now_ms + kept_s * 1000}
    webhooks = Webhooks(ledger)
    webhooks.claim()
    webhooks.settle(RETRY)
    assert expiries(ledger) == {int(ledger.field("j", "finished_at")) + kept_s * 1000}
    ledger.advance(3600)
    webhooks.claim(nonce="n2")
    webhooks.settle(DELIVERED, nonce="n2")
    assert expiries(ledger) == {ledger.now_ms + 600_000}


def test_a_delivery_does_not_shorten_a_longer_retention_nor_lengthen_it(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    kept_until = int(ledger.field("j", "finished_at")) + (DAY_S + 3600) * 1000
    webhooks.claim()
    ledger.advance(7200)
    webhooks.settle(DELIVERED)
    assert int(str(ledger.client.pexpiretime(keys.record("j")))) == kept_until


def test_the_outbox_lives_as_long_as_its_longest_job(ledger: LedgerOnAClock) -> None:
    ledger.accept(webhook=URL)
    assert ledger.client.pexpiretime(keys.HOOKS) == ledger.client.pexpiretime(keys.record("j"))
    webhooks = Webhooks(ledger)
    ledger.run(ledger.calls.cancel("j"))
    webhooks.pump()
    assert {name for name in map(str, ledger.client.scan_iter()) if ledger.client.ttl(name) == -1} == {
        keys.WEBHOOK_QUEUE
    }


def test_a_forgotten_job_takes_its_event_along(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    webhooks.claim()
    assert ledger.run(ledger.calls.forget("j")) == "forgotten"
    assert webhooks.due() is None
    assert webhooks.settle(RETRY) == "fenced"
    assert webhooks.claim(nonce="n2").verdict == "gone"
    assert not ledger.client.exists(keys.record("j"))


def test_a_record_that_has_expired_leaves_the_outbox(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    ledger.client.delete(keys.record("j"))
    assert (webhooks.pump(), webhooks.due()) == (0, None)


# --- what Redis may lose, and other releases --------------------------------------------------------------------------


def test_a_lost_tail_leaves_the_event_with_its_end_and_its_id(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    held = snapshot(ledger.client)
    first = webhooks.claim()
    webhooks.settle(DELIVERED)
    restore(ledger.client, held)
    again = webhooks.claim(nonce="n2")
    assert (again.verdict, again.job["id"], again.ended_ms) == ("ok", first.job["id"], first.ended_ms)


def test_a_lost_end_brings_its_event_along_when_it_is_written_again(ledger: LedgerOnAClock) -> None:
    ledger.accept(webhook=URL)
    rider = ledger.claim()
    held = snapshot(ledger.client)
    ledger.finish(rider)
    restore(ledger.client, held)
    webhooks = Webhooks(ledger)
    assert webhooks.claim().verdict == "live"
    ledger.finish(rider)
    assert webhooks.claim().verdict == "ok"


def test_the_event_of_a_newer_release_s_record_is_left_to_a_worker_that_reads_it(ledger: LedgerOnAClock) -> None:
    webhooks = ended(ledger)
    ledger.client.hset(keys.record("j"), "v", ledger.version + 1)
    assert (webhooks.pump(), webhooks.claim().verdict) == (0, "newer")
    ledger.version += 1
    ledger.advance(11)
    assert (webhooks.pump(), webhooks.claim().verdict) == (1, "ok")
