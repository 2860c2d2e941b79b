"""The ledger's scripts of files on a real server: chunks, what they take, and how long they live."""

from __future__ import annotations

import pytest
import redis

from tasks import keys
from tasks.batch_types import NewFile
from tasks.settings import Settings
from tests.ledger_batches import INPUT, content, make_file, total_bytes
from tests.ledger_harness import LedgerOnAClock


@pytest.fixture
def ledger(redis_client: redis.Redis) -> LedgerOnAClock:
    return LedgerOnAClock(redis_client, Settings())


def append(ledger: LedgerOnAClock, file: str, n: int, data: bytes) -> int | None:
    return ledger.run(ledger.batch_calls.append_chunk(file, n, data))


def test_a_chunk_that_is_sent_twice_counts_once(ledger: LedgerOnAClock) -> None:
    for _ in range(2):
        append(ledger, INPUT, 0, b"abc")
        append(ledger, INPUT, 1, b"de")
    assert total_bytes(ledger) == 5
    assert make_file(ledger, chunks=[b"abc", b"de"]) == "ok"
    assert (total_bytes(ledger), content(ledger, INPUT)) == (5, "abcde")
    before = ledger.dump()
    assert make_file(ledger, chunks=[]) == "ok"
    assert ledger.dump() == before


def test_all_files_together_have_a_cap(redis_client: redis.Redis) -> None:
    ledger = LedgerOnAClock(redis_client, Settings(max_files_bytes=10))
    make_file(ledger, "file-a", [b"1234567"])
    before = ledger.dump()
    assert append(ledger, "file-b", 0, b"1234") == 7
    assert ledger.dump() == before
    assert append(ledger, "file-b", 0, b"123") is None
    assert ledger.run(ledger.batch_calls.delete_file("file-a")) == "deleted"
    assert append(ledger, "file-b", 1, b"1234567") is None
    assert total_bytes(ledger) == 10


def test_what_has_expired_gives_its_room_back(redis_client: redis.Redis) -> None:
    ledger = LedgerOnAClock(redis_client, Settings(max_files_bytes=10))
    make_file(ledger, "file-a", [b"12345"], ttl_s=3600)
    append(ledger, "file-left-unfinished", 0, b"12345")
    assert append(ledger, "file-b", 0, b"1") == 10
    ledger.advance(3601)
    assert append(ledger, "file-b", 0, b"1") is None
    assert total_bytes(ledger) == 1
    assert ledger.client.zrange(keys.FILES, 0, -1) == []


def test_an_upload_that_lost_a_chunk_is_no_file(ledger: LedgerOnAClock) -> None:
    append(ledger, INPUT, 0, b"abc")
    append(ledger, INPUT, 1, b"abc")
    ledger.client.delete(keys.file_chunk(INPUT, 0))
    file = NewFile(INPUT, "x", "batch", 6, 2, 3600)
    assert ledger.run(ledger.batch_calls.finish_file(file)) == ("lost", INPUT)
    assert not ledger.client.exists(keys.file(INPUT))


def test_an_idempotency_key_makes_one_file(ledger: LedgerOnAClock) -> None:
    assert make_file(ledger, "file-a", idempotency="i", body_hash="b") == "ok"
    assert make_file(ledger, "file-b", idempotency="i", body_hash="b") == "again"
    assert make_file(ledger, "file-c", idempotency="i", body_hash="c") == "conflict"
    assert not ledger.client.exists(keys.file("file-b"), keys.file("file-c"))


def test_a_deleted_file_leaves_nothing(ledger: LedgerOnAClock) -> None:
    make_file(ledger, "file-a", [b"1", b"2"])
    assert ledger.run(ledger.batch_calls.delete_file("file-a")) == "deleted"
    assert ledger.run(ledger.batch_calls.delete_file("file-a")) == "gone"
    assert [key for key in ledger.client.scan_iter() if key not in (keys.FILES_BYTES, keys.TICK)] == []
    assert total_bytes(ledger) == 0


def test_an_upload_that_is_given_up_leaves_nothing(ledger: LedgerOnAClock) -> None:
    assert ledger.run(ledger.batch_calls.delete_file("file-that-never-began", 1)) == "deleted"
    append(ledger, INPUT, 0, b"abc")
    append(ledger, INPUT, 1, b"abc")
    assert ledger.run(ledger.batch_calls.delete_file(INPUT, 2)) == "deleted"
    assert not ledger.client.exists(keys.file_chunk(INPUT, 0), keys.file_chunk(INPUT, 1))
    assert total_bytes(ledger) == 0


def test_all_keys_of_a_file_share_one_expiry(ledger: LedgerOnAClock) -> None:
    make_file(ledger, "file-a", [b"1", b"2"], ttl_s=5000)
    names = [keys.file("file-a"), keys.file_chunk("file-a", 0), keys.file_chunk("file-a", 1)]
    assert len({int(str(ledger.client.pexpiretime(name))) for name in names}) == 1
    assert ledger.client.hget(names[0], "expires_at") == str(ledger.client.pexpiretime(names[0]))
