"""How many prompt tokens a step takes along, so that the others in it need not wait long for theirs."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

#: A step that several sequences share is to take this many times as long as one that only decodes: three are promised,
#: and no two steps take the same time.
STRETCH: Final = 2.0
#: A prompt goes on by so many tokens in any case.
LEAST_TOKENS: Final = 8
#: Before anything is measured.
FIRST_TOKENS: Final = 48
#: Decoding steps, and steps with chunks, that an estimate is made of.
NUM_STEPS: Final = 8
NUM_CHUNKS: Final = 4


class ChunkBudget:
    """Measures what decoding steps and prompt tokens cost, and bounds the chunks of steps that several share.

    What a token of a prompt costs depends on the processor (next to nothing on a GPU, on a CPU without matrix units a
    thirtieth of a step) and grows along the prompt. Sarathi-Serve's token budget does the same, set by hand.

    Args:
        most: tokens of a chunk in any case; a sequence that has the engine for itself gets as many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._shared = min(FIRST_TOKENS, most)
        self._decode_times: deque[float] = deque(maxlen=NUM_STEPS)
        #: Tokens, and seconds beyond those of a decoding step.
        self._chunks: deque[tuple[int, float]] = deque(maxlen=NUM_CHUNKS)

    def tokens(self, is_shared: bool) -> int:
        """Prompt tokens for a step; `is_shared` where it has more than one sequence."""
        return self._shared if is_shared else self._most

    def note_decoding(self, seconds: float) -> None:
        """A step without a chunk took so long."""
        self._decode_times.append(seconds)

    def note_shared(self, num_tokens: int, seconds: float) -> None:
        """A step of several sequences with so many prompt tokens took so long."""
        if not self._decode_times:
            return
        decoding = median(self._decode_times)
        self._chunks.append((num_tokens, seconds - decoding))
        cost = sum(extra for _, extra in self._chunks) / sum(number for number, _ in self._chunks)
        affordable = int((STRETCH - 1) * decoding / cost) if cost > 0 else self._most
        # Tokens are cheaper while few keep the step bound by memory: what a chunk costs that is far larger than those
        # measured, nobody knows yet.
        known = max(self._shared, 2 * num_tokens)
        self._shared = min(max(LEAST_TOKENS, min(affordable, known)), self._most)
