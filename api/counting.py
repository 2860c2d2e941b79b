"""Counts the tokens of prompts and chats before they are accepted, with what the workers publish. No torch."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import redis.asyncio
from tokenizers import Tokenizer

from tasks import keys
from tasks.chat import Message
from tasks.chat_template import ChatTemplate
from tasks.codes import CarpoolError
from tasks.registry import ModelInfo

P = ParamSpec("P")
T = TypeVar("T")
#: A prompt has at most a token per byte, and these few that a tokenizer puts around it.
_AROUND: Final = 16
_KEPT: Final = 4


@dataclass(frozen=True, slots=True)
class _Card:
    tokenizer: Tokenizer
    chat_template: ChatTemplate


class TokenCounter:
    """Refuses prompts that are known not to fit. Tokenizers and templates work in threads of their own, never on the
    event loop."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="carpool-count")
        self._cards: OrderedDict[str, _Card] = OrderedDict()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(
        self,
        model: ModelInfo | None,
        prompts: Sequence[str],
        max_tokens: int | None,
        *,
        many: bool,
        exact: bool = False,
    ) -> list[int] | None:
        """Refuse what cannot fit into the model's context. Without a card the worker's count decides later.

        Returns:
            Tokens of each prompt; None where they were not counted: they fit anyhow, or there is no card.

        Args:
            max_tokens: as asked for; None where the default counts, which the worker clamps to what is left.
            many: the prompts are a list in the request, so that the error names one of them.
            exact: count also what fits anyhow.

        Raises:
            CarpoolError: "context_length_exceeded" with both numbers.
        """
        if model is None or not model.context_length:
            return None
        if not exact and _fits_anyhow(prompts, max_tokens, model.context_length):
            return None
        card = await self._card(model.card)
        counts = await self._in_thread(_count, card.tokenizer, prompts) if card is not None else None
        for index, count in enumerate(counts or [1] * len(prompts)):
            if count + (max_tokens or 1) > model.context_length:
                raise _exceeded(index if many else None, count, max_tokens, model.context_length, card is not None)
        return counts

    async def check_chat(
        self,
        model: ModelInfo | None,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        *,
        exact: bool = False,
    ) -> int | None:
        """The same for a chat, whose prompt the model's template makes.

        Raises:
            CarpoolError: "context_length_exceeded" as well, "chat_template_missing", or "invalid_request" where the
                template refuses the messages.
        """
        if model is None or not model.context_length:
            return None
        card = await self._card(model.card)
        if card is None:
            await self.check(model, [""], max_tokens, many=False)
            return None
        prompt = await self._in_thread(card.chat_template.render, messages, tools)
        if not exact and _fits_anyhow([prompt], max_tokens, model.context_length):
            return None
        (count,) = await self._in_thread(_count, card.tokenizer, [prompt], add_special_tokens=False)
        if count + (max_tokens or 1) > model.context_length:
            raise _exceeded(None, count, max_tokens, model.context_length, True, "messages")
        return count

    async def _card(self, digest: str) -> _Card | None:
        if not digest:
            return None
        if digest in self._cards:
            self._cards.move_to_end(digest)
            return self._cards[digest]
        text = await self._client.get(keys.card(digest))
        if text is None:
            return None
        card = await self._in_thread(_load, str(text))
        self._cards[digest] = card
        while len(self._cards) > _KEPT:
            self._cards.popitem(last=False)
        return card

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **options))


def _fits_anyhow(prompts: Sequence[str], max_tokens: int | None, context: int) -> bool:
    """Whether no tokenizer could make too many tokens of the prompts."""
    return max(len(prompt.encode()) for prompt in prompts) + _AROUND + (max_tokens or 1) <= context


def _count(tokenizer: Tokenizer, prompts: Sequence[str], *, add_special_tokens: bool = True) -> list[int]:
    encodings = tokenizer.encode_batch_fast(list(prompts), add_special_tokens=add_special_tokens)
    return [len(encoding.ids) for encoding in encodings]


def _load(text: str) -> _Card:
    card = json.loads(text)
    tokenizer = Tokenizer.from_str(card["tokenizer"])
    # both may be part of the file, and either would make a count a lie
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _Card(tokenizer, ChatTemplate.from_json(card["chat_template"]))


def _exceeded(
    index: int | None, count: int, max_tokens: int | None, context: int, exact: bool, field: str = "prompt"
) -> CarpoolError:
    which = "the prompt" if index is None else f"prompt {index}"
    has = f"{which} has {count} tokens" if exact else f"{which} has at least {count} tokens"
    if max_tokens is None:
        message = f"{has} and the model takes {context} in all, so that there is no room for a completion. Shorten it"
    else:
        message = (
            f"{has} and max_tokens is {max_tokens}, {count + max_tokens} together, and the model takes {context} in "
            "all. Shorten the prompt or lower max_tokens"
        )
    param = (
        (field if index is None else f"prompts[{index}]") if max_tokens is None or count >= context else "max_tokens"
    )
    return CarpoolError("context_length_exceeded", message, param=param)
