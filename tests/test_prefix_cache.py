"""What sequences leave for others that begin the same way: never anything but what those would have computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_engine import DRAWN, GREEDY, engine_of, prompt, run, run_alone, sequence
from tests.tiny_models import ARCHITECTURES, Reference, assert_same_tokens, save_tiny_model
from worker.engines.base import Emission, EngineSequence
from worker.engines.kv_cache import SlotCache
from worker.engines.prefix_cache import BLOCK_TOKENS, PrefixCache
from worker.engines.transformers_engine import TransformersEngine

HEADS, WIDTH, LAYERS = 2, 4, 3
ROWS, MOST_BLOCKS = 2, 5
BLOCK_BYTES = LAYERS * 2 * HEADS * BLOCK_TOKENS * WIDTH * 4
LONG = 4 * BLOCK_TOKENS + 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


# --- the store --------------------------------------------------------------------------------------------------------


def states_of(ids: Sequence[int], layer: int) -> torch.Tensor:
    """Keys of a pretended model, shape [1, HEADS, len(ids), WIDTH]: each depends on all the tokens up to its own."""
    sums = torch.tensor(ids, dtype=torch.float32).mul(torch.arange(1, len(ids) + 1)).cumsum(0)
    return (sums[:, None] + layer * 0.25 + torch.arange(WIDTH) / 8).expand(1, HEADS, len(ids), WIDTH)


def fill(cache: SlotCache, row: int, ids: Sequence[int], first: int = 0) -> None:
    """What a forward pass does for these tokens from number `first` on."""
    cache.reserve(ROWS, len(ids))
    cache.place(torch.full((len(ids) - first,), row), torch.arange(first, len(ids)))
    for layer in range(LAYERS):
        keys = states_of(ids, layer)[:, :, first:]
        cache.update(keys, -keys, layer)


def assert_holds(cache: SlotCache, row: int, ids: Sequence[int]) -> None:
    for layer, (keys, values) in cache.buffers().items():
        wanted = states_of(ids, layer)[0]
        assert torch.equal(keys[row, :, : len(ids)], wanted)
        assert torch.equal(values[row, :, : len(ids)], -wanted)


def tokens_of(branches: Sequence[int], rest: int) -> list[int]:
    """A sequence of one block for each branch taken, and some tokens more."""
    return [1 + branch for branch in branches for _ in range(BLOCK_TOKENS)] + [9] * rest


BEGINNINGS = st.builds(tokens_of, st.lists(st.integers(0, 2), max_size=7), st.integers(1, BLOCK_TOKENS - 1))


@given(st.lists(BEGINNINGS, max_size=30))
@settings(max_examples=60, deadline=None)
def test_whatever_was_kept_and_has_gone_what_is_found_is_what_would_be_computed(sequences: list[list[int]]) -> None:
    cache, prefixes = SlotCache(ROWS, 1000), PrefixCache(MOST_BLOCKS * BLOCK_BYTES + 100)
    for number, ids in enumerate(sequences):
        row = number % ROWS
        found = prefixes.match(ids)
        assert found < len(ids)
        if found:
            cache.reserve(ROWS, len(ids))
            prefixes.load(ids, found, cache, row)
            assert_holds(cache, row, ids[:found])
        fill(cache, row, ids, found)
        prefixes.store(ids, len(ids), cache, row)
        # as much of it as the store has room for is there for the next
        assert prefixes.match([*ids, 0]) == BLOCK_TOKENS * min(len(ids) // BLOCK_TOKENS, MOST_BLOCKS)
        assert prefixes.num_tokens <= MOST_BLOCKS * BLOCK_TOKENS
        assert prefixes.memory_bytes <= MOST_BLOCKS * BLOCK_BYTES


def kept(prefixes: PrefixCache, cache: SlotCache, *branches: int) -> None:
    ids = tokens_of(branches, 1)
    fill(cache, 0, ids)
    prefixes.store(ids, len(ids), cache, 0)


def test_what_was_not_used_for_the_longest_time_goes_first_and_from_its_end() -> None:
    cache, prefixes = SlotCache(ROWS, 1000), PrefixCache(4 * BLOCK_BYTES)
    kept(prefixes, cache, 0, 0)
    kept(prefixes, cache, 1, 1)
    prefixes.load(tokens_of((0, 0), 1), 2 * BLOCK_TOKENS, cache, 1)
    kept(prefixes, cache, 2)
    assert [prefixes.match(tokens_of((branch, branch), 1)) // BLOCK_TOKENS for branch in range(3)] == [2, 1, 1]


def test_a_store_without_room_for_a_block_keeps_nothing() -> None:
    for max_bytes in (0, BLOCK_BYTES - 1):
        cache, prefixes = SlotCache(ROWS, 1000), PrefixCache(max_bytes)
        kept(prefixes, cache, 0, 1)
        assert (prefixes.match(tokens_of((0, 1), 1)), prefixes.memory_bytes) == (0, 0)


def test_a_row_that_was_given_back_is_made_again_for_what_is_kept() -> None:
    cache, prefixes = SlotCache(ROWS, 5000), PrefixCache(4 * BLOCK_BYTES)
    kept(prefixes, cache, 0, 1)
    cache.reserve(ROWS, 2000)
    cache.shrink()
    assert cache.memory_bytes == 0
    prefixes.load(tokens_of((0, 1), 1), 2 * BLOCK_TOKENS, cache, 1)
    assert_holds(cache, 1, tokens_of((0, 1), 0))


# --- in the engine ----------------------------------------------------------------------------------------------------


class Computed:
    """Counts the tokens that go through a model."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._num = 0
        engine.model.get_input_embeddings().register_forward_hook(self._seen)

    def _seen(self, module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        self._num += output.shape[1]

    def take(self) -> int:
        """Since it was last asked."""
        num, self._num = self._num, 0
        return num


def first_emission(engine: TransformersEngine, one: EngineSequence) -> Emission:
    """Let it ride up to its first token, and leave."""
    engine.add(one)
    while True:
        for emission in engine.step():
            if emission.id == one.id and emission.ids:
                engine.abort(one.id)
                return emission


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_a_prompt_that_begins_like_an_earlier_one_gets_the_tokens_it_would_have_got(
    tmp_path: Path, architecture: str
) -> None:
    folder = save_tiny_model(tmp_path, architecture)
    engine, reference = engine_of(folder, chunk=24), Reference(folder)
    system = prompt(2 * BLOCK_TOKENS + 3)
    for n in range(3):
        ids = (*system, *prompt(6, n + 1))
        assert_same_tokens(run_alone(engine, sequence(str(n), ids), 8), *reference.generate(list(ids), 8))
    assert engine.prefixes.match(system) == 2 * BLOCK_TOKENS


def test_what_was_computed_is_not_computed_again(llama: Path) -> None:
    engine = engine_of(llama, chunk=200)
    computed = Computed(engine)
    ids = prompt(LONG)
    assert first_emission(engine, sequence("first", ids)).num_cached == 0
    assert computed.take() == LONG
    assert first_emission(engine, sequence("again", ids)).num_cached == 4 * BLOCK_TOKENS
    assert computed.take() == 5
    # one token has to be computed, or there would be no logits
    whole = ids[: 4 * BLOCK_TOKENS]
    assert first_emission(engine, sequence("whole", whole)).num_cached == 3 * BLOCK_TOKENS
    assert computed.take() == BLOCK_TOKENS
    other = (ids[0] + 1, *ids[1:])
    assert first_emission(engine, sequence("other", other)).num_cached == 0


def test_a_chat_s_next_turn_finds_the_answer_too(llama: Path) -> None:
    engine = engine_of(llama)
    ids = prompt(BLOCK_TOKENS - 4)
    answer = run_alone(engine, sequence("first", ids, params=DRAWN, seed=3), 9)
    turn = (*ids, *answer, *prompt(5, 2))
    assert first_emission(engine, sequence("turn", turn)).num_cached == BLOCK_TOKENS


def test_those_who_ride_share_a_beginning_as_soon_as_it_is_computed(llama: Path) -> None:
    engine = engine_of(llama, chunk=200)
    ids = prompt(LONG)
    engine.add(sequence("rider", ids))
    engine.step()
    assert first_emission(engine, sequence("beside", (*ids[:-2], 7, 8, 9))).num_cached == 4 * BLOCK_TOKENS


def test_a_sequence_that_goes_on_elsewhere_is_told_of_its_prompt_alone(llama: Path) -> None:
    engine = engine_of(llama, chunk=200)
    ids = prompt(BLOCK_TOKENS + 3)
    whole = run_alone(engine, sequence("whole", ids, params=DRAWN, seed=5), 2 * BLOCK_TOKENS)
    rest = sequence("rest", ids, whole[:-4], DRAWN, seed=5)
    assert first_emission(engine, rest).num_cached == len(ids)
    assert run_alone(engine, rest, 4) == whole[-4:]


def test_riders_of_every_kind_get_the_same_with_and_without_a_cache(llama: Path) -> None:
    jobs = {}
    for n in range(12):
        ids = (*prompt(BLOCK_TOKENS * (n % 3) + 2), *prompt(3 + n, n % 2 + 1))
        jobs[str(n)] = (sequence(str(n), ids, params=DRAWN if n % 2 else GREEDY, seed=n), 6 + n)
    without = run(engine_of(llama, chunk=40, prefix_cache_mb="0"), jobs)
    engine = engine_of(llama, chunk=40)
    assert run(engine, jobs) == without
    assert run(engine, jobs) == without
    assert engine.prefixes.num_tokens > 0


def test_what_came_out_broken_is_kept_for_nobody(llama: Path) -> None:
    engine = engine_of(llama, chunk=16)
    ids = prompt(2 * BLOCK_TOKENS + 1)
    weight = cast(torch.nn.Embedding, engine.model.get_input_embeddings()).weight
    with torch.no_grad():
        sound = weight[ids[-1]].clone()
        weight[ids[-1]] = torch.nan
    engine.add(sequence("broken", ids))
    errors = [emission.error for _ in range(8) for emission in engine.step() if emission.error]
    assert len(errors) == 1
    # nor what was left in the middle of its prompt
    engine.add(sequence("left", prompt(3 * BLOCK_TOKENS, 1)))
    engine.step()
    engine.step()
    engine.abort("left")
    assert engine.prefixes.num_tokens == 0
    with torch.no_grad():
        weight[ids[-1]] = sound
    assert first_emission(engine, sequence("sound", ids)).num_cached == 0
