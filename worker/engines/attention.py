"""Attention over the rows of a running batch: decoding sequences and chunks of prompts in one forward pass.

All tokens of a step go through the model as one flat row of shape [1, num_tokens], so that one pass over the weights
serves them all (selective batching as in Orca, chunked prefill beside decoding as in Sarathi-Serve). Only attention
has to know which token belongs to whom: that is `BatchLayout`, which the forward pass carries down to `attend`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

#: Under this name the models of transformers find `attend`.
ATTENTION_NAME = "carpool"

#: What some models do inside of attention and `attend` does not: attention sinks, soft caps, biases.
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask")


class UnsupportedAttentionError(Exception):
    """The model's attention does something that `attend` does not."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Consecutive tokens of one prompt in a flat batch.

    Attributes:
        row: of the KV cache.
        end: tokens of that row, the chunk included.
        mask: added to scores, shape [num_tokens, end]; None where the chunk is the prompt's first.
    """

    num_tokens: int
    row: int
    end: int
    mask: torch.Tensor | None = None
    _repeated: dict[int, torch.Tensor] = field(default_factory=dict)

    def repeated_mask(self, count: int) -> torch.Tensor:
        """The mask `count` times below itself, shape [count * num_tokens, end]; made once for all layers."""
        assert self.mask is not None
        if count not in self._repeated:
            self._repeated[count] = self.mask.repeat(count, 1)
        return self._repeated[count]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Which tokens of a flat batch belong to which row of the KV cache.

    The first `num_decoding` tokens are one each of rows 0, 1, ...; behind them come the chunks, one after the other.

    Attributes:
        decode_length: tokens of the longest decoding row, the new one included.
        decode_mask: added to scores, shape [num_decoding, 1, 1, decode_length]; None where all rows are that long.
    """

    num_decoding: int
    decode_length: int = 0
    decode_mask: torch.Tensor | None = None
    chunks: tuple[ChunkLayout, ...] = ()


def register() -> None:
    """Make `attend` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    layout: BatchLayout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the sense of transformers' AttentionInterface.

    Args:
        query: shape [1, heads, num_tokens, head_dim].
        key, value: the KV cache's buffers, shape [num_rows, kv_heads, capacity, head_dim].
        attention_mask: not used: `layout` has the masks.

    Returns:
        Shape [1, num_tokens, heads, head_dim], and no weights.

    Raises:
        UnsupportedAttentionError: the model asks for something else than plain attention.
    """
    unsupported = [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
    if unsupported:
        raise UnsupportedAttentionError(f"its attention needs {', '.join(unsupported)}")
    start = layout.num_decoding
    outputs = [_attend_decoding(query[:, :, :start], key, value, layout, scaling)] if start else []
    # A call for each: a prompt's keys are few or many, and padded to one length they would cost more than the calls.
    for chunk in layout.chunks:
        outputs.append(_attend_chunk(query[:, :, start : start + chunk.num_tokens], key, value, chunk, scaling))
        start += chunk.num_tokens
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _attend_decoding(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: BatchLayout, scaling: float | None
) -> torch.Tensor:
    _, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = key.shape[1]
    # The heads that share a key go in as if they were queries of one head, so that keys need not be repeated.
    grouped = query.transpose(1, 2).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = scaled_dot_product_attention(
        grouped,
        _first_rows(key, num_rows, layout.decode_length),
        _first_rows(value, num_rows, layout.decode_length),
        attn_mask=layout.decode_mask,
        scale=scaling,
    )
    return output.reshape(1, num_rows, num_heads, -1)


def _first_rows(buffer: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
    """`buffer[:num_rows, :, :length]` in one operation instead of three: this runs for every layer and step."""
    return buffer.as_strided((num_rows, buffer.shape[1], length, buffer.shape[3]), buffer.stride())


def _attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: ChunkLayout, scaling: float | None
) -> torch.Tensor:
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rows = slice(chunk.row, chunk.row + 1)
    keys, values = key[rows, :, : chunk.end], value[rows, :, : chunk.end]
    if chunk.mask is None:
        output = scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=num_heads != num_kv_heads
        )
        return output.transpose(1, 2)
    # As in decoding: keys are then read once and not once per head, which a few tokens behind many gain most from,
    # and CUDA has no fast kernel for grouped queries with a mask.
    num_shared = num_heads // num_kv_heads
    output = scaled_dot_product_attention(
        query.reshape(1, num_kv_heads, num_shared * num_tokens, head_dim),
        keys,
        values,
        attn_mask=chunk.repeated_mask(num_shared),
        scale=scaling,
    )
    return output.reshape(1, num_heads, num_tokens, -1).transpose(1, 2)
