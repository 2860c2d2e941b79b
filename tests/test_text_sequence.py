"""What one token does to a sequence, beside its text: logprobs that are logged with it, and a grammar's end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.entries import NO_LOGPROB, TokenLogprob, decode, encode_tokens
from tests.test_model_worker import EOS, PIECES, ByteTokenizer, pipeline
from worker.engines.base import Logprob
from worker.messages import Delta
from worker.sequence import TextSequence

STOPS = ["END", "\n\n", "世", "🚗 w"]


def logprob(id: int) -> Logprob:
    return Logprob(id, -id / 8, ((2, -0.125), (id, -id / 8)))


def logged(id: int) -> TokenLogprob:
    return {
        "id": id,
        "lp": -id / 8,
        "b": list(PIECES[id]),
        "top": [
            {"id": 2, "lp": -0.125, "b": list(b" word")},
            {"id": id, "lp": -id / 8, "b": list(PIECES[id])},
        ],
    }


def feed(sequence: TextSequence, ids: Sequence[int]) -> Delta:
    return sequence.feed(ids, [logprob(id) for id in ids])


def test_logprobs_come_with_their_tokens_while_the_text_is_held_back() -> None:
    sequence = pipeline(["END word"])

    parts = [feed(sequence, [id]) for id in (2, 6, 7, 2)]

    assert [part.texts for part in parts] == [(" word",), ("",), ("",), ("",)]
    assert [part.lp for part in parts] == [(logged(id),) for id in (2, 6, 7, 2)]
    assert parts[-1].finish == "stop"


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=24),
    stops=st.lists(st.sampled_from(STOPS), max_size=4, unique=True),
    sizes=st.lists(st.integers(1, 4), min_size=24, max_size=24),
)
def test_every_token_that_is_logged_has_its_logprob_however_the_steps_are_cut(
    ids: list[int], stops: list[str], sizes: list[int]
) -> None:
    one_by_one, in_steps = pipeline(stops), pipeline(stops)
    singles = [feed(one_by_one, [id]) for id in ids]
    steps, left = [], list(ids)
    for size in sizes:
        steps.append(feed(in_steps, left[:size]))
        left = left[size:]

    for parts in (singles, steps):
        taken = [id for part in parts for id in part.ids]
        assert taken == ids[: len(taken)]
        assert [item for part in parts for item in part.lp] == [logged(id) for id in taken]
    text = "".join(text for part in singles for text in part.texts)
    assert text == "".join(text for part in steps for text in part.texts)
    assert not any(stop in text for stop in stops)
    assert one_by_one.finish == in_steps.finish


@pytest.mark.parametrize("stop", ["D wo", "ND word\n", "END word\n世", "D"])
def test_a_stop_string_over_several_tokens_is_found_among_four_and_leaves_every_tokens_logprob(stop: str) -> None:
    sequence = pipeline(["nothing", stop, "never", "\n\n"])
    ids = [2, 6, 7, 2, 3, 4, 5]

    delta = feed(sequence, ids)

    whole = " wordEND word\n世"
    assert delta.finish == "stop"
    assert "".join(delta.texts) == whole[: whole.index(stop)]
    assert [item["id"] for item in delta.lp] == list(delta.ids) == ids[: len(delta.ids)]


def test_no_logprobs_are_made_up_where_none_were_asked_for() -> None:
    assert pipeline([]).feed([2, 6]).lp == ()


def test_a_token_that_is_not_taken_has_no_logprob() -> None:
    assert [item["id"] for item in feed(pipeline([]), [2, EOS, 2]).lp] == [2, EOS]


def test_a_logprob_of_minus_infinity_is_written_as_openai_does() -> None:
    delta = pipeline([]).feed([2], [Logprob(2, -math.inf, ((2, -math.inf),))])
    (item,) = decode(encode_tokens(1, delta.ids, delta.texts, delta.lp)).lp

    assert (item["lp"], item.get("top")) == (NO_LOGPROB, [{"id": 2, "lp": NO_LOGPROB, "b": list(b" word")}])


def test_a_complete_grammar_is_a_stop_also_with_the_last_token_that_may_come() -> None:
    assert pipeline([]).feed([2], is_complete=True).finish == "stop"
    assert pipeline([], max_tokens=1).feed([2], is_complete=True) == Delta("a", (2,), (" word",), "stop", "", 2)
    assert pipeline([], max_tokens=1).feed([2]).finish == "length"


def test_text_that_is_held_when_the_grammar_is_complete_is_the_tail() -> None:
    delta = pipeline(["ENDS"]).feed([6, 7], is_complete=True)

    assert (delta.finish, delta.texts, delta.tail) == ("stop", ("", ""), "END")


def test_the_tests_tokenizer_has_the_bytes_of_its_texts() -> None:
    tokenizer = ByteTokenizer()
    assert b"".join(map(tokenizer.token_bytes, (0, 1))).decode() == tokenizer.decode([0, 1]) == "🚗"
