"""What every engine does alike, in a real Model worker process: who joins, leaves, stops, dies and goes on."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.child_ride import Ride
from worker.messages import Abort, Aborted, Accepted, Delta, Failed, Ready, Stepped, Update
from worker.model_executor import ChildDied, ChildSaid

SLOTS = 3
CONTEXT_LENGTH = 96
EOS = "2"
PROMPT = "strangers share one car"
OTHER = "one batch, and they get in and out at every step"
#: What a draw depends on, all at once.
DRAWN: dict[str, Any] = {
    "temperature": 1.1,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {"40": 1.5, EOS: -100},
}
#: With random weights every token is as good as the end of the text, so that it is forbidden where it is not asked for.
GREEDY: dict[str, Any] = {"temperature": 0, "logit_bias": {EOS: -100}}
LOAD_S = 300


class Car:
    """A child with an engine. Whatever is waited for, every step is accepted and all that it told is kept."""

    def __init__(self, name: str, ride: Ride) -> None:
        self.name = name
        self.ride = ride
        self.deltas: dict[str, list[Delta]] = {}
        self.failed: dict[str, Failed] = {}
        self.aborted: set[str] = set()
        self.ended: list[str] = []
        self.num_deaths = 0
        self.num_ready = 0
        self._ids = map(str, itertools.count())

    @property
    def has_model(self) -> bool:
        return self.name != "simulated"

    def add(self, prompt: str = PROMPT, **params: Any) -> str:
        id = next(self._ids)
        self.deltas[id] = []
        self.ride.add(id, prompt, **params)
        return id

    def ids(self, id: str) -> list[int]:
        return [token_id for delta in self.deltas[id] for token_id in delta.ids]

    def text(self, id: str) -> str:
        return "".join("".join(delta.texts) + delta.tail for delta in self.deltas[id])

    def finish(self, id: str) -> str | None:
        return self.deltas[id][-1].finish if self.deltas[id] else None

    def tokens(self, prompt: str = PROMPT, **params: Any) -> tuple[list[int], str]:
        """Ids and text of a sequence that rides alone."""
        id = self.add(prompt, **params)
        self.until_ended(id)
        return self.ids(id), self.text(id)

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            event = self.ride.next()
            if isinstance(event, ChildDied):
                self.num_deaths += 1
            elif isinstance(event, ChildSaid):
                self._note(event.update)

    def until_ended(self, *ids: str) -> None:
        self.until(lambda: all(self.finish(id) is not None for id in ids))

    def until_num_tokens(self, id: str, count: int) -> None:
        self.until(lambda: len(self.ids(id)) >= count)

    def failure(self, id: str) -> Failed:
        self.until(lambda: id in self.failed)
        return self.failed[id]

    def abort(self, *ids: str) -> None:
        for id in ids:
            self.ride.executor.send(Abort(id))
        self.until(lambda: self.aborted >= set(ids))

    def _note(self, update: Update) -> None:
        match update:
            case Stepped():
                self.ride.executor.send(Accepted(update.step))
                for delta in update.deltas:
                    self.deltas[delta.id].append(delta)
                    if delta.finish is not None:
                        self.ended.append(delta.id)
            case Failed():
                self.failed[update.id] = update
            case Aborted():
                self.aborted.add(update.id)
            case Ready():
                self.num_ready += 1


@pytest.fixture(scope="module", params=["simulated", "transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def car(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Car]:
    """Each engine in turn, in one child for all tests of this file."""
    name: str = request.param
    options: dict[str, Any] = {"engine": name, "max_batch_size": SLOTS, "bound_s": LOAD_S}
    if name != "simulated":
        from tests.tiny_models import save_tiny_model

        folder = save_tiny_model(tmp_path_factory.mktemp("llama"))
        options |= {"model": str(folder), "dtype": "float32", "device": "cpu", "prefill_chunk_tokens": 8}
    else:
        options |= {"simulated_context_length": CONTEXT_LENGTH}
    if name == "vllm":
        options |= {"engine_args": "enforce_eager=true", "prefill_chunk_tokens": 32}
    ride = Ride(**options)
    car = Car(name, ride)
    ride.executor.start()
    try:
        car.until(lambda: car.num_ready == 1)
        yield car
    finally:
        ride.executor.close(20)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_sequences_join_late_and_leave_early_and_each_gets_what_it_gets_alone(car: Car, params: dict[str, Any]) -> None:
    wanted = [(PROMPT, 40), (OTHER, 8), ("the first one", 15), ("the last one rides on", 3), (f"{OTHER}: {OTHER}", 12)]
    alone = [car.tokens(prompt, max_tokens=count, seed=5, **params) for prompt, count in wanted]

    ids = [car.add(PROMPT, max_tokens=40, seed=5, **params)]
    car.until_num_tokens(ids[0], 2)
    for prompt, count in wanted[1:]:
        car.until(lambda: sum(car.finish(id) is None for id in ids) < SLOTS)
        ids.append(car.add(prompt, max_tokens=count, seed=5, **params))
    car.until_ended(*ids)

    assert [(car.ids(id), car.text(id)) for id in ids] == alone
    assert [len(car.ids(id)) for id in ids] == [count for _, count in wanted]
    assert car.ended.index(ids[1]) < car.ended.index(ids[0])


def test_a_newcomer_gets_its_first_token_while_the_others_ride_on(car: Car) -> None:
    riding = car.add(max_tokens=60, **GREEDY)
    car.until_num_tokens(riding, 1)
    newcomer = car.add(OTHER, max_tokens=30, **GREEDY)
    car.until_num_tokens(newcomer, 1)
    before = len(car.ids(riding))
    car.until_num_tokens(newcomer, 4)

    assert car.finish(riding) is None
    assert len(car.ids(riding)) == before + 3
    car.abort(riding, newcomer)


def test_an_aborted_sequence_frees_its_slot_and_its_neighbour_does_not_notice(car: Car) -> None:
    alone, _ = car.tokens(OTHER, max_tokens=25, **GREEDY)
    leaving, third = (car.add(prompt, max_tokens=70, **GREEDY) for prompt in (PROMPT, "every step"))
    staying = car.add(OTHER, max_tokens=25, **GREEDY)
    car.until_num_tokens(staying, 5)

    car.ride.executor.send(Abort(leaving))
    newcomer = car.add("the first one leaves early", max_tokens=4, **GREEDY)
    car.until_ended(staying, newcomer)
    left_with = len(car.ids(leaving))
    car.abort(third)

    assert car.ids(staying) == alone
    assert leaving in car.aborted
    assert len(car.ids(leaving)) == left_with < 70


def test_a_sequence_aborted_before_its_first_step_never_rides(car: Car) -> None:
    id = car.add(max_tokens=5, **GREEDY)
    car.abort(id)
    num_ids = len(car.ids(id))
    car.tokens(max_tokens=9, **GREEDY)

    assert len(car.ids(id)) == num_ids


def test_a_stop_string_ends_a_text_before_itself(car: Car) -> None:
    _, whole = car.tokens(max_tokens=30, **GREEDY)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]

    id = car.add(max_tokens=30, stop=[stop], **GREEDY)
    car.until_ended(id)

    assert car.finish(id) == "stop"
    assert car.text(id) == whole[: whole.index(stop)]


def test_the_end_of_a_text_is_a_stop_and_the_last_possible_token_a_length(car: Car) -> None:
    if car.has_model:
        ending = car.add(max_tokens=9, temperature=0, logit_bias={EOS: 100})
    else:
        ending = car.add("[[end]]@1", max_tokens=9)
    cut = car.add(max_tokens=1, **GREEDY)
    car.until_ended(ending, cut)

    assert (car.finish(ending), car.finish(cut)) == ("stop", "length")
    assert len(car.ids(ending)) == len(car.ids(cut)) == 1
    assert car.text(ending) == ""


def test_a_seed_decides_the_draw_also_in_company(car: Car) -> None:
    alone = [car.tokens(max_tokens=12, seed=seed, **DRAWN)[0] for seed in (1, 2, 1)]
    ids = [car.add(max_tokens=12, seed=seed, **DRAWN) for seed in (2, 1, 3)]
    car.until_ended(*ids)

    assert alone[0] == alone[2] != alone[1]
    assert [car.ids(id) for id in ids[:2]] == [alone[1], alone[0]]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_sequence_goes_on_at_any_position_as_it_would_have(car: Car, params: dict[str, Any]) -> None:
    whole, text = car.tokens(max_tokens=20, seed=9, **params)

    for cut in (1, 2, 11, 19):
        rest, tail = car.tokens(max_tokens=20, seed=9, ids=tuple(whole[:cut]), **params)
        assert whole[:cut] + rest == whole
        assert text.endswith(tail)


def test_a_sequence_fills_the_context_to_the_last_token(car: Car) -> None:
    ids, _ = car.tokens(max_tokens=None, **GREEDY)
    id = str(int(car.ended[-1]))

    assert car.finish(id) == "length"
    assert (car.deltas[id][0].prompt_tokens or 0) + len(ids) == CONTEXT_LENGTH


def test_a_sequence_that_cannot_ride_fails_alone_and_says_why(car: Car) -> None:
    riding = car.add(max_tokens=20, **GREEDY)
    car.until_num_tokens(riding, 1)
    failures = [
        car.failure(car.add("car " * 200, max_tokens=5, **GREEDY)),
        car.failure(car.add(max_tokens=95, **GREEDY)),
    ]
    car.until_ended(riding)

    assert [failure.code for failure in failures] == ["context_length_exceeded"] * 2
    assert all(str(CONTEXT_LENGTH) in failure.message for failure in failures)
    assert len(car.ids(riding)) == 20


def test_a_sequence_beyond_the_slots_is_refused_and_the_others_ride_on(car: Car) -> None:
    riding = [car.add(max_tokens=60, seed=seed, **GREEDY) for seed in range(SLOTS)]
    failure = car.failure(car.add(max_tokens=5, **GREEDY))
    car.until(lambda: all(len(car.ids(id)) > 0 for id in riding))
    car.abort(*riding)

    assert "CARPOOL_MAX_BATCH_SIZE" in failure.message


def test_logprobs_come_with_every_token_and_change_none(car: Car) -> None:
    plain, _ = car.tokens(max_tokens=8, seed=3, **DRAWN)
    id = car.add(max_tokens=8, seed=3, logprobs=3, **DRAWN)
    beside = car.add(OTHER, max_tokens=8, seed=3, **DRAWN)
    car.until_ended(id, beside)

    assert car.ids(id) == plain
    logged = [one for delta in car.deltas[id] for one in delta.lp]
    assert [one["id"] for one in logged] == plain
    for one in logged:
        values = [alternative["lp"] for alternative in one["top"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert one["lp"] <= values[0] <= 0
    assert not any(delta.lp for delta in car.deltas[beside])


def test_a_text_follows_its_schema_also_where_another_process_takes_over(car: Car) -> None:
    schema = {"type": "object", "properties": {"seats": {"enum": [4, 5]}}, "required": ["seats"]}
    params: dict[str, Any] = {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "car", "schema": {**schema, "additionalProperties": False}},
        },
        "temperature": 1.0,
        "max_tokens": 60,
    }
    if not car.has_model:
        assert "response_format" in car.failure(car.add(**params)).message
        return

    ids, text = car.tokens(seed=4, **params)
    rest, _ = car.tokens(seed=4, ids=tuple(ids[:4]), **params)

    assert json.loads(text)["seats"] in (4, 5)
    assert ids[:4] + rest == ids


def test_a_schema_that_cannot_be_enforced_fails_its_sequence_alone(car: Car) -> None:
    riding = car.add(max_tokens=30, **GREEDY)
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    failing = car.add(response_format={"type": "json_schema", "json_schema": {"name": "bad", "schema": bad}})
    failure = car.failure(failing)
    car.until_ended(riding)

    assert failure.code in ("invalid_request", "unsupported_field")
    assert len(car.ids(riding)) == 30


def test_after_kill_9_the_next_child_goes_on_where_the_last_one_was(car: Car) -> None:
    whole, _ = car.tokens(max_tokens=40, seed=6, **DRAWN)
    id = car.add(max_tokens=40, seed=6, **DRAWN)
    car.until_num_tokens(id, 7)
    deaths, readies = car.num_deaths, car.num_ready
    assert car.ride.executor.pid is not None
    os.kill(car.ride.executor.pid, signal.SIGKILL)

    car.until(lambda: car.num_deaths > deaths and car.num_ready > readies)
    held = car.ids(id)
    rest, _ = car.tokens(max_tokens=40, seed=6, ids=tuple(held), **DRAWN)

    assert held
    assert held + rest == whole
