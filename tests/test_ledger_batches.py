"""The ledger's scripts of batches on a real server: each line becomes a job once, and its answer is written once."""

from __future__ import annotations

import pytest
import redis

from tasks import keys
from tasks.redis_clients import database
from tasks.settings import Settings
from tests.ledger_batches import (
    BATCH,
    ERRORS,
    INPUT,
    OUTPUT,
    batch_field,
    content,
    drain,
    feed,
    feed_jobs,
    finish_job,
    group_item,
    job_item,
    job_of,
    make_batch,
    make_file,
    new_batch,
    open_lines,
    refused_item,
    status_of,
)
from tests.ledger_harness import POOL, LedgerOnAClock, listening


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def waiting(ledger: LedgerOnAClock) -> list[str]:
    return [str(id) for id in ledger.client.zrange(keys.wait(POOL), 0, -1)]


def test_a_feeder_that_runs_twice_makes_each_job_once(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    page = [job_item(1), job_item(2), refused_item(3)]
    assert feed(ledger, 0, page) == "ok"
    rider = ledger.claim(job_of(1))
    before = ledger.dump()
    assert feed(ledger, 0, page) == "moved"
    assert ledger.dump() == before
    ledger.finish(rider)
    assert (open_lines(ledger), content(ledger, ERRORS)) == ([1, 2], "refused 3\n")
    assert [batch_field(ledger, name) for name in ("line", "chunk", "offset", "failed")] == ["3", "0", "30", "1"]


def test_lines_wait_in_their_order_behind_everything_of_normal_priority(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    feed_jobs(ledger, 3, done=False)
    ledger.accept("normal")
    assert waiting(ledger) == ["normal", job_of(1), job_of(2), job_of(3)]
    assert ledger.view(job_of(1))["priority"] == 9


def test_a_batch_never_has_more_lines_open_than_its_window(ledger: LedgerOnAClock) -> None:
    window = ledger.settings.batch_window
    make_batch(ledger, window + 1)
    feed_jobs(ledger, window, done=False)
    before = ledger.dump()
    assert feed(ledger, window, [job_item(window + 1)]) == "full"
    assert ledger.dump() == before
    assert feed(ledger, window, [refused_item(window + 1)]) == "ok"
    finish_job(ledger, 5)
    drain(ledger, 5)
    assert feed(ledger, window + 1, [job_item(window + 2)]) == "ok"
    assert len(open_lines(ledger)) == window


def test_an_answer_is_written_once_however_often_it_is_brought(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    feed_jobs(ledger, 3)
    finish_job(ledger, 2)
    assert drain(ledger, 2) == 1
    assert drain(ledger, 2, 7) == 0
    finish_job(ledger, 1)
    assert drain(ledger, 1, 1, 2) == 1
    assert content(ledger) == "answer 2\nanswer 1\n"
    assert batch_field(ledger, "completed") == "2"


def test_the_answer_of_a_job_that_has_not_ended_is_not_written(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    assert feed(ledger, 0, [job_item(1), job_item(2), group_item(3)], done=True) == "ok"
    ledger.claim(job_of(2))
    ledger.finish(ledger.claim(f"{job_of(3)}.0"))
    assert drain(ledger, 1, 2, 3) == 0
    assert (open_lines(ledger), content(ledger)) == ([1, 2, 3], "")


def test_a_group_is_one_line(ledger: LedgerOnAClock) -> None:
    make_batch(ledger, 1)
    assert feed(ledger, 0, [group_item(1)], done=True) == "ok"
    for child in (f"{job_of(1)}.0", f"{job_of(1)}.1"):
        ledger.finish(ledger.claim(child))
    state = ledger.run(ledger.batch_calls.look_at_batch(BATCH))
    assert state is not None
    assert state.open == {1: "succeeded"}
    assert drain(ledger, 1) == 1
    assert status_of(ledger) == "completed"


def test_the_end_of_a_line_is_told_on_the_channel_of_the_batch(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    assert feed(ledger, 0, [job_item(1), group_item(2, n=1)]) == "ok"
    channel = keys.channel(database(ledger.settings.redis_url), BATCH)
    with listening(ledger.client, channel) as heard:
        finish_job(ledger, 1)
        assert '"status":"succeeded"' in heard()
        ledger.run(ledger.calls.cancel(f"{job_of(2)}.0"))
        assert '"status":"cancelled"' in heard()


def kept_until_its_answer_is_written(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    assert feed(ledger, 0, [job_item(1), group_item(2)], done=True) == "ok"
    finish_job(ledger, 1)
    for child in (f"{job_of(2)}.0", f"{job_of(2)}.1"):
        ledger.finish(ledger.claim(child))
    records = [keys.record(job_of(1)), keys.group(job_of(2)), keys.record(f"{job_of(2)}.1"), keys.log(job_of(1))]
    assert all(int(str(ledger.client.ttl(key))) > 3600 for key in records)
    drain(ledger, 1, 2)
    assert all(90 < int(str(ledger.client.ttl(key))) <= 100 for key in records)


def test_a_job_is_kept_until_its_answer_is_written_and_then_for_its_retention(redis_client: redis.Redis) -> None:
    kept_until_its_answer_is_written(LedgerOnAClock(redis_client, Settings(retention_s=100)))


def test_a_line_has_at_most_the_time_that_its_batch_has(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    ledger.advance(80_000)
    assert feed(ledger, 0, [job_item(1, deadline_s=86400), job_item(2, deadline_s=60)]) == "ok"
    assert ledger.field(job_of(1), "deadline") == batch_field(ledger, "deadline")
    assert int(ledger.field(job_of(2), "deadline")) < int(batch_field(ledger, "deadline"))


def test_a_batch_ends_when_its_last_line_is_taken_and_answered(ledger: LedgerOnAClock) -> None:
    make_batch(ledger, 2)
    feed_jobs(ledger, 1, done=False)
    finish_job(ledger, 1)
    drain(ledger, 1)
    assert status_of(ledger) == "in_progress"
    assert feed(ledger, 1, [job_item(2)], done=True) == "ok"
    assert status_of(ledger) == "in_progress"
    finish_job(ledger, 2)
    drain(ledger, 2)
    assert (status_of(ledger), ledger.client.zrange(keys.BATCHES_LIVE, 0, -1)) == ("completed", [])
    assert feed(ledger, 2, [job_item(3)]) == "over"
    assert ledger.run(ledger.batch_calls.cancel_batch(BATCH)) == "completed"


def test_files_of_a_batch_stay_until_it_has_ended(ledger: LedgerOnAClock) -> None:
    make_batch(ledger, 1)
    assert feed(ledger, 0, [job_item(1), refused_item(2)], done=True) == "ok"
    finish_job(ledger, 1)
    assert int(str(ledger.client.ttl(keys.file_chunk(INPUT, 0)))) > 86400
    for file in (INPUT, ERRORS):
        assert ledger.run(ledger.batch_calls.delete_file(file)) == "in_use"
    drain(ledger, 1)
    for key in (keys.file(OUTPUT), keys.file_chunk(OUTPUT, 0), keys.file_chunk(ERRORS, 0), keys.batch(BATCH)):
        assert 7100 < int(str(ledger.client.ttl(key))) <= 7200
    for file in (INPUT, ERRORS, OUTPUT):
        assert ledger.run(ledger.batch_calls.delete_file(file)) == "deleted"


def test_a_cancelled_batch_takes_no_further_job_and_ends_with_those_that_ride(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    feed_jobs(ledger, 2, done=False)
    assert ledger.run(ledger.batch_calls.cancel_batch(BATCH)) == "cancelling"
    before = ledger.dump()
    assert feed(ledger, 2, [job_item(3)], done=True) == "turned"
    assert ledger.dump() == before
    assert feed(ledger, 2, [refused_item(3)], done=True) == "ok"
    finish_job(ledger, 1)
    ledger.run(ledger.calls.cancel(job_of(2)))
    assert drain(ledger, 1) == 1
    assert status_of(ledger) == "cancelling"
    assert drain(ledger, 2, kind="errors") == 1
    assert (status_of(ledger), content(ledger), content(ledger, ERRORS)) == (
        "cancelled",
        "answer 1\n",
        "refused 3\nanswer 2\n",
    )


def test_a_batch_whose_time_is_over_takes_no_further_job(ledger: LedgerOnAClock) -> None:
    make_batch(ledger, 2)
    feed_jobs(ledger, 1, done=False)
    ledger.advance(86400)
    ledger.keep_ticking(1)
    state = ledger.run(ledger.batch_calls.look_at_batch(BATCH))
    assert state is not None
    assert (state.status, state.ending, state.open) == ("finalizing", "expired", {1: "expired"})
    assert feed(ledger, 1, [job_item(2)]) == "turned"
    assert feed(ledger, 1, [refused_item(2)], done=True) == "ok"
    drain(ledger, 1, kind="errors")
    assert status_of(ledger) == "expired"


@pytest.mark.parametrize("ending", ["cancelled", "expired", "failed"])
def test_a_batch_that_never_began_ends_at_once_and_lets_go_of_its_input(ledger: LedgerOnAClock, ending: str) -> None:
    make_file(ledger)
    ledger.run(ledger.batch_calls.create_batch(new_batch()))
    assert feed(ledger, 0, [job_item(1)]) == "over"
    if ending == "cancelled":
        assert ledger.run(ledger.batch_calls.cancel_batch(BATCH)) == "cancelled"
    elif ending == "expired":
        ledger.advance(86400)
        ledger.run(ledger.batch_calls.look_at_batch(BATCH))
    else:
        assert ledger.run(ledger.batch_calls.validated(BATCH, 1, '[{"line":1}]')) == "failed"
    assert status_of(ledger) == ending
    assert batch_field(ledger, f"{ending}_at") != ""
    assert ledger.run(ledger.batch_calls.validated(BATCH, 1)) == ending
    assert ledger.run(ledger.batch_calls.delete_file(INPUT)) == "deleted"


def test_a_batch_is_made_once(ledger: LedgerOnAClock) -> None:
    create = ledger.batch_calls.create_batch
    assert ledger.run(create(new_batch())) == ("no_file", INPUT)
    make_file(ledger)
    assert ledger.run(create(new_batch(idempotency="i", body_hash="b"))) == ("ok", BATCH)
    before = ledger.dump()
    assert ledger.run(create(new_batch())) == ("again", BATCH)
    assert ledger.run(create(new_batch(idempotency="i", body_hash="b"))) == ("again", BATCH)
    assert ledger.run(create(new_batch(id="batch_2", idempotency="i", body_hash="b"))) == ("again", BATCH)
    assert ledger.run(create(new_batch(id="batch_2", idempotency="i", body_hash="c"))) == ("conflict", BATCH)
    assert ledger.run(create(new_batch(id="batch_2", file=OUTPUT))) == ("no_file", OUTPUT)
    assert ledger.dump() == before


def test_what_a_batch_has_written_is_no_input(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    assert feed(ledger, 0, [refused_item(1)]) == "ok"
    assert ledger.run(ledger.batch_calls.create_batch(new_batch(id="batch_2", file=ERRORS))) == (
        "purpose",
        "batch_output",
    )


def test_a_line_is_not_forgotten_before_its_answer_is_written(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    assert feed(ledger, 0, [job_item(1), group_item(2, n=1)], done=True) == "ok"
    finish_job(ledger, 1)
    ledger.finish(ledger.claim(f"{job_of(2)}.0"))
    for line in (1, 2):
        assert ledger.run(ledger.calls.forget(job_of(line))) == "open"
    drain(ledger, 1, 2)
    for line in (1, 2):
        assert ledger.run(ledger.calls.forget(job_of(line))) == "forgotten"


def test_no_key_of_a_batch_is_without_an_expiry_at_any_point_of_its_life(ledger: LedgerOnAClock) -> None:
    def check() -> None:
        found = {str(key) for key in ledger.client.scan_iter() if int(str(ledger.client.pttl(key))) < 0}
        assert found == set()

    ledger.run(ledger.batch_calls.append_chunk(INPUT, 0, b"x"))
    check()
    make_file(ledger)
    check()
    ledger.run(ledger.batch_calls.create_batch(new_batch(idempotency="i", body_hash="b")))
    check()
    ledger.run(ledger.batch_calls.validated(BATCH, 3))
    assert feed(ledger, 0, [job_item(1), refused_item(2), group_item(3)], done=True) == "ok"
    check()
    finish_job(ledger, 1)
    drain(ledger, 1)
    check()
    ledger.run(ledger.batch_calls.cancel_batch(BATCH))
    ledger.run(ledger.calls.cancel(job_of(3)))
    drain(ledger, 3, kind="errors")
    assert status_of(ledger) == "cancelled"
    check()
    ledger.run(ledger.batch_calls.delete_file(OUTPUT))
    check()


def test_a_batch_that_is_gone_is_looked_for_no_more(ledger: LedgerOnAClock) -> None:
    make_batch(ledger)
    ledger.client.delete(keys.batch(BATCH))
    assert ledger.run(ledger.batch_calls.look_at_batch(BATCH)) is None
    assert ledger.client.zrange(keys.BATCHES_LIVE, 0, -1) == []
    assert feed(ledger, 0, [job_item(1)]) == "over"
    assert not ledger.client.exists(keys.record(job_of(1)))
