"""Priorities of jobs: one meaning wherever one is named. `tasks/lua/acceptance.lua` gives it effect.

The queue is in the order of arrival, and each step of priority counts as 150 s of waiting. So a job of low priority is
overtaken only by normal ones that come within ten minutes after it: priorities are bounded, and nobody starves.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StrictInt

HIGH: Final = 1
NORMAL: Final = 5
LOW: Final = 9
STEP_S: Final = 150
_NAMES: Final = {"high": HIGH, "normal": NORMAL, "low": LOW}

Priority = Literal["high", "normal", "low"] | Annotated[StrictInt, Field(ge=0, le=9)]


def priority_number(priority: Priority | None, default: int = NORMAL) -> int:
    """A priority as a number from 0, which comes first, to 9; `default` where none was given."""
    if priority is None:
        return default
    return _NAMES[priority] if isinstance(priority, str) else priority
