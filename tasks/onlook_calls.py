"""The ledger's call for those who look on: who rides, who waits first, and when workers were heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tasks import keys
from tasks.calls import Call, Calls

#: More are not looked at: so many take Redis about a millisecond.
MAX_RIDERS: Final = 256
#: So many of each queue are told one by one.
MAX_WAITING: Final = 32


@dataclass(frozen=True, slots=True)
class RidingJob:
    """A job that a worker has.

    Attributes:
        owner: whose it is (`tasks.keys.NO_KEY` where there are no keys).
        incarnation: of the worker that has it.
        tokens: how many are written; of `max_tokens` at most.
        lease_ms: until its lease runs out; negative where it has.
        stops: its end is wanted.
    """

    id: str
    pool: str
    owner: str
    incarnation: str
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
    now_ms, riders, pools = answer
    return [_rider(int(now_ms), *one) for one in riders], [_pool(*one) for one in pools]


def _rider(
    now_ms: int,
    id: str,
    pool: str,
    owner: str | None,
    incarnation: str,
    k: str,
    weight: str | None,
    lease: str,
    stop: str | None,
) -> RidingJob:
    # a record of a release before the one that weighs jobs does not say it
    max_tokens = int(weight.split(" ", 2)[1]) if weight else 0
    return RidingJob(
        id, pool, owner or keys.NO_KEY, incarnation, int(k), max_tokens, int(lease) - now_ms, stop not in (None, "")
    )


def _pool(waiting: int, first: list[str], heard: list[str]) -> PoolOnlook:
    return PoolOnlook(
        int(waiting),
        [(id, owner or keys.NO_KEY) for id, owner in zip(first[::2], first[1::2], strict=True)],
        {incarnation: int(ms) for incarnation, ms in zip(heard[::2], heard[1::2], strict=True)},
    )
