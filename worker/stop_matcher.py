"""Stop strings in streamed text: nothing of a stop string is ever released, and nothing else is held back for long."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings across the borders of the pieces that it is fed.

    The match that is complete first counts, as if the text came character by character; of those complete at the same
    character the one that began first. So what is released in all does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Take in a piece of text; returns what can be shown: the longest suffix that may begin a stop string is held.

        After a match only the text before the stop string comes out, and nothing ever again.
        """
        if self.matched:
            return ""
        if not self._stops or not (self._held or text):
            return text
        seen = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
            self.matched = True
            self._held = ""
            return seen[: min(found)[1]]
        keep_from = self._first_possible_start(seen)
        self._held = seen[keep_from:]
        return seen[:keep_from]

    def flush(self) -> str:
        """The text that is held, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_possible_start(self, seen: str) -> int:
        first = len(seen)
        for stop in self._stops:
            at = seen.find(stop[0], max(0, len(seen) - len(stop) + 1))
            while 0 <= at < first:
                if stop.startswith(seen[at:]):
                    first = at
                    break
                at = seen.find(stop[0], at + 1)
        return first
