"""Prompts that wait together are prefilled together: what a step takes along, and that it changes no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_engine import CHUNK, DRAWN, SLOTS, engine_of, prompt, run_alone, sequence, tokens_by_id
from tests.tiny_models import ARCHITECTURES, Reference, assert_same_tokens, save_tiny_model
from worker.engines.chunk_budget import FIRST_TOKENS
from worker.engines.transformers_engine import TransformersEngine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and lose much where other processes compete for the processors."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def num_new_tokens(engine: TransformersEngine, num_steps: int = 1) -> list[dict[str, int]]:
    """How many tokens each sequence gets at each of the next steps."""
    return [{id: len(ids) for id, ids in tokens_by_id(engine.step()).items()} for _ in range(num_steps)]


class Watch:
    """Counts what goes through a model: tokens of the latest pass, and those among them whose logits were computed."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.num_tokens = 0
        self.num_logits = 0
        model = engine.model
        model.get_input_embeddings().register_forward_hook(self._embedded)
        model.get_output_embeddings().register_forward_hook(self._answered)  # type: ignore[no-untyped-call]

    def _embedded(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.num_tokens = output.shape[1]

    def _answered(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.num_logits = output.shape[1]


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_short_prompts_that_come_together_start_at_one_step_with_the_tokens_they_get_alone(
    tmp_path: Path, architecture: str
) -> None:
    folder = save_tiny_model(tmp_path, architecture)
    engine, reference = engine_of(folder, slots=4, chunk=32), Reference(folder)
    jobs = {str(length): prompt(length, length) for length in (9, 1, 14, 5)}
    for id, ids in jobs.items():
        engine.add(sequence(id, ids))
    tokens: dict[str, list[int]] = {id: [] for id in jobs}

    for _ in range(10):
        for id, new in tokens_by_id(engine.step()).items():
            tokens[id] += new

    assert {len(found) for found in tokens.values()} == {10}
    for id, ids in jobs.items():
        assert_same_tokens(tokens[id], *reference.generate(list(ids), 10))


def test_a_chunk_takes_the_end_of_one_prompt_and_the_beginning_of_the_next(llama: Path) -> None:
    engine = engine_of(llama)
    for id in ("a", "b", "c"):
        engine.add(sequence(id, prompt(CHUNK - 3)))

    assert num_new_tokens(engine, 3) == [{"a": 1, "b": 0}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}]


def test_newcomers_are_prefilled_together_beside_those_who_decode(llama: Path) -> None:
    engine = engine_of(llama)
    engine.add(sequence("rider", prompt(4)))
    engine.step()
    engine.add(sequence("a", prompt(CHUNK - 2)))
    engine.add(sequence("b", prompt(2)))

    assert num_new_tokens(engine) == [{"rider": 1, "a": 1, "b": 1}]


def test_a_prompt_alone_takes_a_whole_chunk_and_one_that_shares_the_step_what_the_others_can_bear(llama: Path) -> None:
    engine = engine_of(llama, chunk=2 * FIRST_TOKENS)
    watch = Watch(engine)
    engine.add(sequence("alone", prompt(FIRST_TOKENS + 10)))
    alone = num_new_tokens(engine), watch.num_tokens
    engine.abort("alone")
    engine.add(sequence("short", prompt(10)))
    engine.add(sequence("long", prompt(FIRST_TOKENS + 10, 1)))
    shared = num_new_tokens(engine), watch.num_tokens

    assert alone == ([{"alone": 1}], FIRST_TOKENS + 10)
    assert shared == ([{"short": 1, "long": 0}], FIRST_TOKENS)


def test_logits_are_computed_for_the_last_token_of_each_prompt_alone(llama: Path) -> None:
    engine = engine_of(llama)
    watch = Watch(engine)
    for id, length in (("a", 3), ("b", 4), ("c", 2 * CHUNK)):
        engine.add(sequence(id, prompt(length)))

    seen = []
    for _ in range(4):
        engine.step()
        seen.append((watch.num_tokens, watch.num_logits))

    assert seen == [(CHUNK, 2), (CHUNK + 2, 2), (7 + 2, 3), (3, 3)]


def test_a_resumed_sequence_and_new_ones_share_a_chunk(llama: Path) -> None:
    engine = engine_of(llama, chunk=32)
    ids = prompt(6)
    whole = run_alone(engine, sequence("whole", ids, params=DRAWN, seed=5), 12)
    other = run_alone(engine, sequence("other", prompt(9, 1)), 5)
    engine.add(sequence("other", prompt(9, 1)))
    engine.add(sequence("rest", ids, whole[:7], DRAWN, seed=5))
    tokens: dict[str, list[int]] = {"other": [], "rest": []}

    for _ in range(5):
        for id, new in tokens_by_id(engine.step()).items():
            tokens[id] += new

    assert tokens == {"other": other, "rest": whole[7:]}


@pytest.mark.parametrize("seed", range(6))
def test_whoever_comes_and_goes_when_all_get_their_own_tokens_in_the_order_of_arrival(llama: Path, seed: int) -> None:
    """A random walk of arrivals, departures and steps."""
    draw = random.Random(seed)
    slots, chunk = draw.choice([(SLOTS, CHUNK), (5, 5), (8, 16)])
    engine = engine_of(llama, slots=slots, chunk=chunk)
    watch = Watch(engine)
    reference = Reference(llama)
    expected = {length: reference.generate(list(prompt(length, length)), 40) for length in (1, 2, 4, 7, 12, 25, 40)}
    lengths: dict[str, int] = {}
    starts: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    riding: list[str] = []
    waiting: list[str] = []

    def leave(id: str) -> None:
        engine.abort(id)
        riding.remove(id)
        if id in waiting:
            waiting.remove(id)

    for number in range(150):
        if riding and draw.random() < 0.15:
            leave(draw.choice(riding))
        while engine.num_free_slots and draw.random() < 0.5:
            id = f"{number}-{engine.num_free_slots}"
            length = lengths[id] = draw.choice(list(expected))
            start = starts[id] = draw.choice([0, 0, 3, 9])
            engine.add(sequence(id, prompt(length, length), expected[length][0][:start]))
            tokens[id] = []
            riding.append(id)
            waiting.append(id)
        if not riding:
            continue
        num_decoding = len(riding) - len(waiting)
        started = []
        for emission in engine.step():
            assert emission.error is None
            if emission.id in waiting and emission.ids:
                started.append(emission.id)
            tokens[emission.id] += emission.ids
        assert started == waiting[: len(started)]
        assert watch.num_tokens - num_decoding <= chunk
        del waiting[: len(started)]
        for id in [id for id in riding if starts[id] + len(tokens[id]) >= 35]:
            leave(id)

    assert len([found for found in tokens.values() if found]) > 20
    for id, found in tokens.items():
        ids, gaps = expected[lengths[id]]
        part = slice(starts[id], starts[id] + len(found))
        assert_same_tokens(found, ids[part], gaps[part])
