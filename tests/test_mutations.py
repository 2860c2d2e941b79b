"""Every fence of the ledger is missed: without it, the tests that the list names fail."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import ResponseError

from tasks.settings import Settings
from tests.ledger_harness import LedgerOnAClock
from tests.mutation import Claim, Mutation
from tests.mutations import MUTATIONS

CASES = [
    pytest.param(mutation, claim, id=f"{mutation.name}-{getattr(claim, '__name__', '')}")
    for mutation in MUTATIONS
    for claim in mutation.tests
]


def test_every_mutation_has_a_name_of_its_own_and_a_reason() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert all(mutation.why and mutation.tests for mutation in MUTATIONS)


@pytest.mark.parametrize(("mutation", "claim"), CASES)
def test_a_claim_of_the_ledger_fails_without_its_fence(
    redis_client: redis.Redis, mutation: Mutation, claim: Claim
) -> None:
    claim(LedgerOnAClock(redis_client, Settings()))
    redis_client.flushall()
    with pytest.raises((AssertionError, ResponseError)):
        claim(LedgerOnAClock(redis_client, Settings(), mutation.scripts()))
