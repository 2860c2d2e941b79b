"""Logprobs of drawn tokens and of the likeliest ones: of the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tasks.job_request import MAX_LOGPROBS
from worker.engines.base import Logprob


class RawLogprobs:
    """The log-softmax of logits, taken before penalties, biases, grammar and temperature change them.

    Args:
        logits: shape [num_sequences, vocab_size].
        counts: alternatives that each sequence asks for; None where it wants no logprobs. Rows without cost nothing.
    """

    def __init__(self, logits: torch.Tensor, counts: Sequence[int | None]) -> None:
        self._counts = counts
        self._rows = [row for row, count in enumerate(counts) if count is not None]
        self._values: torch.Tensor | None = None
        if self._rows:
            wanted = logits if len(self._rows) == len(counts) else logits[self._rows]
            self._values = torch.log_softmax(wanted.float(), dim=-1)

    def of(self, token_ids: Sequence[int | None]) -> list[tuple[Logprob, ...]]:
        """Per sequence the logprob of its token, or nothing. One transfer from the device.

        Where alternatives are as likely as each other the lower id comes first. As many are looked for whatever is
        asked for, so that batch mates change nothing.
        """
        found: list[tuple[Logprob, ...]] = [()] * len(token_ids)
        if self._values is None:
            return found
        drawn = [token_ids[row] for row in self._rows]
        indices = torch.tensor([[token_id or 0] for token_id in drawn], device=self._values.device)
        top = self._values.topk(min(MAX_LOGPROBS, self._values.shape[-1]), dim=-1)
        # float64 holds every token id, so that one transfer is enough.
        table = torch.cat((self._values.gather(1, indices).double(), top.values.double(), top.indices.double()), dim=1)
        for row, token_id, (own, *rest) in zip(self._rows, drawn, table.tolist(), strict=True):
            if token_id is not None:
                values, ids = rest[: len(rest) // 2], map(int, rest[len(rest) // 2 :])
                pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
                found[row] = (Logprob(token_id, own, tuple(pairs[: self._counts[row]])),)
        return found
