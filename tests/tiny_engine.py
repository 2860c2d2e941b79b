"""Tiny engines, and how tests drive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker.engines.base import Emission, EngineSequence
from worker.engines.transformers_engine import TransformersEngine, load

GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=1.2, top_k=50, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.3)
SLOTS = 3
CHUNK = 8


def ignore(phase: str, fraction: float | None) -> None:
    """Nobody looks at the progress."""


def engine_of(folder: Path, slots: int = SLOTS, chunk: int = CHUNK, **more: str) -> TransformersEngine:
    settings = Settings.model_validate(
        {
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "max_batch_size": slots,
            "prefill_chunk_tokens": chunk,
        }
        | more
    )
    return load(settings, ignore)


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    """Ids of a prompt; with another start, another prompt."""
    return tuple(3 + (start * 31 + i * i * 7 + i * 13) % 300 for i in range(length))


def sequence(
    id: str, ids: Sequence[int], output: Sequence[int] = (), params: SamplingParams = GREEDY, seed: int = 0
) -> EngineSequence:
    return EngineSequence(id, tuple(ids), tuple(output), params, seed, "")


def run_alone(engine: TransformersEngine, one: EngineSequence, num_tokens: int) -> list[int]:
    """The next tokens of a sequence that has the engine for itself."""
    return run(engine, {one.id: (one, num_tokens)})[one.id]


def run(engine: TransformersEngine, jobs: Mapping[str, tuple[EngineSequence, int]]) -> dict[str, list[int]]:
    """Let all jobs ride, in the order given, as slots get free; each leaves after its number of tokens."""
    waiting = list(jobs.values())
    tokens: dict[str, list[int]] = {id: [] for id in jobs}
    riding: set[str] = set()
    while waiting or riding:
        while waiting and engine.num_free_slots:
            one, _ = waiting.pop(0)
            engine.add(one)
            riding.add(one.id)
        for emission in engine.step():
            assert emission.error is None, emission
            tokens[emission.id] += emission.ids
            if len(tokens[emission.id]) >= jobs[emission.id][1]:
                engine.abort(emission.id)
                riding.discard(emission.id)
    return tokens


def tokens_by_id(emissions: Sequence[Emission]) -> dict[str, tuple[int, ...]]:
    return {emission.id: emission.ids for emission in emissions}
