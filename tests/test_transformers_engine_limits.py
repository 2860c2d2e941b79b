"""The engine on transformers at its edges: full contexts and slots, broken sequences, devices, loading, closing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.settings import Settings
from tests.tiny_engine import CHUNK, SLOTS, engine_of, prompt, run, run_alone, sequence
from tests.tiny_models import ARCHITECTURES, CONTEXT_LENGTH, Reference, assert_same_tokens, save_tiny_model
from worker.engines.base import SequenceError
from worker.engines.kv_cache import SlotCache
from worker.engines.transformers_engine import load


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


def test_a_sequence_without_room_for_another_token_is_refused_with_the_numbers(llama: Path) -> None:
    engine = engine_of(llama)

    with pytest.raises(SequenceError, match=f"have {CONTEXT_LENGTH} tokens.*takes {CONTEXT_LENGTH} in all") as caught:
        engine.add(sequence("long", prompt(CONTEXT_LENGTH - 1), output=[5]))

    assert caught.value.code == "context_length_exceeded"
    assert engine.num_free_slots == SLOTS


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_a_sequence_fills_the_context_to_the_last_token_and_then_ends_alone(tmp_path: Path, architecture: str) -> None:
    engine = engine_of(save_tiny_model(tmp_path, architecture), chunk=1_000)
    engine.add(sequence("full", prompt(CONTEXT_LENGTH - 2)))
    engine.add(sequence("other", prompt(4)))

    steps = [{emission.id: emission for emission in engine.step()} for _ in range(4)]

    assert [len(step["full"].ids) for step in steps[:3]] == [1, 1, 0]
    error = steps[2]["full"].error
    assert error is not None
    assert error.code == "context_length_exceeded"
    assert "full" not in steps[3]
    assert [len(step["other"].ids) for step in steps[1:]] == [1, 1, 1]


def test_no_free_slot_and_no_token_are_refused(llama: Path) -> None:
    engine = engine_of(llama, slots=1)
    with pytest.raises(SequenceError, match="no tokens"):
        engine.add(sequence("empty", []))
    with pytest.raises(SequenceError, match="the model's tokens are 0 to"):
        engine.add(sequence("unknown", [1_000_000]))
    engine.add(sequence("one", prompt(3)))

    with pytest.raises(SequenceError, match="all 1 slots taken"):
        engine.add(sequence("two", prompt(3)))


def test_a_step_without_sequences_does_nothing(llama: Path) -> None:
    assert engine_of(llama).step() == []


def test_where_the_device_has_no_memory_the_longest_sequence_ends_and_the_others_ride_on(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, reference = engine_of(llama), Reference(llama)
    reserve = SlotCache.reserve

    def reserve_little(cache: SlotCache, num_rows: int, num_tokens: int) -> None:
        if num_tokens > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        reserve(cache, num_rows, num_tokens)

    monkeypatch.setattr(SlotCache, "reserve", reserve_little)
    jobs = {"short": prompt(3, 1), "long": prompt(25), "late": prompt(40, 2)}
    tokens: dict[str, list[int]] = {id: [] for id in jobs}
    errors: dict[str, SequenceError] = {}
    for id, ids in jobs.items():
        engine.add(sequence(id, ids))

    for _ in range(16):
        for emission in engine.step():
            tokens[emission.id] += emission.ids
            if emission.error is not None:
                errors[emission.id] = emission.error

    assert {id: len(found) for id, found in tokens.items()} == {"short": 16, "long": 6, "late": 0}
    assert sorted(errors) == ["late", "long"]
    assert errors["late"].code == "engine_error"
    assert "no memory for 31 tokens in each of 3 slots" in str(errors["long"])
    for id, ids in jobs.items():
        if tokens[id]:
            assert_same_tokens(tokens[id], *reference.generate(list(ids), len(tokens[id])))


def test_where_the_device_has_no_memory_for_another_row_the_newcomers_end_and_the_others_ride_on(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llama, slots=8, chunk=32)
    reserve = SlotCache.reserve

    def reserve_four(cache: SlotCache, num_rows: int, num_tokens: int) -> None:
        if num_rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        reserve(cache, num_rows, num_tokens)

    monkeypatch.setattr(SlotCache, "reserve", reserve_four)
    for row in range(4):
        engine.add(sequence(f"rider-{row}", prompt(3, row)))
    for _ in range(4):
        engine.step()
    engine.add(sequence("a", prompt(9)))
    engine.add(sequence("b", prompt(8)))

    emissions = {emission.id: emission for emission in engine.step()}

    assert sorted(id for id, emission in emissions.items() if emission.error is not None) == ["a", "b"]
    assert [len(emissions[f"rider-{row}"].ids) for row in range(4)] == [1] * 4
    assert engine.num_free_slots == 4


def test_the_kv_cache_grows_with_the_sequences_that_ride_and_not_with_the_slots(llama: Path) -> None:
    jobs = {str(row): (sequence(str(row), prompt(6, row)), 20) for row in range(11)}
    few, many = engine_of(llama, slots=4), engine_of(llama, slots=1_000)

    expected = run(few, jobs)
    run_alone(many, jobs["0"][0], 3)
    alone = many.cache.memory_bytes
    assert run(many, jobs) == expected

    assert alone == few.cache.memory_bytes
    assert alone < many.cache.memory_bytes <= 4 * alone


POISON = 200


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A model for which token `POISON` has no finite embedding."""
    folder = save_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        cast(torch.nn.Embedding, model.get_input_embeddings()).weight[POISON] = torch.nan
    model.save_pretrained(folder)
    return folder


