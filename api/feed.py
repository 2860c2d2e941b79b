"""What one client has yet to see of the jobs it follows: bounded, and filled without ever waiting for the client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from tasks.entries import Entry
from tasks.ledger_types import JobState


class Feed:
    """Live entries of one job, or of several children of a group.

    Attributes:
        ids: the jobs, which entries name by their index.
        entries: (index, entry) in the order of arrival.
        lost: indices of jobs whose log must be read, because entries may be missing.
        gone: indices of jobs that had no record when they were last looked at.
        have: tokens that the client has of each job; its owner keeps them up to date.
        subscribed: set once every channel is confirmed.
        seen_at: when something was last heard, in the loop's time.
    """

    def __init__(self, ids: Sequence[str], capacity: int, *, ends_only: bool, on_close: Callable[[Feed], None]) -> None:
        self.ids = tuple(ids)
        self.entries: deque[tuple[int, Entry]] = deque()
        self.lost: set[int] = set()
        self.gone: set[int] = set()
        self.have = [0] * len(self.ids)
        self.subscribed = asyncio.Event()
        self.seen_at = 0.0
        self._capacity = capacity
        self._ends_only = ends_only
        self._unconfirmed = set(range(len(self.ids)))
        self._event = asyncio.Event()
        self._on_close = on_close

    def put(self, index: int, entry: Entry, now: float) -> None:
        """An entry was published."""
        self.seen_at = now
        if self._ends_only and entry.kind == "tokens":
            return
        if len(self.entries) >= self._capacity:
            self.entries.clear()
            self.lose_all()
        else:
            self.entries.append((index, entry))
            self._event.set()

    def confirmed(self, index: int) -> None:
        """A subscription is in place, for the first time or again: what was published before it may be missing."""
        self.lost.add(index)
        self._unconfirmed.discard(index)
        if not self._unconfirmed:
            self.subscribed.set()
        self._event.set()

    def lose(self, index: int) -> None:
        """An entry of this job was published and can't be passed on."""
        self.lost.add(index)
        self._event.set()

    def lose_all(self) -> None:
        """Anything may have been missed."""
        self.lost.update(range(len(self.ids)))
        self._event.set()

    def checked(self, states: Mapping[str, JobState | None], now: float) -> None:
        """Compare with the records: an ended job, or tokens that the client does not have, send it to the log."""
        self.seen_at = now
        for index, id in enumerate(self.ids):
            state = states[id]
            if state is None:
                self.gone.add(index)
            else:
                self.gone.discard(index)
            if state is None or state.ended or (state.k > self.have[index] and not self._ends_only):
                self.lost.add(index)
                self._event.set()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to look at; False where nothing came in time."""
        if timeout_s <= 0 and not self._event.is_set():
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True

    def close(self) -> None:
        """Leave the channels; a second call does nothing."""
        self._on_close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
