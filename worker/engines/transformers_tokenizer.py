"""The tokenizer of a model of transformers, behind the small interface of `worker/engines/base.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from tasks.chat import Message
from tasks.chat_template import ChatTemplate
from tasks.codes import CarpoolError
from worker.engines.base import SequenceError
from worker.engines.token_bytes import TokenBytes


class TransformersTokenizer:
    """Text to ids and back.

    Args:
        generation_config: of the model; names the ids that end a sequence, beside the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = _eos_ids(tokenizer, generation_config)
        self._token_bytes = TokenBytes(tokenizer)
        self._chat_template = _chat_template(tokenizer)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's templates, if it has any."""
        return self._chat_template

    @property
    def json(self) -> str | None:
        """Content of tokenizer.json; None where the tokenizer is not of the tokenizers library."""
        if not self._tokenizer.is_fast:
            return None
        backend = self._tokenizer.backend_tokenizer
        # A file may ask for truncation or padding, which nobody who counts or prompts wants.
        backend.no_truncation()
        backend.no_padding()
        text: str = backend.to_str()
        return text

    @property
    def vocabulary(self) -> str:
        """A text that is the same for two tokenizers which give every text the same ids."""
        return self.json or str(sorted(self._tokenizer.get_vocab().items()))

    def encode(self, text: str) -> list[int]:
        # Without verbose=False a prompt longer than the tokenizer's idea of the context is warned about.
        ids: list[int] = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        return ids

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        try:
            prompt = self._chat_template.render(messages, tools)
        except CarpoolError as error:
            raise SequenceError(error.code.name, error.message) from error
        # The template has written the special tokens already.
        ids: list[int] = self._tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        return prompt, ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes.of(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    templates: str | dict[str, str] | None = tokenizer.chat_template
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if isinstance(templates, dict):
        return ChatTemplate(templates.get("default"), templates.get("tool_use"), special_tokens)
    return ChatTemplate(templates, special_tokens=special_tokens)


def _eos_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> frozenset[int]:
    named = generation_config.eos_token_id
    ids = set(named if isinstance(named, list) else [] if named is None else [named])
    # A chat model's generation config may name the base model's end of text only; vLLM takes both, too.
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(int(token_id) for token_id in ids)
