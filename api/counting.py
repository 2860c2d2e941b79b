"""Counts the tokens of prompts before they are accepted, with the tokenizers that the workers publish. No torch."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import redis.asyncio
from tokenizers import Tokenizer

from tasks import keys
from tasks.codes import CarpoolError
from tasks.registry import ModelInfo

#: A prompt has at most a token per byte, and these few that a tokenizer puts around it.
_AROUND: Final = 16
_KEPT: Final = 4


class TokenCounter:
    """Refuses prompts that are known not to fit. Tokenizers work in threads of their own, never on the event loop."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="carpool-count")
        self._tokenizers: OrderedDict[str, Tokenizer] = OrderedDict()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(
        self, model: ModelInfo | None, prompts: Sequence[str], max_tokens: int | None, *, many: bool, exact: bool = True
    ) -> None:
        """Refuse what cannot fit into the model's context.

        Args:
            max_tokens: as asked for; None where the default counts, which the worker clamps to what is left.
            many: the prompts are a list in the request, so that the error names one of them.
            exact: the prompts are all that the model sees; else (the contents of a chat) the count is a lower bound.

        Raises:
            CarpoolError: "context_length_exceeded" with both numbers.
        """
        if model is None or not model.context_length:
            return
        context, wanted = model.context_length, max_tokens or 1
        if wanted < context and max(len(prompt.encode()) for prompt in prompts) + _AROUND + wanted <= context:
            return
        tokenizer = await self._tokenizer(model.card)
        counts = await self._count(tokenizer, prompts) if tokenizer is not None else [1] * len(prompts)
        for index, count in enumerate(counts):
            if count + wanted > context:
                raise _exceeded(index if many else None, count, max_tokens, context, exact and tokenizer is not None)

    async def _tokenizer(self, digest: str) -> Tokenizer | None:
        if not digest:
            return None
        if digest in self._tokenizers:
            self._tokenizers.move_to_end(digest)
            return self._tokenizers[digest]
        text = await self._client.get(keys.card(digest))
        if text is None:
            return None
        loop = asyncio.get_running_loop()
        tokenizer = await loop.run_in_executor(self._threads, _load, str(text))
        self._tokenizers[digest] = tokenizer
        while len(self._tokenizers) > _KEPT:
            self._tokenizers.popitem(last=False)
        return tokenizer

    async def _count(self, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[int]:
        def count() -> list[int]:
            return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(prompts))]

        return await asyncio.get_running_loop().run_in_executor(self._threads, count)


def _load(text: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(text)
    # both may be part of the file, and either would make a count a lie
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _exceeded(index: int | None, count: int, max_tokens: int | None, context: int, exact: bool) -> CarpoolError:
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
        ("prompt" if index is None else f"prompts[{index}]") if max_tokens is None or count >= context else "max_tokens"
    )
    return CarpoolError("context_length_exceeded", message, param=param)
