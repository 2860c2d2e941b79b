"""Log entries: what they hold, how they are cut, and what a reader refuses."""

from __future__ import annotations

import json

import pytest
import redis

from tasks import keys
from tasks.entries import VERSION, Entry, TokenLogprob, decode, encode_tokens, token_string
from tasks.settings import Settings
from tests.ledger_harness import LedgerOnAClock, write


def test_a_token_entry_comes_back_as_it_was_written() -> None:
    entry = decode(encode_tokens(7, (11, 12, 13), ("a", "", "é🚗")))
    assert entry == Entry("tokens", 7, (11, 12, 13), ("a", "", "é🚗"))
    assert entry.first == 5


def test_a_token_entry_is_compact_utf8_with_one_text_per_id() -> None:
    data = encode_tokens(2, (1, 2), ('"\\\n', "\u2028日"))
    assert data == '{"v":1,"t":"tokens","n":2,"ids":[1,2],"text":["\\"\\\\\\n","\u2028日"]}'
    assert decode(data.encode()).text == ('"\\\n', "\u2028日")


@pytest.mark.parametrize(
    ("have", "ids", "first"),
    [(0, (11, 12, 13), 5), (4, (11, 12, 13), 5), (5, (12, 13), 6), (6, (13,), 7), (7, (), 8), (20, (), 8)],
)
def test_a_reader_takes_the_part_of_an_entry_that_it_does_not_have(have: int, ids: tuple[int, ...], first: int) -> None:
    part = decode(encode_tokens(7, (11, 12, 13), ("a", "b", "c"))).after(have)
    assert (part.ids, part.first, part.n) == (ids, first, 7)
    assert len(part.text) == len(ids)


def test_logprobs_are_cut_with_their_tokens_and_stand_in_an_entry_only_where_they_were_asked_for() -> None:
    lp: list[TokenLogprob] = [
        {"id": id, "lp": -0.5, "b": [0xF0, 0x9F, id], "top": [{"id": 9, "lp": -0.25, "b": [97]}]} for id in (11, 12, 13)
    ]
    entry = decode(encode_tokens(7, (11, 12, 13), ("a", "", ""), lp))

    assert entry.lp == tuple(lp)
    assert entry.after(5).lp == tuple(lp[1:])
    assert decode(encode_tokens(7, (11,), ("a",))).lp == ()
    assert [token_string(one) for one in (lp[0], *lp[0].get("top", ()))] == ["\ufffd\x0b", "a"]


def test_a_logprob_that_json_cannot_say_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_tokens(1, (1,), ("a",), [{"id": 1, "lp": float("-inf"), "b": []}])


def test_an_entry_of_a_newer_release_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=f"version {VERSION + 1}.*upgrade"):
        decode(f'{{"v":{VERSION + 1},"t":"tokens","n":1}}')


@pytest.mark.parametrize("data", ['{"v":1,"t":"note","n":1}', "[]", "no json", '{"v":1,"n":1}'])
def test_what_is_no_entry_is_refused(data: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(data)


def test_markers_and_ends_of_the_scripts_are_entries_too(redis_client: redis.Redis) -> None:
    ledger = LedgerOnAClock(redis_client, Settings())
    rider = ledger.ride("j", worker='w"1')
    ledger.step(write(rider, 1, final="failed", finish_reason="error", tail="é…", error='{"message":"x\\"y"}'))
    marker, tokens, end = ledger.log("j")
    assert (marker.kind, marker.n, marker.ids) == ("marker", 0, ())
    assert (tokens.kind, tokens.n) == ("tokens", 1)
    assert (end.kind, end.n, end.status, end.finish_reason, end.text) == ("end", 1, "failed", "error", ("é…",))
    assert end.error == {"message": 'x"y'}
    assert end.usage == {"prompt_tokens": None, "completion_tokens": 1, "total_tokens": None}


def test_every_entry_of_a_log_carries_its_version_and_one_field(redis_client: redis.Redis) -> None:
    ledger = LedgerOnAClock(redis_client, Settings())
    ledger.finish(ledger.ride("j", tokens=2))
    for _, fields in ledger.raw_log("j"):
        assert set(fields) == {"d"}
        assert json.loads(fields["d"])["v"] == VERSION
    assert redis_client.hget(keys.record("j"), "v") == str(VERSION)
