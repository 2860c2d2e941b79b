"""Keys and values of how sequences began, for those that begin the same way: a system prompt, a chat's earlier turns.

The idea is automatic prefix caching as in vLLM and RadixAttention of SGLang (Zheng et al., 2024), over a store of its
own: rows of the running batch stay as they are, and blocks are copied out of them and into them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

import torch

from worker.engines.kv_cache import SlotCache

#: Only whole blocks are kept: one costs an entry in the tree, and a copy in and out.
BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class _Key:
    """A block's place in the tree: its tokens, behind a block of that name. By the tokens themselves, not by a hash of
    them: nobody can be given another's keys by a collision.
    """

    behind: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """`name` is never given twice; `place` is where it lies in the store."""

    name: int
    place: int


_ROOT: Final = _Block(-1, -1)


class PrefixCache:
    """A tree of blocks of `BLOCK_TOKENS` tokens each; the one not used for the longest time makes room for a new one.

    A block is of use only with all those before it. They are used whenever it is, and after it, so that the one to go
    is always the end of a branch.

    Args:
        max_bytes: of keys and values; less than one block keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        #: Per layer keys and values of shape [num_blocks, kv_heads, BLOCK_TOKENS, head_dim]; made by the first `store`.
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._free: list[int] = []
        #: The least recently used first.
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._names = count()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the store, used or not."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._pools.values())

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are kept."""
        return len(self._blocks) * BLOCK_TOKENS

    def match(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are kept. At least one is left to be computed."""
        return BLOCK_TOKENS * len(self._found(token_ids, len(token_ids) - 1))

    def load(self, token_ids: Sequence[int], num_tokens: int, cache: SlotCache, row: int) -> None:
        """Copy the first `num_tokens` tokens, which `match` has found, into a row that has room for them."""
        found = self._found(token_ids, num_tokens)
        buffers = cache.buffers(like=self._pools)
        places = self._places(block for _, block in found)
        for layer, (kept_keys, kept_values) in self._pools.items():
            keys, values = buffers[layer]
            _row(keys, row, len(found)).copy_(kept_keys[places].transpose(0, 1))
            _row(values, row, len(found)).copy_(kept_values[places].transpose(0, 1))
        self._use(found)

    def store(self, token_ids: Sequence[int], num_tokens: int, cache: SlotCache, row: int) -> None:
        """Keep what a row holds of the first `num_tokens` tokens: whole blocks, as many as there is room for."""
        num_wanted = num_tokens // BLOCK_TOKENS
        found = self._found(token_ids, num_tokens)
        if len(found) == num_wanted:
            return
        buffers = cache.buffers()
        if not self._pools:
            self._allocate(buffers)
        # Before room is made: what the new blocks follow must not go for them.
        self._use(found)
        num_known = len(found)
        for part in _cut(token_ids, num_known, num_wanted):
            place = self._make_room(len(found))
            if place is None:
                break
            key = _Key((found[-1][1] if found else _ROOT).name, part)
            self._blocks[key] = block = _Block(next(self._names), place)
            found.append((key, block))
        if len(found) == num_known:
            return
        self._use(found)
        places = self._places(block for _, block in found[num_known:])
        for layer, (keys, values) in buffers.items():
            kept_keys, kept_values = self._pools[layer]
            kept_keys[places] = _row(keys, row, len(found))[:, num_known:].transpose(0, 1)
            kept_values[places] = _row(values, row, len(found))[:, num_known:].transpose(0, 1)

    def _found(self, token_ids: Sequence[int], num_tokens: int) -> list[tuple[_Key, _Block]]:
        """The blocks that are kept of the first `num_tokens`, in their order."""
        found: list[tuple[_Key, _Block]] = []
        behind = _ROOT
        for part in _cut(token_ids, 0, num_tokens // BLOCK_TOKENS) if self._blocks else ():
            key = _Key(behind.name, part)
            block = self._blocks.get(key)
            if block is None:
                break
            found.append((key, block))
            behind = block
        return found

    def _use(self, found: Sequence[tuple[_Key, _Block]]) -> None:
        """The end of the branch first: it is the first to go."""
        for key, _ in reversed(found):
            self._blocks.move_to_end(key)

    def _make_room(self, num_own: int) -> int | None:
        """A free place for a block; None where all are taken by the `num_own` blocks that it is to follow."""
        if not self._free:
            if len(self._blocks) == num_own:
                return None
            self._free.append(self._blocks.popitem(last=False)[1].place)
        return self._free.pop()

    def _allocate(self, buffers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """At once, so that nothing is ever copied to a larger one; the system gives a CPU's pages as they are used."""
        num_blocks = self._max_bytes // max(1, sum(_block_bytes(one) for pair in buffers.values() for one in pair))
        with suppress(torch.OutOfMemoryError):  # those that ride need what there is: nothing is kept
            self._pools = {
                layer: (_pool(keys, num_blocks), _pool(values, num_blocks)) for layer, (keys, values) in buffers.items()
            }
            self._free = [*reversed(range(num_blocks))]

    def _places(self, blocks: Iterable[_Block]) -> torch.Tensor:
        device = next(iter(self._pools.values()))[0].device
        return torch.tensor([block.place for block in blocks], device=device)


def _cut(token_ids: Sequence[int], first: int, behind: int) -> Iterator[tuple[int, ...]]:
    """The tokens of blocks `first` up to `behind`, without it."""
    for number in range(first, behind):
        yield tuple(token_ids[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS])


def _row(buffer: torch.Tensor, row: int, num_blocks: int) -> torch.Tensor:
    """The first blocks of a row, of shape [kv_heads, num_blocks, BLOCK_TOKENS, head_dim]; not a copy."""
    _, num_heads, _, head_dim = buffer.shape
    return buffer[row, :, : num_blocks * BLOCK_TOKENS].view(num_heads, num_blocks, BLOCK_TOKENS, head_dim)


def _block_bytes(buffer: torch.Tensor) -> int:
    _, num_heads, _, head_dim = buffer.shape
    return num_heads * BLOCK_TOKENS * head_dim * buffer.element_size()


def _pool(buffer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    _, num_heads, _, head_dim = buffer.shape
    return buffer.new_empty((num_blocks, num_heads, BLOCK_TOKENS, head_dim))
