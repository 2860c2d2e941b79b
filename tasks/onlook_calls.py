"""The ledger's call for those who look on: who rides, who waits first, and when workers were heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tasks import keys
from tasks.calls import Call, Calls

#: More are not looked at, so that a call takes Redis about a millisecond at most.
MAX_RIDERS: Final = 256
#: So many of each queue are told one by one.
MAX_WAITING: Final = 32


@dataclass(frozen=True, slots=True)
class RidingJob:
    """A job that a worker has.

    Attributes:
        owner: whose it is (`tasks.keys.NO_KEY` where there are no keys).
        incarnation, worker: who has it, and that one's name.
        tokens: how many are written; of `max_tokens` at most.
        lease_ms: until its lease runs out; negative where it has.
        stops: its end is wanted.
    """

    id: str
    pool: str
    owner: str
    incarnation: str
    worker: str
    tokens: int
    max_tokens: int
    lease_ms: int
    stops: bool


@dataclass(frozen=True, slots=True)
class PoolOnlook:
    """One pool.

    Attributes:
        waiting: how many jobs wait.
        first: id and owner of those that come first, by arrival and priority.
        heard_ms: of each worker, by incarnation, how long its last heartbeat still counts.
    """

    waiting: int
    first: Sequence[tuple[str, str]]
    heard_ms: dict[str, int]


class OnlookCalls(Calls):
    """The calls of the ledger, and the one for those who look on."""

    def onlook(self, pools: Sequence[str]) -> Call[tuple[list[RidingJob], list[PoolOnlook]]]:
        """All that ride, up to `MAX_RIDERS`, and these pools in their order."""
        return self._call("onlook", [], (MAX_RIDERS, MAX_WAITING, *pools), _parse)


def _parse(answer: Any) -> tuple[list[RidingJob], list[PoolOnlook]]:
    riders, pools = answer
    return [_rider(*one) for one in riders], [_pool(*one) for one in pools]


def _rider(
    id: str, pool: str, owner: str, incarnation: str, worker: str, k: str, weight: str, lease_ms: str, stops: str
) -> RidingJob:
    # of a release before the one that weighs jobs it is not known
    max_tokens = int(weight.split(" ", 2)[1]) if weight else 0
    return RidingJob(
        id, pool, owner or keys.NO_KEY, incarnation, worker, int(k), max_tokens, int(lease_ms), bool(stops)
    )


def _pool(waiting: int, first: list[str], heard: list[str]) -> PoolOnlook:
    return PoolOnlook(
        int(waiting),
        [(id, owner or keys.NO_KEY) for id, owner in zip(first[::2], first[1::2], strict=True)],
        {incarnation: int(ms) for incarnation, ms in zip(heard[::2], heard[1::2], strict=True)},
    )
