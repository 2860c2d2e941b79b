"""One forward pass for a whole step: decoding tokens and a prompt's chunk, laid out flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from worker.engines.attention import BatchLayout
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

    def run(self, token_ids: Sequence[int], positions: Sequence[int], chunk: Chunk | None) -> torch.Tensor:
        """Logits behind the given tokens.

        Args:
            token_ids, positions: the newest token of row 0, 1, ... and where it stands.
            chunk: goes along; one of both must be there. Its row is behind those of `token_ids`.

        Returns:
            Shape [len(token_ids), vocab_size], with one row more where the chunk ends its prompt.
        """
        num_decoding = len(token_ids)
        all_ids, rows, all_positions = [*token_ids], [*range(num_decoding)], [*positions]
        if chunk is not None:
            all_ids += chunk.token_ids
            rows += [chunk.row] * len(chunk.token_ids)
            all_positions += range(chunk.start, chunk.end)
        # One tensor, so that it is one transfer.
        table = torch.tensor([all_ids, rows, all_positions], device=self._device)
        self._cache.place(table[1], table[2])
        wanted = self._wanted(num_decoding, len(all_ids), chunk)
        output = self._model(
            input_ids=table[:1],
            position_ids=table[2:],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=wanted,
            layout=self._layout(table[2], positions, chunk),
        )
        num_logits = num_decoding + (chunk is not None and chunk.ends_prompt)
        logits: torch.Tensor = output.logits[0, :num_logits]
        return logits

    def _wanted(self, num_decoding: int, num_tokens: int, chunk: Chunk | None) -> int | torch.Tensor:
        """Tokens whose logits are computed, as transformers takes them: indices, or how many at the end (0: all)."""
        if chunk is None:
            return 0
        if num_decoding == 0:
            return 1
        last = [num_tokens - 1] if chunk.ends_prompt else []
        return torch.tensor([*range(num_decoding), *last], device=self._device)

    def _layout(self, all_positions: torch.Tensor, positions: Sequence[int], chunk: Chunk | None) -> BatchLayout:
        num_decoding = len(positions)
        decode_length = max(positions, default=-1) + 1
        decode_mask = chunk_mask = None
        if any(position + 1 < decode_length for position in positions):
            decode_mask = self._mask(all_positions[:num_decoding], decode_length)[:, None, None]
        if chunk is not None and chunk.start > 0:
            chunk_mask = self._mask(all_positions[num_decoding:], chunk.end)[None, None]
        return BatchLayout(
            num_decoding=num_decoding,
            decode_length=decode_length,
            decode_mask=decode_mask,
            chunk_row=chunk.row if chunk is not None else 0,
            chunk_end=chunk.end if chunk is not None else 0,
            chunk_mask=chunk_mask,
        )

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Shape [len(positions), length]: 0 up to each position, -inf behind it; made once for all layers."""
        behind = torch.arange(length, device=self._device) > positions[:, None]
        mask = torch.zeros(behind.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(behind, float("-inf"))
