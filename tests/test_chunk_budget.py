"""The chunk budget: what a step takes along of prompts follows what the machine is seen to afford."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from worker.engines.chunk_budget import FIRST_TOKENS, LEAST_TOKENS, NUM_CHUNKS, STRETCH, ChunkBudget

MOST = 256
DECODING = 0.036


def budget_after_decoding(most: int = MOST) -> ChunkBudget:
    budget = ChunkBudget(most)
    for _ in range(10):
        budget.note_decoding(DECODING)
    return budget


def prefill(budget: ChunkBudget, length: int, cost: Callable[[int], float]) -> list[tuple[int, float]]:
    """Tokens and duration of each step while a prompt joins others; `cost` is of the token at a position."""
    steps = []
    done = 0
    while done < length:
        number = min(budget.tokens(is_shared=True), length - done)
        seconds = DECODING + sum(cost(position) for position in range(done, done + number))
        budget.note_shared(number, seconds)
        steps.append((number, seconds))
        done += number
    return steps


def test_a_sequence_alone_gets_whole_chunks_whatever_they_cost() -> None:
    budget = budget_after_decoding()
    prefill(budget, 500, lambda position: 0.01)

    assert budget.tokens(is_shared=False) == MOST


def test_where_tokens_cost_much_a_shared_step_is_stretched_as_far_as_is_meant() -> None:
    steps = prefill(budget_after_decoding(), 2_000, lambda position: 0.0012)

    assert [seconds / DECODING for _, seconds in steps[1:-1]] == pytest.approx([STRETCH] * (len(steps) - 2), rel=0.03)


def test_no_step_is_longer_than_three_while_the_tokens_of_a_long_prompt_get_dearer() -> None:
    steps = prefill(budget_after_decoding(), 2_000, lambda position: 0.0011 + position * 1.5e-6)

    assert max(seconds for _, seconds in steps) < 3 * DECODING
    assert steps[-2][0] < steps[1][0] / 2


def test_where_tokens_cost_next_to_nothing_whole_chunks_go_along_after_a_few_steps() -> None:
    steps = prefill(budget_after_decoding(), 2_000, lambda position: 1e-5)

    assert [number for number, _ in steps[:4]] == [FIRST_TOKENS, 2 * FIRST_TOKENS, 4 * FIRST_TOKENS, MOST]


def test_a_step_that_took_less_than_one_without_a_chunk_is_no_error() -> None:
    budget = budget_after_decoding()

    budget.note_shared(FIRST_TOKENS, DECODING / 2)

    assert budget.tokens(is_shared=True) == 2 * FIRST_TOKENS


def test_chunks_of_a_few_tokens_say_nothing_of_large_ones() -> None:
    budget = budget_after_decoding()
    for _ in range(20):
        budget.note_shared(10, DECODING * 1.01)

    assert budget.tokens(is_shared=True) == FIRST_TOKENS


def test_a_prompt_goes_on_even_where_the_machine_affords_nothing() -> None:
    steps = prefill(budget_after_decoding(), 200, lambda position: 1.0)

    assert {number for number, _ in steps[1:]} == {LEAST_TOKENS}


def test_after_one_step_that_something_else_held_up_the_chunks_come_back() -> None:
    budget = budget_after_decoding()
    usual = prefill(budget, 400, lambda position: 0.0012)[-2][0]

    budget.note_shared(usual, 2.0)
    slow = budget.tokens(is_shared=True)
    back = prefill(budget, 400, lambda position: 0.0012)[-2][0]

    assert slow == LEAST_TOKENS
    assert back == pytest.approx(usual, abs=2)


def test_the_setting_is_the_bound_though_it_be_less_than_the_least() -> None:
    budget = budget_after_decoding(most=3)
    sizes = [number for number, _ in prefill(budget, 30, lambda position: 1e-5)]

    assert sizes == [3] * 10


def test_before_a_decoding_step_was_measured_nothing_changes() -> None:
    budget = ChunkBudget(MOST)
    for _ in range(NUM_CHUNKS):
        budget.note_shared(40, 1e-6)

    assert budget.tokens(is_shared=True) == FIRST_TOKENS
