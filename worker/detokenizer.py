"""Token ids to text, one token at a time, with no broken characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"
#: Prompt tokens before the first new one that are decoded along with it.
_SEED_TOKENS: Final = 5
#: After so many tokens that end within a character, the whole characters among them come out; where there are none,
#: the bytes are garbage. A character has at most four bytes.
MAX_HELD_TOKENS: Final = 8


class Detokenizer:
    """Incremental detokenizer with a prefix window, as in Hugging Face's text-generation-inference
    (`Model.decode_token`) and vLLM (`detokenize_incrementally`).

    A token alone does not say its text: SentencePiece drops the space at the start of what it decodes, and a character
    may take several tokens. So each new token is decoded behind the tokens before it, and what is longer than their own
    text is new. Text that ends in U+FFFD may be a character cut in two and is held, for fewer than `MAX_HELD_TOKENS`
    tokens.

    What each token releases depends on the prompt's and the sequence's ids alone, never on how they were grouped into
    steps: a replay cuts the text as the first ride did.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window, self._read_text = _seed(decode, prompt_ids)
        #: Tokens of the window whose text is out already, `_read_text`.
        self._num_read = len(self._window)

    def feed(self, token_id: int) -> str:
        """Take in one token; returns the text that it releases, "" while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_held = len(self._window) - self._num_read
        if num_held == 1 and text == self._read_text:
            # A token without text, such as a special one: as the head of the window it would cost the next its space.
            self._window.pop()
            return ""
        if not text.endswith(_REPLACEMENT):
            return self._release(text)
        if num_held < MAX_HELD_TOKENS:
            return ""
        whole = text.rstrip(_REPLACEMENT)
        if len(whole) > len(self._read_text):
            released = self._release(whole)
            self._read_text = self._read_text.rstrip(_REPLACEMENT)  # The half character at the end is not out yet.
            return released
        # Garbage. Byte fallback decodes a whole run of byte tokens or none of it, so it must not stay in the window.
        released = text[len(self._read_text) :]
        del self._window[self._num_read :]
        self._read_text = self._decode(self._window)
        return released

    def flush(self) -> str:
        """The text that is held, when no more tokens will come."""
        held = self._decode(self._window)[len(self._read_text) :]
        del self._window[self._num_read :]
        self._read_text = self._decode(self._window)
        return held

    def _release(self, text: str) -> str:
        released = text[len(self._read_text) :]
        del self._window[: self._num_read]
        self._num_read = len(self._window)
        self._read_text = self._decode(self._window)
        return released


def _seed(decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> tuple[list[int], str]:
    """The last few prompt ids and their text, begun at the start of a character: one of four neighbours is."""
    for num_tokens in range(_SEED_TOKENS, _SEED_TOKENS + 4):
        window = list(prompt_ids[-num_tokens:])
        text = decode(window)
        if not text.startswith(_REPLACEMENT):
            return window, text
    window = list(prompt_ids[-_SEED_TOKENS:])
    return window, decode(window)
