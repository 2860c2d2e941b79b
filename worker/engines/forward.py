"""One forward pass for a whole step: decoding tokens and chunks of prompts, laid out flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from worker.engines.attention import BatchLayout, ChunkLayout
from worker.engines.kv_cache import SlotCache


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one prompt.

    Attributes:
        row: row of the KV cache.
        start: position of the first token; the tokens before it are in the cache.
        token_ids: at least one.
        ends_prompt: whether logits behind the last token are wanted.
    """

    row: int
    start: int
    token_ids: Sequence[int]
    ends_prompt: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of tokens that the model takes."""
    return _num_rows(model.get_input_embeddings())


def num_logits(model: PreTrainedModel) -> int:
    """Number of tokens that the model gives logits for."""
    return _num_rows(model.get_output_embeddings())  # type: ignore[no-untyped-call]


def _num_rows(embeddings: torch.nn.Module) -> int:
    weight = embeddings.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


class ForwardPass:
    """The model over the rows of a KV cache."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        self._model = model
        self._cache = cache
        self._device = model.device
        self._dtype = model.dtype

    def run(self, token_ids: Sequence[int], positions: Sequence[int], chunks: Sequence[Chunk] = ()) -> torch.Tensor:
        """Logits behind the given tokens.

        Args:
            token_ids, positions: the newest token of row 0, 1, ... and where it stands.
            chunks: go along, each in a row of its own behind those of `token_ids`. There must be a token at all.

        Returns:
            Shape [len(token_ids), vocab_size], with one row more for each chunk that ends its prompt, in their order.
        """
        num_decoding = len(token_ids)
        all_ids, rows, all_positions = [*token_ids], [*range(num_decoding)], [*positions]
        wanted = [*range(num_decoding)]
        for chunk in chunks:
            all_ids += chunk.token_ids
            rows += [chunk.row] * len(chunk.token_ids)
            all_positions += range(chunk.start, chunk.end)
            if chunk.ends_prompt:
                wanted.append(len(all_ids) - 1)
        num_tokens = len(all_ids)
        # One tensor, so that it is one transfer.
        table = torch.tensor([*all_ids, *rows, *all_positions, *wanted], device=self._device)
        flat_positions = table[2 * num_tokens : 3 * num_tokens]
        self._cache.place(table[num_tokens : 2 * num_tokens], flat_positions)
        # As transformers takes it: indices, or how many at the end (0: all). Where none is wanted, one is the least.
        logits_to_keep = 0 if len(wanted) == num_tokens else table[3 * num_tokens :] if wanted else 1
        output = self._model(
            input_ids=table[None, :num_tokens],
            position_ids=flat_positions[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            layout=self._layout(flat_positions, positions, chunks),
        )
        logits: torch.Tensor = output.logits[0, : len(wanted)]
        return logits

    def _layout(self, flat_positions: torch.Tensor, positions: Sequence[int], chunks: Sequence[Chunk]) -> BatchLayout:
        num_decoding = len(positions)
        decode_length = max(positions, default=-1) + 1
        decode_mask = None
        if any(position + 1 < decode_length for position in positions):
            decode_mask = self._mask(flat_positions[:num_decoding], decode_length)[:, None, None]
        layouts = []
        first = num_decoding
        for chunk in chunks:
            behind = first + len(chunk.token_ids)
            mask = self._mask(flat_positions[first:behind], chunk.end) if chunk.start > 0 else None
            layouts.append(ChunkLayout(len(chunk.token_ids), chunk.row, chunk.end, mask))
            first = behind
        return BatchLayout(num_decoding, decode_length, decode_mask, tuple(layouts))

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Shape [len(positions), length]: 0 up to each position, -inf behind it; made once for all layers."""
        behind = torch.arange(length, device=self._device) > positions[:, None]
        mask = torch.zeros(behind.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(behind, float("-inf"))
