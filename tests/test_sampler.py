"""The sampler: the same distributions as transformers' own processors, and draws that can be repeated."""

from __future__ import annotations

import math
from collections import Counter
from typing import cast

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tasks.job_request import SamplingParams
from worker.engines.base import SequenceError
from worker.engines.sampler import SequenceSampling, draw, sample, uniform, warp

CPU = torch.device("cpu")
VOCAB_SIZE = 500


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def sampling(
    params: SamplingParams,
    seed: int = 0,
    prompt_ids: tuple[int, ...] = (1,),
    output_ids: tuple[int, ...] = (),
    vocab_size: int = VOCAB_SIZE,
) -> SequenceSampling:
    return SequenceSampling(params, seed, prompt_ids, output_ids, vocab_size, CPU)


class OpenAIPenalties(LogitsProcessor):
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence: the formula of OpenAI's API reference."""

    def __init__(self, presence: float, frequency: float, num_prompt: int) -> None:
        self.presence, self.frequency, self.num_prompt = presence, frequency, num_prompt

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = cast(torch.FloatTensor, scores.clone())
        for row, ids in enumerate(input_ids.tolist()):
            for token_id, count in Counter(ids[self.num_prompt :]).items():
                scores[row, token_id] -= count * self.frequency + self.presence
        return scores


def transformers_scores(
    logits: torch.Tensor, params: SamplingParams, ids: tuple[int, ...], num_prompt: int = 3
) -> torch.Tensor:
    """What transformers' generate would sample from: its processors in its order."""
    processors: list[LogitsProcessor] = []
    input_ids, scores = cast(torch.LongTensor, torch.tensor([ids])), cast(torch.FloatTensor, logits[None].clone())
    if params.logit_bias:
        biases: list[list[list[int] | float]] = [[[int(id)], float(bias)] for id, bias in params.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(OpenAIPenalties(params.presence_penalty, params.frequency_penalty, num_prompt))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores[0]


PARAMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.7, min_p=0.02),
    SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.4),
    SamplingParams(temperature=2.0, top_k=1),
    SamplingParams(temperature=2.0, top_p=1e-6),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1.0, top_k=10_000),
    SamplingParams(temperature=1.0, top_k=-1, repetition_penalty=0.7),
    SamplingParams(presence_penalty=1.5, frequency_penalty=-0.7),
    SamplingParams(frequency_penalty=2.0, repetition_penalty=1.8, temperature=0.6),
    SamplingParams(logit_bias={"7": 4.5, "41": -3.0, "0": 100, "3": -100}),
    SamplingParams(
        temperature=0.7,
        top_k=60,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.9,
        logit_bias={"7": 6, "41": 5, "12": -2},
    ),
)


def test_a_mixed_batch_has_row_by_row_the_distributions_of_transformers() -> None:
    logits = random_logits(len(PARAMS))
    ids = (3, 7, 7, 41, 499)
    shaped = logits.clone()
    for row, params in enumerate(PARAMS):
        sampling(params, prompt_ids=ids[:3], output_ids=ids[3:]).shape(shaped[row])

    scores = warp(shaped, PARAMS)

    for row, params in enumerate(PARAMS):
        expected = transformers_scores(logits[row], params, ids)
        assert torch.equal(scores[row].isinf(), expected.isinf()), params
        torch.testing.assert_close(scores[row].softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def test_greedy_takes_the_token_that_transformers_would_after_biases_and_penalties() -> None:
    ids = (3, 7, 7, 41, 499)
    for seed in range(20):
        logits = random_logits(len(PARAMS), seed=seed)
        greedy = [params.model_copy(update={"temperature": 0.0}) for params in PARAMS]
        samplings = [sampling(params, prompt_ids=ids[:3], output_ids=ids[3:]) for params in greedy]

        found = sample(logits.clone(), samplings, [3] * len(PARAMS))

        # A temperature changes nothing about which token is the best one.
        assert found == [int(transformers_scores(logits[row], one, ids).argmax()) for row, one in enumerate(PARAMS)]


def test_a_bias_comes_before_the_repetition_penalty_as_in_transformers() -> None:
    logits = torch.tensor([0.0, -1.0, 1.0])
    params = SamplingParams(repetition_penalty=2.0, logit_bias={"1": 3})
    sampling(params, prompt_ids=(1,), vocab_size=3).shape(logits)

    assert logits.tolist() == [0.0, (-1.0 + 3.0) / 2.0, 1.0]


def test_top_p_finds_a_nucleus_of_nearly_the_whole_vocabulary() -> None:
    logits = random_logits(2, vocab_size=20_000, spread=0.05)
    params = SamplingParams(temperature=1.0, top_p=0.97)

    scores = warp(logits, [params, SamplingParams(temperature=1.0, top_p=0.2)])

    expected = transformers_scores(logits[0], params, (0,))
    assert int((~expected.isinf()).sum()) > 16_000
    # At the border the two sum in a different order, so that one token may fall on either side.
    assert int((scores[0].isinf() != expected.isinf()).sum()) <= 1


def test_presence_and_frequency_penalty_count_the_output_alone_as_openai_defines_them() -> None:
    logits = random_logits(1)[0]
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    shaped = logits.clone()
    sequence = sampling(params, prompt_ids=(9, 9), output_ids=(4, 4))
    sequence.record(8)

    sequence.shape(shaped)

    changed = {int(token): float((logits - shaped)[token]) for token in (logits != shaped).nonzero()}
    assert changed == {4: pytest.approx(0.5 + 2 * 0.25, abs=1e-5), 8: pytest.approx(0.5 + 0.25, abs=1e-5)}


def test_a_token_is_penalised_from_the_step_on_that_follows_it() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=5.0)
    sequence = sampling(params, vocab_size=3, prompt_ids=(0,))
    logits = torch.tensor([[1.0, 3.0, 2.0]])

    first = sample(logits.clone(), [sequence], [1])
    sequence.record(1)
    second = sample(logits.clone(), [sequence], [2])

    assert (first, second) == ([1], [2])


