"""Logprobs: of the model's own distribution, whatever the sampler does to it, and the bytes of every token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.test_sampler import PARAMS, random_logits, sampling
from tests.tiny_models import byte_level_tokenizer, save_tokenizer
from worker.engines.logprobs import RawLogprobs
from worker.engines.sampler import sample
from worker.engines.token_bytes import TokenBytes


def test_logprobs_are_the_log_softmax_of_the_logits_before_anything_is_done_to_them() -> None:
    logits = random_logits(len(PARAMS))
    raw = RawLogprobs(logits, [20] * len(PARAMS))
    samplings = [sampling(params, seed=row, output_ids=(3, 3, 8)) for row, params in enumerate(PARAMS)]

    token_ids = sample(logits.clone(), samplings, [4] * len(PARAMS))

    expected = logits.double().log_softmax(-1)
    for row, (token_id, (found,)) in enumerate(zip(token_ids, raw.of(token_ids), strict=True)):
        assert token_id is not None
        assert found.id == token_id
        assert found.value == pytest.approx(float(expected[row, token_id]), abs=1e-5)
        top = expected[row].topk(20)
        assert [id for id, _ in found.top] == top.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_each_row_has_what_it_asks_for_and_batch_mates_change_no_bit_of_it() -> None:
    logits = random_logits(5, seed=4)
    counts = [3, None, 0, 20, 7]
    token_ids = [11, 12, 13, None, 15]

    together = RawLogprobs(logits, counts).of(token_ids)

    assert [[len(one.top) for one in row] for row in together] == [[3], [], [0], [], [7]]
    for row, (count, token_id) in enumerate(zip(counts, token_ids, strict=True)):
        assert RawLogprobs(logits[row : row + 1], [count]).of([token_id])[0] == together[row]


def test_alternatives_that_are_as_likely_come_in_the_order_of_their_ids() -> None:
    ((found,),) = RawLogprobs(torch.zeros(1, 4), [4]).of([2])

    assert (found.id, [id for id, _ in found.top]) == (2, [0, 1, 2, 3])
    assert [found.value, *(value for _, value in found.top)] == pytest.approx([math.log(1 / 4)] * 5)


def test_a_vocabulary_smaller_than_the_alternatives_has_no_more_and_a_banned_token_is_at_minus_infinity() -> None:
    ((found,),) = RawLogprobs(torch.tensor([[0.0, -math.inf]]), [20]).of([0])

    assert found.top == ((0, 0.0), (1, -math.inf))


def test_no_row_that_asks_costs_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "log_softmax", lambda *_, **__: pytest.fail("was computed"))

    assert RawLogprobs(random_logits(2), [None, None]).of([1, 2]) == [(), ()]


def test_asking_for_logprobs_changes_no_draw() -> None:
    for row, params in enumerate(PARAMS):
        logits = random_logits(1, seed=50 + row)
        asking = params.model_copy(update={"logprobs": 20})
        without = sample(logits.clone(), [sampling(params, row)], [1])
        assert sample(logits.clone(), [sampling(asking, row)], [1]) == without


# --- bytes ----------------------------------------------------------------------------------------------------------

#: A byte that no text holds; llguidance marks special tokens with it.
LLGUIDANCES_MARK = b"\xff"
TEXT = "Grüße an alle, 世界 🚗\n\tstrangers share one car"


def sentencepiece_tokenizer() -> Tokenizer:
    pieces = ["<pad>", "<bos>", "<eos>", "<unk>", "▁", "▁car", "c", "a", "r"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(
        models.BPE({piece: id for id, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_the_bytes_of_a_texts_tokens_put_together_are_the_text(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    fast = save_tokenizer(tmp_path, make())
    found = TokenBytes(fast)

    ids = fast(TEXT, add_special_tokens=False)["input_ids"]

    assert b"".join(map(found.of, ids)).decode() == TEXT
    assert any(found.of(id).decode("utf-8", "replace") == "\ufffd" for id in ids)


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_the_bytes_of_every_token_are_those_that_llguidance_reads(
    make: Callable[[], Tokenizer], tmp_path: Path
) -> None:
    fast = save_tokenizer(tmp_path, make())
    found = TokenBytes(fast)
    reference = LLTokenizer(fast.backend_tokenizer.to_str(), eos_token=2)

    for token_id in range(3, len(fast)):
        if fast.convert_ids_to_tokens(token_id) != "<unk>" and found.of(token_id) != LLGUIDANCES_MARK:
            assert found.of(token_id) == reference.decode_bytes([token_id])


def test_a_special_token_has_its_name_and_one_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    found = TokenBytes(save_tokenizer(tmp_path))

    assert found.of(2) == b"<eos>"
    assert found.of(10_000) == b""


def test_a_vocabulary_of_whole_words_has_the_words(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, "Grüße": 3}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    assert TokenBytes(save_tokenizer(tmp_path, words)).of(3) == "Grüße".encode()
