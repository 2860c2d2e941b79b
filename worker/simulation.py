"""What the simulated engine says: a pure function of prompt, seed and position, so that anyone can compute it.

`docs/simulated-engine.md` states the function and gives test vectors. Nothing here is timed, random or dependent on a
batch.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Final, Literal

#: Named in every hashed byte string and in the engine's fingerprint: another function gets another name.
VERSION: Final = "simulated-1"
VOCABULARY: Final = 2**16
#: The end-of-sequence token; its text is empty. No position draws it, only a marker asks for it.
EOS_ID: Final = 0

_CONSONANTS: Final = "bdfghjklmnprstvz"
_VOWELS: Final = "aiou"
_MARKER: Final = re.compile(r"\[\[(?:exit (?P<code>\d{1,3})|(?P<kind>raise|end|hang))\]\]@(?P<position>[1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Marker:
    """What a prompt asks for at one position: the process exits with `code`, or the sequence fails, ends or hangs."""

    kind: Literal["exit", "raise", "end", "hang"]
    code: int = 0


class Draws:
    """The tokens of one prompt and seed, by position. The prompt is hashed once, however many tokens are drawn."""

    def __init__(self, prompt: str, seed: int) -> None:
        self._markers = markers(prompt)
        self._hash = hashlib.blake2b(f"carpool-{VERSION}\n{prompt}\n{seed}\n".encode("utf-8", "surrogatepass"))

    def marker(self, position: int) -> Marker | None:
        return self._markers.get(position)

    def token_id(self, position: int) -> int:
        """Token number `position`, counted from 1: `EOS_ID` where a marker ends the sequence, else 1 to 65535."""
        marker = self._markers.get(position)
        if marker is not None and marker.kind == "end":
            return EOS_ID
        digest = self._hash.copy()
        digest.update(str(position).encode())
        return 1 + int.from_bytes(digest.digest()[:8], "big") % (VOCABULARY - 1)


def alternatives(token_id: int, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens beside a drawn one, as if drawn from a distribution, and their logprobs.

    The token itself comes first, with probability 1/2; the next id with 1/4, and so on around the vocabulary, half as
    much each time.
    """
    return [
        (token_id if rank == 0 else 1 + (token_id - 1 + rank) % (VOCABULARY - 1), -(rank + 1) * math.log(2))
        for rank in range(count)
    ]


def markers(prompt: str) -> dict[int, Marker]:
    """The markers in a prompt, by position; the first one counts where several name the same position.

    What only looks like a marker (an exit code above 255, position 0) is plain text.
    """
    found: dict[int, Marker] = {}
    for match in _MARKER.finditer(prompt):
        code, kind = match["code"], match["kind"]
        if code is not None and int(code) <= 255:
            found.setdefault(int(match["position"]), Marker("exit", int(code)))
        elif kind is not None:
            found.setdefault(int(match["position"]), Marker(kind))  # type: ignore[arg-type]
    return found


def token_text(token_id: int) -> str:
    """Text of a token: a space and a word of five letters, another one for each id; "" for `EOS_ID`.

    The word is the id as a proquint (D. Wilkerson, "A Proposal for Proquints", 2009, arXiv:0901.4016): sixteen bits
    as consonant, vowel, consonant, vowel, consonant.
    """
    if token_id == EOS_ID:
        return ""
    return " " + "".join(
        (
            _CONSONANTS[token_id >> 12 & 15],
            _VOWELS[token_id >> 10 & 3],
            _CONSONANTS[token_id >> 6 & 15],
            _VOWELS[token_id >> 4 & 3],
            _CONSONANTS[token_id & 15],
        )
    )


def completion_ids(prompt: str, seed: int, max_tokens: int) -> list[int]:
    """The token ids that the simulated engine gives for a prompt, up to and with an end-of-sequence token.

    Markers that kill, fail or hang are passed over: these are the tokens that would come if they were survived.
    """
    draws = Draws(prompt, seed)
    ids: list[int] = []
    for position in range(1, max_tokens + 1):
        ids.append(draws.token_id(position))
        if ids[-1] == EOS_ID:
            break
    return ids


def completion(prompt: str, seed: int, max_tokens: int) -> str:
    """The text that belongs to `completion_ids`."""
    return "".join(map(token_text, completion_ids(prompt, seed, max_tokens)))


def prompt_ids(prompt: str) -> list[int]:
    """Token ids of a prompt: one for each piece between white space, at least one. Only their number means anything."""
    return [Draws(piece, 0).token_id(1) for piece in prompt.split()] or [1]