def healthy_prompt(length: int, start: int) -> list[int]:
    return [token for token in prompt(length, start) if token != POISON]


def test_a_sequence_whose_logits_are_not_finite_ends_alone_and_poisons_no_slot(poisoned: Path, llama: Path) -> None:
    engine, reference = engine_of(poisoned, slots=2), Reference(llama)
    jobs = {"a": healthy_prompt(30, 1), "b": healthy_prompt(5, 2)}
    tokens: dict[str, list[int]] = {id: [] for id in jobs}
    errors: dict[str, SequenceError] = {}
    engine.add(sequence("a", jobs["a"]))
    engine.add(sequence("sick", [*healthy_prompt(38, 3), POISON]))

    for _ in range(24):
        for emission in engine.step():
            if emission.error is not None:
                errors[emission.id] = emission.error
                engine.add(sequence("b", jobs["b"]))
            else:
                tokens.setdefault(emission.id, []).extend(emission.ids)

    assert list(errors) == ["sick"]
    assert errors["sick"].code == "engine_error"
    assert "CARPOOL_DTYPE=float32" in str(errors["sick"])
    assert len(tokens["b"]) > 10
    for id, ids in jobs.items():
        assert_same_tokens(tokens[id], *reference.generate(ids, len(tokens[id])))


def test_a_sequence_aborted_in_its_prefill_leaves_no_poison_in_its_slot(poisoned: Path, llama: Path) -> None:
    engine, reference = engine_of(poisoned, slots=2), Reference(llama)
    jobs = {"a": healthy_prompt(30, 1), "b": healthy_prompt(5, 2)}
    tokens: dict[str, list[int]] = {id: [] for id in [*jobs, "sick"]}

    def step(count: int) -> None:
        for _ in range(count):
            for emission in engine.step():
                assert emission.error is None
                tokens[emission.id] += emission.ids

    engine.add(sequence("a", jobs["a"]))
    step(4)
    engine.add(sequence("sick", [POISON, *prompt(2 * CHUNK)]))
    step(2)
    engine.abort("sick")
    engine.add(sequence("b", jobs["b"]))
    step(12)

    assert (len(tokens["a"]), len(tokens["b"]), tokens["sick"]) == (15, 12, [])
    for id, ids in jobs.items():
        assert_same_tokens(tokens[id], *reference.generate(ids, len(tokens[id])))


