"""The engine on transformers: a running batch gives each sequence what it would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.job_request import SamplingParams
from tasks.settings import BUNDLED_MODEL, Settings
from tests.tiny_engine import (
    CHUNK,
    DRAWN,
    GREEDY,
    SLOTS,
    engine_of,
    ignore,
    prompt,
    run,
    run_alone,
    sequence,
    tokens_by_id,
)
from tests.tiny_models import ARCHITECTURES, Reference, assert_same_tokens, save_tiny_model
from worker.engines.transformers_engine import load


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more threads, and lose much where other processes compete for the processors."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each architecture in turn."""
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def test_prompts_that_join_and_leave_at_any_step_get_what_generate_gives_each_alone(folder: Path) -> None:
    engine, reference = engine_of(folder), Reference(folder)
    lengths = [(1, 12), (40, 20), (7, 3), (8, 30), (9, 25), (23, 8), (17, 1), (60, 30), (3, 17), (16, 9)]
    jobs = {
        f"job-{row}": (sequence(f"job-{row}", prompt(length, row)), num_tokens)
        for row, (length, num_tokens) in enumerate(lengths)
    }

    found = run(engine, jobs)

    for id, (one, num_tokens) in jobs.items():
        assert_same_tokens(found[id], *reference.generate(list(one.prompt_ids), num_tokens))


def test_a_prefill_goes_chunk_by_chunk_while_the_others_get_a_token_each_step(folder: Path) -> None:
    engine = engine_of(folder, chunk=CHUNK)
    engine.add(sequence("first", prompt(4)))
    engine.step()
    engine.add(sequence("late", prompt(3 * CHUNK + 1, 1)))

    steps = [tokens_by_id(engine.step()) for _ in range(5)]

    assert [len(step["first"]) for step in steps] == [1] * 5
    assert [len(step["late"]) for step in steps] == [0, 0, 0, 1, 1]


def test_the_size_of_chunks_changes_no_token(folder: Path) -> None:
    one = sequence("one", prompt(37))
    expected = run_alone(engine_of(folder, chunk=1_000), one, 20)

    for chunk in (1, 5, 36, 37, 38):
        assert run_alone(engine_of(folder, chunk=chunk), one, 20) == expected


def test_two_prompts_are_prefilled_one_after_the_other_at_most_one_chunk_a_step(llama: Path) -> None:
    engine = engine_of(llama)
    engine.add(sequence("a", prompt(2 * CHUNK)))
    engine.add(sequence("b", prompt(2 * CHUNK, 1)))

    steps = [{id: len(ids) for id, ids in tokens_by_id(engine.step()).items()} for _ in range(4)]

    assert steps == [{"a": 0}, {"a": 1}, {"a": 1, "b": 0}, {"a": 1, "b": 1}]


def test_an_aborted_sequence_leaves_its_slot_at_once_and_the_others_as_they_were(folder: Path) -> None:
    engine, reference = engine_of(folder), Reference(folder)
    jobs = {id: sequence(id, prompt(length, length)) for id, length in (("a", 5), ("b", 21), ("c", 9))}
    for one in jobs.values():
        engine.add(one)
    tokens: dict[str, list[int]] = {id: [] for id in [*jobs, "d"]}

    def step(count: int) -> None:
        for _ in range(count):
            for emission in engine.step():
                tokens[emission.id] += emission.ids

    step(7)
    engine.abort("a")
    assert engine.num_free_slots == 1
    jobs["d"] = sequence("d", prompt(30, 77))
    engine.add(jobs["d"])
    step(2)
    engine.abort("d")  # in the middle of its prefill
    engine.add(jobs["d"])
    step(14)
    engine.abort("nobody")

    assert len(tokens["b"]) > 15 > len(tokens["a"]) > 3
    for id, one in jobs.items():
        assert_same_tokens(tokens[id], *reference.generate(list(one.prompt_ids), len(tokens[id])))


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_sequence_taken_up_again_at_any_token_goes_on_as_it_would_have(folder: Path, params: SamplingParams) -> None:
    engine = engine_of(folder)
    ids = prompt(11)
    whole = run_alone(engine, sequence("whole", ids, params=params, seed=5), 24)

    for cut in (1, 2, 9, 23):
        rest = run_alone(engine, sequence("rest", ids, whole[:cut], params, seed=5), 24 - cut)
        assert whole[:cut] + rest == whole


def test_drawn_tokens_are_the_same_alone_and_in_company(folder: Path) -> None:
    engine = engine_of(folder)
    jobs = {
        f"job-{row}": (sequence(f"job-{row}", prompt(5 + 7 * row, row), params=params, seed=row), 15 + row)
        for row, params in enumerate([DRAWN, SamplingParams(), GREEDY, DRAWN, SamplingParams(min_p=0.1), DRAWN])
    }

    together = run(engine, jobs)

    for id, (one, num_tokens) in jobs.items():
        assert run_alone(engine, one, num_tokens) == together[id]
    assert len({tuple(tokens) for tokens in together.values()}) == len(jobs)


def test_another_seed_draws_other_tokens_and_the_same_seed_the_same(llama: Path) -> None:
    engine = engine_of(llama)
    runs = [run_alone(engine, sequence("one", prompt(5), params=SamplingParams(), seed=seed), 20) for seed in (1, 2, 1)]

    assert runs[0] == runs[2] != runs[1]


def test_more_tokens_than_the_first_allocation_holds_change_nothing(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.max_position_embeddings = 1_500
    model.save_pretrained(folder)
    engine = engine_of(folder, chunk=300)
    jobs = {
        "long": (sequence("long", prompt(1_200)), 6),
        "short": (sequence("short", prompt(10, 1)), 20),
        "crossing": (sequence("crossing", prompt(250, 2)), 20),
    }

    found = run(engine, jobs)

    reference = Reference(folder)
    for id, (one, num_tokens) in jobs.items():
        assert_same_tokens(found[id], *reference.generate(list(one.prompt_ids), num_tokens))


@pytest.mark.timeout(300)
def test_the_bundled_model_gives_in_a_batch_what_generate_gives_for_each_prompt_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    settings = Settings(
        model=BUNDLED_MODEL,
        dtype="float32",
        device="cpu",
        cache_dir=tmp_path_factory.mktemp("cache"),
        max_batch_size=SLOTS,
        prefill_chunk_tokens=16,
    )
    engine = load(settings, ignore)
    texts = [
        "Hello, I am",
        "The capital of France is",
        "Once upon a time there was a bus full of strangers who all wanted to go to the same town, and the driver",
        "1, 2, 3, 4,",
        "def add(a, b):\n    return",
    ]
    jobs = {
        text: (sequence(text, engine.tokenizer.encode(text)), num_tokens)
        for text, num_tokens in zip(texts, (14, 9, 12, 16, 6), strict=True)
    }

    found = run(engine, jobs)

    (converted,) = [path for path in (settings.cache_dir / "models").iterdir() if path.is_dir()]
    reference = Reference(converted)
    for text, (one, num_tokens) in jobs.items():
        assert_same_tokens(found[text], *reference.generate(list(one.prompt_ids), num_tokens))
    assert "Paris" in engine.tokenizer.decode(found["The capital of France is"])
