"""Tokens become text with whole characters, and the same tokens are cut into the same pieces every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from worker.detokenizer import MAX_HELD_TOKENS, Detokenizer

Decode = Callable[[Sequence[int]], str]

#: Leading spaces, newlines, CJK, emoji with joiners and modifiers, a flag, combining marks: one to four bytes each.
ALPHABET = " \n\tabéß世界漢😀🚗\u200d🏽🇩🇪\u0301\u2028"
BYTES_FROM = 1000
SPECIAL = 999


def printable() -> dict[int, str]:
    """The stand-ins that byte-level vocabularies use for bytes (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(rest)}


def byte_level(pieces: Sequence[bytes]) -> Decode:
    """The real decoder of GPT-2, Llama 3 and SmolLM; token i has the bytes `pieces[i]`, `SPECIAL` is left out."""
    table, decoder = printable(), decoders.ByteLevel()
    tokens = ["".join(table[byte] for byte in piece) for piece in pieces]
    return lambda ids: decoder.decode([tokens[id] for id in ids if id != SPECIAL])


def sentence_piece(words: Sequence[str]) -> Decode:
    """The real decoder of Llama 2 and Mistral: token i is `words[i]`, token `BYTES_FROM` + b the byte b."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    def decode(ids: Sequence[int]) -> str:
        return decoder.decode(
            [words[id] if id < SPECIAL else f"<0x{id - BYTES_FROM:02X}>" for id in ids if id != SPECIAL]
        )

    return decode


def as_bytes(text: str) -> list[int]:
    return [BYTES_FROM + byte for byte in text.encode()]


def feed_all(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [detokenizer.feed(id) for id in ids]


@given(text=st.text(alphabet=ALPHABET, max_size=40), cuts=st.lists(st.integers(1, 6), min_size=1, max_size=200))
def test_text_cut_anywhere_into_byte_tokens_comes_out_whole(text: str, cuts: list[int]) -> None:
    data = text.encode()
    pieces: list[bytes] = []
    while data:
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(data[:size])
        data = data[size:]
    detokenizer = Detokenizer(byte_level(pieces), [])

    released = feed_all(detokenizer, range(len(pieces)))

    assert "\ufffd" not in "".join(released)
    assert "".join(released) + detokenizer.flush() == text


def test_a_long_run_of_tokens_that_all_end_within_a_character_comes_out_whole_and_before_its_end() -> None:
    text = "😀" * 40
    data = text.encode()
    pieces = [data[:1], *(data[at : at + 4] for at in range(1, len(data), 4))]

    released = feed_all(Detokenizer(byte_level(pieces), []), range(len(pieces)))

    assert "".join(released) == text
    assert released[MAX_HELD_TOKENS - 1] != ""


@given(parts=st.lists(st.one_of(st.integers(0, 3), st.sampled_from(ALPHABET.replace(" ", ""))), max_size=40))
def test_words_and_fallback_bytes_of_sentence_piece_keep_their_spaces(parts: list[int | str]) -> None:
    words = ["▁world", "▁", "ing", "▁世界"]
    ids = [id for part in parts for id in ([part] if isinstance(part, int) else as_bytes(part))]
    expected = "".join(words[part].replace("▁", " ") if isinstance(part, int) else part for part in parts)
    detokenizer = Detokenizer(sentence_piece([*words, "▁Hello"]), [SPECIAL, 4])

    assert "".join(feed_all(detokenizer, ids)) + detokenizer.flush() == expected


@pytest.mark.parametrize("emoji", ["😀", "👩\u200d🚀", "🇩🇪", "👍🏽"])
def test_an_emoji_of_several_tokens_appears_with_the_token_that_completes_a_character(emoji: str) -> None:
    pieces = [bytes([byte]) for byte in emoji.encode()]

    released = feed_all(Detokenizer(byte_level(pieces), []), range(len(pieces)))

    assert [text for text in released if text] == list(emoji)
    assert released[-1] == emoji[-1]


def test_a_prompt_that_ends_in_fallback_bytes_does_not_break_the_bytes_behind_it() -> None:
    detokenizer = Detokenizer(sentence_piece([]), as_bytes("漢世界"))

    assert "".join(feed_all(detokenizer, as_bytes("😀漢"))) == "😀漢"


def test_a_special_token_has_no_text_and_costs_the_next_word_no_space() -> None:
    detokenizer = Detokenizer(sentence_piece(["▁Hello", "▁world"]), [0])

    assert feed_all(detokenizer, [SPECIAL, 1, SPECIAL, SPECIAL, 1]) == ["", " world", "", "", " world"]


def test_a_replacement_character_that_the_model_means_comes_out_with_the_next_token() -> None:
    pieces = ["\ufffd".encode(), b" x"]

    assert feed_all(Detokenizer(byte_level(pieces), []), [0, 1]) == ["", "\ufffd x"]


def test_bytes_that_never_become_a_character_are_held_for_a_bounded_number_of_tokens() -> None:
    pieces = [b"\xff", b" ok"]
    detokenizer = Detokenizer(byte_level(pieces), [1])

    released = feed_all(detokenizer, [0] * MAX_HELD_TOKENS + [1])

    assert released == [""] * (MAX_HELD_TOKENS - 1) + ["\ufffd" * MAX_HELD_TOKENS, " ok"]


def test_fallback_bytes_that_broke_do_not_break_the_characters_behind_them() -> None:
    detokenizer = Detokenizer(sentence_piece(["▁Hi"]), [0])

    feed_all(detokenizer, [BYTES_FROM + 0xFF] * MAX_HELD_TOKENS)

    assert "".join(feed_all(detokenizer, as_bytes("世"))) == "世"


def test_half_a_character_at_the_end_is_flushed_once() -> None:
    detokenizer = Detokenizer(byte_level(["é".encode()[:1]]), [])

    assert detokenizer.feed(0) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_the_window_stays_small_however_long_the_sequence_is() -> None:
    longest = 0
    inner = byte_level([b" a", "😀".encode()[:3], "😀".encode()[3:] + "😀".encode()[:3]])

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return inner(ids)

    detokenizer = Detokenizer(decode, [0] * 100)
    feed_all(detokenizer, [0] * 100 + [1] + [2] * 500)

    assert longest <= 3 * MAX_HELD_TOKENS
