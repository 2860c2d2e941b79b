"""Logprobs of a log's entries in OpenAI's two shapes; our own streams have that of a chat."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from tasks.entries import TokenLogprob, token_string


def _likely(item: TokenLogprob) -> dict[str, Any]:
    return {"token": token_string(item), "logprob": item["lp"], "bytes": item["b"]}


def token_logprobs(item: TokenLogprob) -> dict[str, Any]:
    """One token that was drawn, and those that were likeliest."""
    return {**_likely(item), "top_logprobs": [_likely(top) for top in item.get("top", ())]}


def chat_logprobs(items: Iterable[TokenLogprob]) -> dict[str, Any]:
    """As in a choice of a chat."""
    return {"content": [token_logprobs(item) for item in items], "refusal": None}


class LegacyLogprobs:
    """As in a choice of a completion, token by token: the offsets go on from one call to the next.

    Args:
        offset: where the first token begins in the choice's text, in characters: behind a prompt that is echoed.
    """

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        # a character may come in several tokens: it counts with the one that completes it
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, items: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The four lists for the next tokens. The drawn one is always among the likeliest, as with OpenAI."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for item in items:
            text = token_string(item)
            tokens.append(text)
            logprobs.append(item["lp"])
            top: dict[str, float] = {}
            for likely in (*item.get("top", ()), item):
                top.setdefault(token_string(likely), likely["lp"])
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(item["b"])))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
