"""When a webhook is tried again."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

LONGEST_S: Final = 3600.0
_MOST_DOUBLINGS: Final = 30
#: No receiver puts us off for longer.
_LONGEST_RETRY_AFTER_S: Final = 86400.0


def wait_before_next(number: int, first_s: float, retry_after_s: float = 0.0) -> float:
    """Seconds until the next attempt.

    The wait doubles from `first_s` up to an hour, and is drawn from the upper half of that, so that what failed
    together does not come back together. A receiver that asks for more time gets it.

    Args:
        number: of the attempt that failed, from 1.
    """
    longest = min(max(LONGEST_S, first_s), first_s * 2.0 ** min(number - 1, _MOST_DOUBLINGS))
    drawn = longest * (0.5 + random.random() / 2)  # noqa: S311 - nothing is secret here
    return max(drawn, retry_after_s)


def retry_after_seconds(header: str, now: datetime | None = None) -> float:
    """What a Retry-After header asks for, in seconds: a number of them or a date; 0 where it says neither."""
    if header.isascii() and header.isdecimal():
        return min(float(header[:9]), _LONGEST_RETRY_AFTER_S)
    try:
        at = parsedate_to_datetime(header)
    except (ValueError, IndexError, TypeError):
        return 0.0
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return min(max(0.0, (at - (now or datetime.now(UTC))).total_seconds()), _LONGEST_RETRY_AFTER_S)
