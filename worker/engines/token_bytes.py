"""What each token of a vocabulary adds to a text, in bytes: a decoder's text alone can't say it of half a character."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of token ids. A token that the vocabulary lacks has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
        kinds = _decoder_kinds(tokenizer)
        self._characters = _byte_level_characters() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds or not tokenizer.is_fast
        self._has_metaspace = bool(kinds & {"Metaspace", "Replace"}) or not tokenizer.is_fast
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        if token_id >= len(self._tokenizer):
            return b""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return b""
        if self._characters is not None and all(character in self._characters for character in piece):
            return bytes(self._characters[character] for character in piece)
        if self._falls_back and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if self._has_metaspace:
            return piece.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)).encode()


def _decoder_kinds(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of the steps of a decoder of the tokenizers library; none where the tokenizer is not of it."""
    if not tokenizer.is_fast or tokenizer.backend_tokenizer.decoder is None:
        return set()
    decoder: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def _byte_level_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    As in GPT-2's `bytes_to_unicode`: printable bytes of Latin-1 stand for themselves, the others for 256 and upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
