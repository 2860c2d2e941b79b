"""The simulated engine says what its page says, and takes the time that the settings fix."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path

import pytest

from tasks.chat import Message
from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker import simulation
from worker.engines import simulated
from worker.engines.base import EngineSequence, SequenceError

PAGE = (Path(__file__).parents[1] / "docs" / "simulated-engine.md").read_text(encoding="utf-8")
VECTORS = re.findall(r"^\| `(\".*\")` \| (-?\d+) \| (\d+) \| (\d+) \| `(\".*\")` \|$", PAGE, re.MULTILINE)


def engine(**settings: float) -> simulated.SimulatedEngine:
    values = {"simulated_step_ms": 0.0, **settings}
    return simulated.load(Settings(engine="simulated", **values), lambda name, fraction: None)  # type: ignore[arg-type]


def sequence(
    id: str, prompt: str = "Hello, I am", *, seed: int = 0, output_ids: tuple[int, ...] = ()
) -> EngineSequence:
    return EngineSequence(id, (1,), output_ids, SamplingParams(max_tokens=100), seed, prompt)


def test_the_page_holds_ten_vectors() -> None:
    assert len(VECTORS) == 10


@pytest.mark.parametrize(("prompt", "seed", "position", "token_id", "text"), VECTORS)
def test_a_vector_of_the_page_is_what_the_function_gives(
    prompt: str, seed: str, position: str, token_id: str, text: str
) -> None:
    drawn = simulation.Draws(json.loads(prompt), int(seed)).token_id(int(position))

    assert drawn == int(token_id)
    assert simulation.token_text(drawn) == json.loads(text)


@pytest.mark.parametrize(("prompt", "seed", "position", "token_id", "text"), VECTORS[:9])
def test_the_page_describes_the_function_well_enough_to_write_it_again(
    prompt: str, seed: str, position: str, token_id: str, text: str
) -> None:
    data = b"\n".join([b"carpool-simulated-1", json.loads(prompt).encode(), seed.encode(), position.encode()])
    number = 1 + int(hashlib.blake2b(data).hexdigest()[:16], 16) % 65535
    bits = f"{number:016b}"
    word = "".join(
        ("aiou" if len(part) == 2 else "bdfghjklmnprstvz")[int(part, 2)]
        for part in (bits[:4], bits[4:6], bits[6:10], bits[10:12], bits[12:])
    )

    assert number == int(token_id)
    assert f" {word}" == json.loads(text)


def test_the_sentence_on_the_page_is_the_completion() -> None:
    assert f"`{simulation.completion('Hello, I am', 0, 5)}`" in PAGE


def test_each_id_has_a_text_of_its_own_and_only_the_end_has_none() -> None:
    texts = {simulation.token_text(token_id) for token_id in range(simulation.VOCABULARY)}

    assert len(texts) == simulation.VOCABULARY
    assert simulation.token_text(simulation.EOS_ID) == ""


def test_a_completion_ends_with_the_token_that_a_marker_asks_for() -> None:
    ids = simulation.completion_ids("stop here [[end]]@7", 3, 20)

    assert len(ids) == 7
    assert ids[-1] == simulation.EOS_ID


@pytest.mark.parametrize("text", ["[[exit 256]]@5", "[[end]]@0", "[[end]]", "[[exit]]@5", "[end]@5", "[[END]]@5"])
def test_what_only_looks_like_a_marker_is_text(text: str) -> None:
    assert simulation.markers(text) == {}


def test_the_first_of_two_markers_at_one_position_counts() -> None:
    found = simulation.markers("[[exit 9]]@3 [[end]]@3 [[raise]]@12")

    assert found == {3: simulation.Marker("exit", 9), 12: simulation.Marker("raise")}


def test_a_chat_is_rendered_as_the_page_says() -> None:
    prompt, ids = simulated.SimulatedTokenizer().encode_chat([Message(role="user", content="hi")])

    assert prompt == "user: hi\nassistant:"
    assert len(ids) == 3


@pytest.mark.parametrize(("prompt", "count"), [("one two  three\n", 3), ("x", 1), ("   ", 1), ("", 1)])
def test_a_prompt_has_a_token_for_each_piece_and_at_least_one(prompt: str, count: int) -> None:
    assert len(simulated.SimulatedTokenizer().encode(prompt)) == count


def test_a_token_depends_on_neither_the_batch_nor_the_ride() -> None:
    alone, shared = engine(), engine()
    alone.add(sequence("a"))
    shared.add(sequence("b", "another prompt"))
    shared.step()
    shared.add(sequence("a", output_ids=tuple(simulation.completion_ids("Hello, I am", 0, 3))))

    first_ride = [alone.step()[0].ids for _ in range(5)]
    second_ride = [{e.id: e.ids for e in shared.step()}["a"] for _ in range(2)]

    assert second_ride == first_ride[3:]


def test_a_sequence_that_finds_no_slot_is_refused() -> None:
    full = engine(max_batch_size=1)
    full.add(sequence("a"))

    with pytest.raises(SequenceError, match="all 1 slots"):
        full.add(sequence("b"))

    full.abort("a")
    full.add(sequence("b"))


def test_a_prefill_is_sliced_so_that_the_others_wait_for_one_slice_at_most() -> None:
    riding = engine(simulated_step_ms=10, simulated_prefill_ms=25)
    riding.add(sequence("a"))
    turns = [[emission.id for emission in riding.step()] for _ in range(3)]
    riding.add(sequence("b", "another prompt"))
    turns += [[emission.id for emission in riding.step()] for _ in range(3)]

    assert turns == [[], [], ["a"], ["a"], ["a"], ["a", "b"]]


def test_a_prefill_ends_where_a_step_takes_no_time() -> None:
    riding = engine(simulated_prefill_ms=30)
    riding.add(sequence("a"))

    assert [len(riding.step()) for _ in range(3)] == [0, 1, 1]


def test_a_step_takes_its_time_once_for_the_whole_batch() -> None:
    riding = engine(simulated_step_ms=30)
    for id in "abcd":
        riding.add(sequence(id))

    started = time.perf_counter()
    riding.step()

    assert 0.03 <= time.perf_counter() - started < 0.09


def test_a_step_of_no_time_is_not_slept_for() -> None:
    riding = engine()
    riding.add(sequence("a"))

    started = time.perf_counter()
    for _ in range(2000):
        riding.step()

    assert time.perf_counter() - started < 1
