"""The tokenizer of a loaded model: prompts and chats in, text out, nothing cut and nothing tidied."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    GenerationConfig,
)

from tasks.chat import Message
from tests.tiny_loads import loaded
from tests.tiny_models import (
    EOS_ID,
    SPECIAL_TOKENS,
    save_tiny_model,
    save_tokenizer,
)
from worker.engines.base import SequenceError
from worker.engines.transformers_tokenizer import TransformersTokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama") / "tiny")


def test_a_list_of_ends_in_the_generation_config_ends_sequences_and_so_does_a_single_one(tmp_path: Path) -> None:
    fast = save_tokenizer(tmp_path)
    for named, expected in ((None, {EOS_ID}), (9, {9, EOS_ID}), ([7, 8], {7, 8, EOS_ID})):
        tokenizer = TransformersTokenizer(fast, GenerationConfig(eos_token_id=named))  # type: ignore[no-untyped-call]
        assert tokenizer.eos_ids == expected


def test_a_chat_is_rendered_by_the_template_with_the_assistants_turn_opened(llama: Path) -> None:
    tokenizer = loaded(llama).tokenizer

    prompt, ids = tokenizer.encode_chat(
        [Message(role="system", content="be brief"), Message(role="user", content="hello")]
    )

    assert prompt == "<system>be brief</system><user>hello</user><assistant>"
    assert tokenizer.decode(ids) == prompt


def test_a_chat_for_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = loaded(save_tiny_model(tmp_path, chat_template=None)).tokenizer

    with pytest.raises(SequenceError, match="send a prompt instead of messages") as caught:
        tokenizer.encode_chat([Message(role="user", content="hello")])
    assert caught.value.code == "chat_template_missing"


def test_a_chat_that_the_template_refuses_is_refused_with_the_templates_words(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = loaded(save_tiny_model(tmp_path, chat_template=template)).tokenizer

    with pytest.raises(SequenceError, match="messages of user, user: roles must alternate") as caught:
        tokenizer.encode_chat([Message(role="user", content="a"), Message(role="user", content="b")])
    assert caught.value.code == "invalid_request"


def word_tokenizer() -> Tokenizer:
    words = [*SPECIAL_TOKENS, "<unk>", "do", "n't", "stop", ",", "we", "'re", "here", "."]
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """As Llama's: a space belongs to the word behind it, and the first one is dropped when decoding."""
    pieces = [*SPECIAL_TOKENS, "<unk>", "▁", "▁do", "▁stop", "▁,", "s"]
    tokenizer = Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def test_decoded_text_is_not_tidied_up_whatever_the_tokenizers_configuration_says(tmp_path: Path) -> None:
    config = GenerationConfig()  # type: ignore[no-untyped-call]
    words = save_tokenizer(tmp_path / "words", word_tokenizer(), clean_up_tokenization_spaces=True)
    pieces = save_tokenizer(tmp_path / "pieces", sentencepiece_tokenizer(), clean_up_tokenization_spaces=True)
    ids = words("do n't stop , we 're here .")["input_ids"]
    assert words.decode(ids) == "don't stop, we're here."

    assert TransformersTokenizer(words, config).decode(ids) == "do n't stop , we 're here ."
    assert TransformersTokenizer(pieces, config).decode([1, 5, 4, 6, 8, 7, 2]) == "do  stops ,"


def test_a_prompt_is_never_cut_though_the_tokenizers_file_asks_for_it(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(5)
    backend.save(str(folder / "tokenizer.json"))
    result = loaded(folder)

    assert len(result.tokenizer.encode("x y z " * 20)) > 50
    assert result.card.tokenizer_json is not None
    assert len(Tokenizer.from_str(result.card.tokenizer_json).encode("x y z " * 20).ids) > 50