def test_a_sick_prompt_in_a_chunk_ends_alone(poisoned: Path, llama: Path) -> None:
    engine, reference = engine_of(poisoned, chunk=32), Reference(llama)
    jobs = {"a": healthy_prompt(5, 1), "b": healthy_prompt(9, 2)}
    engine.add(sequence("a", jobs["a"]))
    engine.add(sequence("sick", [*healthy_prompt(4, 3), POISON]))
    engine.add(sequence("b", jobs["b"]))
    tokens: dict[str, list[int]] = {id: [] for id in jobs}

    errors = []
    for _ in range(10):
        for emission in engine.step():
            if emission.error is not None:
                errors.append(emission.id)
            else:
                tokens[emission.id] += emission.ids

    assert errors == ["sick"]
    for id, ids in jobs.items():
        assert_same_tokens(tokens[id], *reference.generate(ids, 10))


def test_half_a_sick_prompt_leaves_no_poison_in_the_row_that_it_was_moved_from(poisoned: Path, llama: Path) -> None:
    engine, reference = engine_of(poisoned), Reference(llama)
    jobs = {"a": healthy_prompt(4, 1), "b": healthy_prompt(30, 2), "c": healthy_prompt(3, 3), "d": healthy_prompt(3, 4)}
    tokens: dict[str, list[int]] = {id: [] for id in [*jobs, "sick"]}

    def step(count: int) -> None:
        for _ in range(count):
            for emission in engine.step():
                assert emission.error is None
                tokens[emission.id] += emission.ids

    engine.add(sequence("a", jobs["a"]))
    engine.add(sequence("b", jobs["b"]))
    step(6)
    engine.add(sequence("sick", [POISON, *prompt(4 * CHUNK)]))
    step(2)
    engine.abort("a")
    step(1)
    engine.abort("sick")
    engine.add(sequence("c", jobs["c"]))
    engine.add(sequence("d", jobs["d"]))
    step(8)

    assert [len(tokens[id]) for id in ("c", "d", "sick")] == [8, 8, 0]
    for id, ids in jobs.items():
        assert_same_tokens(tokens[id], *reference.generate(ids, len(tokens[id])))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


@pytest.mark.parametrize("device", DEVICES)
def test_every_weight_and_every_computation_is_on_the_chosen_device(llama: Path, device: str) -> None:
    engine = engine_of(llama, device=device)
    seen: set[str] = set()
    model = engine.model
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: seen.add(output.device.type))
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    ]

    run_alone(engine, sequence("one", prompt(5)), 3)

    for hook in hooks:
        hook.remove()
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == seen == {device}
    assert engine.card.device.startswith(device)


def test_the_progress_of_a_load_rises_from_zero_to_one(llama: Path) -> None:
    phases: list[tuple[str, float | None]] = []

    load(Settings(model=str(llama), dtype="float32", device="cpu"), lambda *phase: phases.append(phase))

    fractions = [fraction for _, fraction in phases if fraction is not None]
    assert (fractions[0], fractions[-1]) == (0, 1)
    assert all(one <= other for one, other in pairwise(fractions))
    assert {"loading the tokenizer", "loading the weights", "warming up"} <= {name for name, _ in phases}


@pytest.mark.parametrize("is_fixed", [True, False], ids=["OMP_NUM_THREADS set", "not set"])
def test_the_number_of_threads_is_the_engines_to_choose_unless_the_user_has_fixed_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch, is_fixed: bool
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if is_fixed:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    engine = engine_of(llama)
    engine.add(sequence("one", prompt(3)))

    used = set()
    for _ in range(12):
        engine.step()
        used.add(torch.get_num_threads())

    assert used == ({2} if is_fixed else {1, 2})


def test_after_close_the_engine_holds_nothing(llama: Path) -> None:
    engine = engine_of(llama)
    engine.add(sequence("one", prompt(3)))
    engine.step()

    engine.close()

    assert engine.num_free_slots == SLOTS
