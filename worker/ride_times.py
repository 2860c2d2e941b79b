"""When what happened to a ride, noted as it happens and told when it is over."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Leg:
    """One stay of a sequence in one model process. Times are ns since 1970, 0 for what has not happened.

    Attributes:
        position: tokens it had when it boarded.
        cause: how the process died under it, "" where it did not.
    """

    boarded_ns: int
    position: int
    first_token_ns: int = 0
    end_ns: int = 0
    cause: str = ""


@dataclass(slots=True)
class RideTimes:
    """Of one ride.

    Attributes:
        awaits_token: it has boarded, and no token has come since.
        stop_ns: when it was asked to stop, 0 where it was not.
    """

    claimed_ns: int = field(default_factory=time.time_ns)
    legs: list[Leg] = field(default_factory=list)
    awaits_token: bool = False
    stop_ns: int = 0

    def boarded(self, position: int) -> None:
        """The child is given the sequence."""
        self.legs.append(Leg(time.time_ns(), position))
        self.awaits_token = True

    def first_token(self) -> None:
        """The first token since it boarded has come from the child."""
        self.awaits_token = False
        self.legs[-1].first_token_ns = time.time_ns()

    def out_of_child(self, cause: str = "") -> None:
        """The child has let go of the sequence, or died (`cause`)."""
        self.awaits_token = False
        if self.legs and not self.legs[-1].end_ns:
            self.legs[-1].end_ns = time.time_ns()
            self.legs[-1].cause = cause

    def stop_asked(self) -> None:
        """The ledger wants it to stop."""
        self.stop_ns = self.stop_ns or time.time_ns()
