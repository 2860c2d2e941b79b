"""The KV cache of a running batch: preallocated rows, each written at its own position, nothing copied per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

#: Tokens of a row, and rows, that are allocated at first; doubled whenever more are needed.
INITIAL_CAPACITY = 256
INITIAL_ROWS = 4


class SlotCache(Cache):
    """Keys and values of up to `max_rows` sequences that ride in one flat batch.

    Per layer there are two buffers of shape [num_rows, kv_heads, capacity, head_dim], made at the layer's first
    forward pass from the shapes it brings. `place` says, for each token of the next forward pass, into which row and at
    which position its keys and values go; `update` writes them there and hands out the whole buffers, of which the
    attention reads its part (`worker/engines/attention.py`).

    What lies behind a row's tokens is read and masked by attention, where a NaN would survive the mask (0 * NaN): so
    buffers start as zeros, and a row that a broken sequence has left is cleared.

    Args:
        max_rows: most sequences.
        max_length: most tokens of a row.
    """

    def __init__(self, max_rows: int, max_length: int) -> None:
        super().__init__(layers=[])
        self.max_rows = max_rows
        self.max_length = max_length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_rows = min(INITIAL_ROWS, max_rows)
        self._capacity = min(INITIAL_CAPACITY, max_length)
        self._rows = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        #: Where the tokens of this pass go in a buffer of (kv_heads, capacity), seen as one list of heads' vectors.
        self._indices: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers.values())

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for so many rows of so many tokens; what is too small is at least doubled.

        Raises:
            torch.OutOfMemoryError: the device has no room; what was there is unchanged.
        """
        if num_rows <= self._num_rows and num_tokens <= self._capacity:
            return
        if num_rows > self._num_rows:
            num_rows = min(self.max_rows, max(num_rows, 2 * self._num_rows))
        if num_tokens > self._capacity:
            num_tokens = min(self.max_length, max(num_tokens, 2 * self._capacity))
        num_rows, num_tokens = max(num_rows, self._num_rows), max(num_tokens, self._capacity)
        for layer, (keys, values) in self._layers.items():
            # A failure half way leaves larger buffers in some layers, which is harmless.
            self._layers[layer] = (_enlarged(keys, num_rows, num_tokens), _enlarged(values, num_rows, num_tokens))
        self._num_rows, self._capacity = num_rows, num_tokens

    def place(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Row and position of each token of the next forward pass: two int64 tensors of shape [num_tokens]."""
        self._rows = rows
        self._positions = positions
        self._indices.clear()

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of row `source` over row `target`."""
        for keys, values in self._layers.values():
            keys[target, :, :num_tokens] = keys[source, :, :num_tokens]
            values[target, :, :num_tokens] = values[source, :, :num_tokens]

    def clear(self, row: int, num_tokens: int) -> None:
        """Fill the first `num_tokens` tokens of a row with zeros."""
        for keys, values in self._layers.values():
            keys[row, :, :num_tokens].zero_()
            values[row, :, :num_tokens].zero_()

    def shrink(self) -> None:
        """Give memory back when nobody rides: long buffers go, short ones stay."""
        if self._capacity > 4 * INITIAL_CAPACITY:
            self._layers.clear()
            self._num_rows = min(INITIAL_ROWS, self.max_rows)
            self._capacity = min(INITIAL_CAPACITY, self.max_length)

    def buffers(
        self, like: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer, by its number.

        Args:
            like: tensors of shape [..., kv_heads, tokens, head_dim], to make those layers that are not there.
        """
        for layer, (keys, values) in (like or {}).items():
            if layer not in self._layers:
                self._layers[layer] = (self._allocated(keys), self._allocated(values))
        return dict(self._layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of a flat batch, each of shape [1, kv_heads, num_tokens, head_dim]; return the buffers."""
        buffers = self._layers.get(layer_idx)
        if buffers is None:
            buffers = self._layers[layer_idx] = (self._allocated(key_states), self._allocated(value_states))
        self._write(buffers[0], key_states)
        self._write(buffers[1], value_states)
        return buffers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: each row has a length of its own, and positions are always given."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_length

    def _allocated(self, states: torch.Tensor) -> torch.Tensor:
        num_heads, head_dim = states.shape[-3], states.shape[-1]
        return states.new_zeros((self._num_rows, num_heads, self._capacity, head_dim))

    def _write(self, buffer: torch.Tensor, states: torch.Tensor) -> None:
        _, num_heads, capacity, head_dim = buffer.shape
        index = self._indices.get((num_heads, capacity))
        if index is None:
            index = self._indices[num_heads, capacity] = self._index(num_heads, capacity)
        # One index_copy_ over a flat view takes half the time of an assignment with two index tensors.
        buffer.view(-1, head_dim).index_copy_(0, index, states.transpose(1, 2).reshape(-1, head_dim))

    def _index(self, num_heads: int, capacity: int) -> torch.Tensor:
        """Shape [num_tokens * num_heads], token by token."""
        heads = torch.arange(num_heads, device=self._rows.device)
        lists = self._rows[:, None] * num_heads + heads
        return (lists * capacity + self._positions[:, None]).view(-1)


def _enlarged(buffer: torch.Tensor, num_rows: int, capacity: int) -> torch.Tensor:
    rows, num_heads, length, head_dim = buffer.shape
    if rows >= num_rows and length >= capacity:
        return buffer
    larger = buffer.new_zeros((max(rows, num_rows), num_heads, max(length, capacity), head_dim))
    larger[:rows, :, :length] = buffer
    return larger
