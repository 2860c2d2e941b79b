"""Stop strings are found across token borders, and nothing of them is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.stop_matcher import StopMatcher

STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str, bool]:
    matcher = StopMatcher(stops)
    released = [matcher.feed(piece) for piece in pieces]
    return released, matcher.flush(), matcher.matched


def text_before_first_complete_stop(text: str, stops: list[str]) -> str | None:
    """The plain definition: read on character by character until some stop string ends there."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


@given(pieces=st.lists(st.text(alphabet="ab", max_size=6), max_size=12), stops=STOPS)
def test_released_text_is_what_reading_character_by_character_gives(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    expected = text_before_first_complete_stop(text, stops)

    released, tail, matched = run(stops, pieces)

    assert matched == (expected is not None)
    assert "".join(released) + tail == (text if expected is None else expected)


@given(pieces=st.lists(st.text(alphabet="ab", max_size=6), max_size=12), stops=STOPS)
def test_only_text_that_may_begin_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
    held = matcher.flush()

    if not matcher.matched:
        longer = ["".join(pieces)[len(shown) - 1 :]] if shown else []
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text) and stop != text for text in longer for stop in stops)


def test_a_stop_string_over_three_tokens_is_cut_out() -> None:
    assert run(["\n\nUser:"], ["Hi", "\n", "\nUs", "er: x"]) == (["Hi", "", "", ""], "", True)


def test_text_that_only_began_like_a_stop_string_comes_out_with_the_token_that_decides() -> None:
    assert run(["\n\n"], ["Hi", "\n", "there"]) == (["Hi", "", "\nthere"], "", False)


def test_text_that_is_held_at_the_end_is_the_tail() -> None:
    assert run(["END"], ["the ", "EN"]) == (["the ", ""], "EN", False)


def test_the_stop_string_that_is_complete_first_counts() -> None:
    assert run(["abcdef", "c"], ["abc", "def"]) == (["ab", ""], "", True)
    assert run(["abcdef", "c"], ["abcdef"]) == (["ab"], "", True)


def test_of_two_that_end_together_the_one_that_began_first_counts() -> None:
    assert run(["lo", "hello"], ["say hello"]) == (["say "], "", True)


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "", True)


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    matcher.feed("ax")

    assert matcher.feed("more") == ""
    assert matcher.flush() == ""


@pytest.mark.parametrize("pieces", [[], [""], ["a", "", "b"]])
def test_without_stop_strings_nothing_is_held(pieces: list[str]) -> None:
    assert run([], pieces) == (pieces, "", False)
