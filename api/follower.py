"""The rule by which a client's tokens are put together from two sources: reads of a job's log, and live entries.

Pure: no Redis, no clock. docs/protocol.md ("Readers") gives the rule, tests/test_follower.py tries it on random
interleavings of reads, live entries, duplicates, gaps and reconnects.
"""

from __future__ import annotations

from tasks.entries import Entry


class Follower:
    """What one client has of one job's log.

    The cursor is the number of tokens alone: epochs change when another owner takes over, token numbers never do.

    Attributes:
        have: tokens the client has.
        needs_log: something may be missing: read the log from `have` before anything else is waited for.
        ended: the client has the end.
    """

    __slots__ = ("ended", "have", "needs_log")

    def __init__(self, have: int = 0, *, ended: bool = False) -> None:
        self.have = have
        self.ended = ended
        self.needs_log = False

    def start_reading(self) -> None:
        """The log is about to be read; what happens from here on may ask for another read."""
        self.needs_log = False

    def take_live(self, entry: Entry) -> Entry | None:
        """What of a published entry is new to the client; None where nothing is, or where the log must be read."""
        if entry.kind == "tokens":
            if entry.first > self.have + 1:
                self.needs_log = True
                return None
            return self._take_tokens(entry)
        if entry.n > self.have:
            # the tokens before it were missed; an end that is passed on now would cut them off
            self.needs_log = True
            return None
        return self._take_end(entry) if entry.kind == "end" else None

    def take_logged(self, entry: Entry) -> Entry | None:
        """The same for an entry that was read from the log, in the log's order.

        Raises:
            ValueError: the log itself has a gap.
        """
        if entry.kind == "tokens":
            if entry.first > self.have + 1:
                raise ValueError(f"the log goes on at token {entry.first} behind token {self.have}")
            return self._take_tokens(entry)
        return self._take_end(entry) if entry.kind == "end" else None

    def _take_tokens(self, entry: Entry) -> Entry | None:
        if entry.n <= self.have:
            return None
        new = entry.after(self.have)
        self.have = entry.n
        return new

    def _take_end(self, entry: Entry) -> Entry | None:
        if self.ended:
            return None
        self.ended = True
        return entry


def log_start(have: int) -> str:
    """Where an XRANGE has to start so that it holds everything behind token `have`, in whatever epoch.

    Entries are `<epoch>-<n>` with epochs from 1, so all that is new lies behind `1-<have>`. A job that ended before its
    first token has its end at `1-0`.
    """
    return f"(1-{have}" if have else "-"
