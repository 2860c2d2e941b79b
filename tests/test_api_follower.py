"""The reader's rule: whatever is lost, doubled or late on the way, a client gets each token once and in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.follower import Follower, log_start
from tasks.entries import Entry


def tokens(n: int, count: int = 1) -> Entry:
    """The entry of tokens n - count + 1 to n."""
    numbers = range(n - count + 1, n + 1)
    return Entry("tokens", n, tuple(numbers), tuple(f"t{number}" for number in numbers))


def marker(n: int) -> Entry:
    return Entry("marker", n)


def end(n: int) -> Entry:
    return Entry("end", n, text=("tail",), status="succeeded", finish_reason="length")


def test_a_token_that_the_client_has_is_dropped() -> None:
    follower = Follower(5)
    assert follower.take_live(tokens(5)) is None
    assert not follower.needs_log


def test_of_an_entry_that_straddles_only_the_new_part_is_taken() -> None:
    follower = Follower(5)
    new = follower.take_live(tokens(8, count=5))
    assert new is not None
    assert new.text == ("t6", "t7", "t8")
    assert follower.have == 8


def test_a_gap_sends_to_the_log() -> None:
    follower = Follower(5)
    assert follower.take_live(tokens(7)) is None
    assert follower.needs_log
    assert follower.have == 5


@pytest.mark.parametrize("entry", [marker(6), end(6)])
def test_a_marker_or_an_end_ahead_of_the_client_sends_to_the_log(entry: Entry) -> None:
    follower = Follower(5)
    assert follower.take_live(entry) is None
    assert follower.needs_log
    assert not follower.ended


def test_an_end_behind_the_client_closes_as_after_a_lost_tail_of_redis() -> None:
    follower = Follower(9)
    assert follower.take_live(end(7)) == end(7)


def test_the_end_comes_once() -> None:
    follower = Follower(1)
    assert follower.take_live(end(1)) is not None
    assert follower.take_live(end(1)) is None
    assert follower.take_logged(end(1)) is None


def test_a_gap_in_the_log_itself_is_an_error() -> None:
    with pytest.raises(ValueError, match="goes on at token 3 behind token 1"):
        Follower(1).take_logged(tokens(3))


def test_reading_starts_at_the_beginning_or_behind_the_cursor_in_the_first_epoch() -> None:
    assert log_start(0) == "-"
    assert log_start(7) == "(1-7"


def _log(sizes: Sequence[int], claims: frozenset[int]) -> list[tuple[tuple[int, int], Entry]]:
    """A job's whole log with its ids (epoch, n): entries of these sizes, a claim before some of them, and the end."""
    epoch, k = 1, 0
    log = [((epoch, 0), marker(0))]
    for index, size in enumerate(sizes):
        if index in claims:
            epoch += 1
            log.append(((epoch, k), marker(k)))
        k += size
        log.append(((epoch, k), tokens(k, size)))
    log.append(((epoch + 1, k), end(k)))
    return log


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_interleaving_gives_every_token_once_and_in_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=12), "sizes")
    claims = data.draw(st.frozensets(st.integers(0, len(sizes) - 1)), "claims")
    log = _log(sizes, claims)
    total = sum(sizes)
    start = data.draw(st.integers(0, total), "cursor")
    follower = Follower(start)
    follower.needs_log = True
    published, in_flight, got = 0, list[Entry](), list[str]()
    ended = False

    def take(entry: Entry | None) -> None:
        nonlocal ended
        if entry is not None:
            assert not ended, "nothing comes behind the end"
            got.extend(entry.text if entry.kind == "tokens" else [])
            ended = entry.kind == "end"

    def read_log() -> None:
        follower.start_reading()
        bound = (1, follower.have) if log_start(follower.have) != "-" else (0, 0)
        for id, entry in log[:published]:
            if id > bound:
                take(follower.take_logged(entry))

    for _ in range(data.draw(st.integers(0, 60), "moves")):
        move = data.draw(
            st.sampled_from(["publish", "publish", "deliver", "lose", "double", "reconnect", "read"]), "move"
        )
        if move == "publish" and published < len(log):
            in_flight.append(log[published][1])
            published += 1
        elif move == "deliver" and in_flight:
            take(follower.take_live(in_flight.pop(0)))
        elif move == "lose" and in_flight:
            # a message is lost only with its connection, and the next one is confirmed some time later
            in_flight.clear()
            follower.needs_log = True
        elif move == "double" and in_flight:
            in_flight.insert(0, in_flight[0])
        elif move == "reconnect":
            follower.needs_log = True
        elif move == "read" and follower.needs_log:
            read_log()
        assert got == [f"t{number}" for number in range(start + 1, follower.have + 1)]
    while published < len(log):
        in_flight.append(log[published][1])
        published += 1
    while in_flight:
        take(follower.take_live(in_flight.pop(0)))
    if follower.needs_log:
        read_log()
    assert got == [f"t{number}" for number in range(start + 1, total + 1)]
    assert ended
