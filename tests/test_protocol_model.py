"""The protocol, explored: in every order of events and faults the job is whole, and comes to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.protocol_exploration import Violation, explore
from tests.protocol_model import Setting
from tests.protocol_steps import steps

SETTINGS = {
    "any two faults": Setting(faults=2, tokens=1),
    "any fault and a cancel": Setting(faults=1, cancels=True),
    "the same with boarding apart from the claim": Setting(faults=1, cancels=True, claims_board=False),
    "any fault and a lost tail": Setting(faults=1, loses_tails=True),
    "a job that kills at its first token, and any fault": Setting(faults=1, poison_at=1),
    "a job that kills at its second token, any fault and a cancel": Setting(faults=1, poison_at=2, cancels=True),
}

LARGE = {
    "any two faults and a longer job": Setting(faults=2),
    "any two faults with boarding apart from the claim": Setting(faults=2, claims_board=False),
    "any two faults and a cancel": Setting(faults=2, cancels=True, tokens=1),
    "three crashes and pauses": Setting(faults=3, tokens=1, kinds=frozenset({"crash", "pause"})),
    "a job that kills at its first token, and any two faults": Setting(faults=2, poison_at=1),
    "a crash and a lost tail, twice": Setting(faults=2, tokens=1, loses_tails=True, kinds=frozenset({"crash"})),
}

#: Fences, or smallest sets of them, with a setting in which their lack shows.
FENCES = {
    "owned nonce": Setting(faults=2, loses_tails=True, tokens=1),
    "owned status, owned epoch": Setting(faults=1),
    "position": Setting(faults=1),
    "lease": Setting(faults=1),
    "died_gen": Setting(faults=1, poison_at=1),
    "died_gen order": Setting(faults=1, poison_at=1),
    "run-ahead": Setting(faults=0),
    "outbox": Setting(faults=0),
    "release owner, owned status": Setting(faults=2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_order_of_events_leaves_the_job_whole_and_lets_it_end(name: str) -> None:
    assert explore(SETTINGS[name], steps) > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LARGE)
def test_so_does_a_larger_space(name: str) -> None:
    assert explore(LARGE[name], steps, most=2_000_000) > 20_000


@pytest.mark.parametrize("fences", FENCES)
def test_the_model_shows_what_goes_wrong_without_a_fence(fences: str) -> None:
    without = frozenset(fences.split(", "))
    with pytest.raises(Violation) as shown:
        explore(replace(FENCES[fences], without=without), steps)
    assert "states" not in str(shown.value).split(":")[0]