def test_logit_bias_lifts_a_token_over_all_others_and_bans_another() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())

    lifted = sample(logits.clone(), [sampling(SamplingParams(temperature=0, logit_bias={"17": 100}))], [1])
    banned = sample(logits.clone(), [sampling(SamplingParams(temperature=0, logit_bias={str(best): -100}))], [1])

    assert lifted == [17]
    assert banned == [int(logits[0].topk(2).indices[1])]


def test_a_bias_for_a_token_that_the_model_lacks_is_refused_by_its_number() -> None:
    with pytest.raises(SequenceError, match="names token 500; the model's tokens are 0 to 499") as caught:
        sampling(SamplingParams(logit_bias={"500": 1}))
    assert caught.value.code == "invalid_request"


def test_temperature_zero_takes_the_best_token_and_a_tiny_temperature_does_too() -> None:
    logits = random_logits(3)
    greedy = [sampling(SamplingParams(temperature=0), seed=row) for row in range(3)]
    tiny = [sampling(SamplingParams(temperature=1e-30), seed=row) for row in range(3)]

    assert sample(logits.clone(), greedy, [1, 1, 1]) == logits.argmax(-1).tolist()
    assert sample(logits.clone(), tiny, [1, 1, 1]) == logits.argmax(-1).tolist()


def test_the_random_numbers_are_fixed_for_ever() -> None:
    assert [uniform(0, 1), uniform(0, 2), uniform(1, 1)] == [
        0.7902849208735749,
        0.3367518094560573,
        0.6673918689518468,
    ]
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_the_random_numbers_fill_the_unit_interval_evenly_along_numbers_and_seeds() -> None:
    for points in ([uniform(7, n) for n in range(10_000)], [uniform(n, 7) for n in range(10_000)]):
        assert 0 <= min(points) < max(points) < 1
        tenths = Counter(int(point * 10) for point in points)
        assert sum((count - 1_000) ** 2 / 1_000 for count in tenths.values()) < 27.9  # chi-square, 9 degrees, 0.1 %
        neighbours = torch.tensor(points)
        assert abs(float(torch.corrcoef(torch.stack((neighbours[1:], neighbours[:-1])))[0, 1])) < 0.04


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    num_draws = 20_000
    points = torch.tensor([uniform(2024, number) for number in range(1, num_draws + 1)], dtype=torch.float64)

    tokens = draw(probabilities.log().expand(num_draws, -1), points)

    counts = torch.bincount(tokens, minlength=8)
    expected = probabilities * num_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # chi-square, 7 degrees, 0.1 %


def test_a_filtered_token_is_never_drawn_even_at_the_ends_of_the_interval() -> None:
    scores = torch.tensor([[-math.inf, 0.3, -math.inf, 0.1, -math.inf]])
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)

    assert draw(scores.expand(2, -1), ends).tolist() == [1, 3]


def test_a_draw_depends_on_seed_and_number_and_not_on_batch_mates() -> None:
    logits = random_logits(len(PARAMS), seed=3)
    samplings = [sampling(params, seed=100 + row) for row, params in enumerate(PARAMS)]
    numbers = [row + 1 for row in range(len(PARAMS))]

    together = sample(logits.clone(), samplings, numbers)
    alone = [sample(logits[row : row + 1].clone(), [one], [numbers[row]])[0] for row, one in enumerate(samplings)]
    reversed_order = sample(logits.flip(0).clone(), samplings[::-1], numbers[::-1])

    assert together == alone == reversed_order[::-1]


def test_only_the_row_without_finite_logits_gets_no_token() -> None:
    logits = random_logits(4)
    logits[1, 3] = math.nan
    logits[2, 3] = math.inf
    greedy, drawn = SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1)

    for params in (greedy, drawn):
        tokens = sample(logits.clone(), [sampling(params) for _ in range(4)], [1] * 4)
        assert [token is None for token in tokens] == [False, True, True, False]
