"""Prompts that all benches share: of different lengths, as strangers' are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

PROMPTS: Final = (
    "Once upon a time there was",
    "The most important thing about writing software is",
    "The history of the steam engine begins in the first century, when",
    "A recipe for bread: take flour, water, salt and yeast, and then",
    "Dear colleagues, thank you for your letter of last week. We have talked about your proposal, and",
    "In the north of the country, where winters are long and the nights are dark, people",
    "Water is made of two elements. It",
    "The three laws of thermodynamics say that energy can't be made or destroyed, and that",
    "My favourite city is",
    "On the first day of school the teacher asked the children what they wanted to learn, and they said that",
)


def stream_bodies(count: int, max_tokens: int, eos_ids: Iterable[int]) -> list[dict[str, Any]]:
    """Bodies for `POST /generate_stream`, which never end before `max_tokens`: an end that came early in one run and
    not in another would be measured as speed."""
    bias = never(eos_ids)
    return [
        {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.7, "seed": seed, "logit_bias": bias}
        for seed, prompt in enumerate(_cycle(count))
    ]


def generate_bodies(count: int, max_tokens: int, eos_ids: Iterable[int]) -> list[dict[str, Any]]:
    """Bodies for `POST /basic_generate`, greedy, of exactly `max_tokens`."""
    bias = never(eos_ids)
    return [{"prompt": prompt, "max_tokens": max_tokens, "logit_bias": bias} for prompt in _cycle(count)]


def never(token_ids: Iterable[int]) -> dict[str, float]:
    """The `logit_bias` that keeps tokens from being drawn."""
    return {str(token_id): -100.0 for token_id in sorted(token_ids)}


def _cycle(count: int) -> Sequence[str]:
    return [PROMPTS[index % len(PROMPTS)] for index in range(count)]
