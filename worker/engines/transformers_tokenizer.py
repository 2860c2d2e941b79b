"""The tokenizer of a model of transformers, behind the small interface of `worker/engines/base.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from tasks.chat import Message
from worker.engines.base import SequenceError
from worker.engines.chat_template import conversation
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

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos_ids

    @property
    def chat_template(self) -> str | None:
        """The template for messages without tools; None where the model has none."""
        template: str | dict[str, str] | None = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

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

    def encode(self, text: str) -> list[int]:
        # Without verbose=False a prompt longer than the tokenizer's idea of the context is warned about.
        ids: list[int] = self._tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]
        return ids

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        template = self._template_for(tools)
        if template is None:
            raise SequenceError(
                "chat_template_missing", "this model has no chat template: send a prompt instead of messages"
            )
        turns, shown_tools = conversation(messages, tools, template)
        try:
            prompt = self._tokenizer.apply_chat_template(
                turns, tools=shown_tools, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        # A template is foreign code; one that trips over a turn must not take the process along.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise SequenceError(
                "invalid_request", f"the model's chat template refuses messages of {roles}: {error}"
            ) from error
        # The template has written the special tokens already.
        ids: list[int] = self._tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        return str(prompt), ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._token_bytes.of(token_id)

    def _template_for(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """A model may have a template of its own for tools."""
        templates: str | dict[str, str] | None = self._tokenizer.chat_template
        if tools and isinstance(templates, dict) and "tool_use" in templates:
            return templates["tool_use"]
        return self.chat_template

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _eos_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> frozenset[int]:
    named = generation_config.eos_token_id
    ids = set(named if isinstance(named, list) else [] if named is None else [named])
    # A chat model's generation config may name the base model's end of text only; vLLM takes both, too.
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(int(token_id) for token_id in ids)
