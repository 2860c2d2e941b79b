"""From logits to tokens: biases, penalties, grammar, temperature, top-k, top-p, min-p, and a draw that can be repeated.

The steps are those of transformers' logits processors and warpers, in its order: logit_bias (its sequence_bias),
repetition_penalty, then OpenAI's frequency_penalty and presence_penalty, which vLLM puts at this place too, the
grammar's mask, temperature, top_k, top_p, min_p. Every row is computed as if it were alone, so that batch mates change
nothing. docs/sampling.md says it for users.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch

from tasks.job_request import SamplingParams
from worker.engines.base import SequenceError
from worker.engines.grammar import Grammar

#: How many of the likeliest tokens are sorted, try after try, in the search for the nucleus of top-p.
NUCLEUS_TRIES = (64, 1024, 8192)

_NEVER = -math.inf


def uniform(seed: int, number: int) -> float:
    """The random number in [0, 1) for token `number` (counted from 1) of the sequence with this seed.

    Counter-based: BLAKE2b (RFC 7693) over seed modulo 2**64 and number, both little-endian 64-bit, personalised with
    "carpool-draw-1"; of a digest of 8 bytes, read as little-endian, the upper 53 bits. So a draw depends on nothing
    else, and the next worker draws what this one would have drawn. Fixed for ever.
    """
    key = struct.pack("<QQ", seed % 2**64, number)
    digest = hashlib.blake2b(key, digest_size=8, person=b"carpool-draw-1").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class SequenceSampling:
    """How the tokens of one sequence are drawn, with the token counts that its penalties need.

    Args:
        prompt_ids, output_ids: tokens so far. repetition_penalty looks at which tokens occur in either, as transformers
            and vLLM do; presence and frequency penalty at those of the output alone, as OpenAI and vLLM do.
        vocab_size: number of logits.
        grammar: what the text has to follow, behind output_ids; None where it is free.

    Raises:
        SequenceError: a token of logit_bias that the model does not have.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.seed = seed
        self._seen: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if params.repetition_penalty != 1:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor([*prompt_ids, *output_ids], device=device)] = True
        if params.presence_penalty or params.frequency_penalty:
            ids = torch.tensor(list(output_ids), dtype=torch.long, device=device)
            self._counts = torch.bincount(ids, minlength=vocab_size).to(torch.float32)
        if params.logit_bias:
            self._bias = _bias(params.logit_bias, vocab_size, device)

    @property
    def shapes_logits(self) -> bool:
        """Whether `shape` does anything."""
        return self._seen is not None or self._counts is not None or self._bias is not None

    def shape(self, logits: torch.Tensor) -> None:
        """Apply biases and penalties, in place, to logits of shape [vocab_size].

        With c the number of times that a token is in the output, its logit falls by
        `c * frequency_penalty + (c > 0) * presence_penalty`.
        """
        params = self.params
        if self._bias is not None:
            ids, values = self._bias
            logits.index_add_(0, ids, values)
        if self._seen is not None:
            penalty = params.repetition_penalty
            logits.copy_(torch.where(self._seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits))
        if self._counts is not None:
            logits.sub_(self._counts, alpha=params.frequency_penalty)
            logits.sub_((self._counts > 0).float(), alpha=params.presence_penalty)

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow the tokens so far."""
        return self.grammar is not None and self.grammar.is_complete

    @property
    def failure(self) -> SequenceError | None:
        """Why the grammar has no next token; None where it is not the grammar."""
        return self.grammar.failure if self.grammar is not None else None

    def record(self, token_id: int) -> None:
        """Count a new token."""
        if self.grammar is not None:
            self.grammar.advance((token_id,))
        if self._seen is not None:
            self._seen[token_id] = True
        if self._counts is not None:
            self._counts[token_id] += 1


def sample(logits: torch.Tensor, samplings: Sequence[SequenceSampling], numbers: Sequence[int]) -> list[int | None]:
    """The next token of each sequence; None where no logit is finite, be it the model's deed or the grammar's
    (`SequenceSampling.failure`). One transfer from the device.

    Args:
        logits: shape [num_sequences, vocab_size]; may be changed.
        numbers: number of the token that is drawn, per sequence, counted from 1.
    """
    best, ids = choose(logits, samplings, numbers)
    # float64 holds every token id, so that one transfer is enough.
    pairs: list[list[float]] = torch.stack((best.double(), ids.double()), dim=1).tolist()
    return [int(token_id) if math.isfinite(score) else None for score, token_id in pairs]


def choose(
    logits: torch.Tensor, samplings: Sequence[SequenceSampling], numbers: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample`, on the device: the best score of each sequence, which is not finite where there is no next token, and
    the id of its next token. Both of shape [num_sequences].
    """
    logits = logits.float()
    for row, sampling in enumerate(samplings):
        if sampling.shapes_logits:
            sampling.shape(logits[row])
    grammars = {row: sampling.grammar for row, sampling in enumerate(samplings) if sampling.grammar is not None}
    if grammars:
        forbid(logits, list(grammars), [grammar.mask() for grammar in grammars.values()])
    best, ids = logits.max(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.params.temperature > 0]
    if drawn:
        params = [samplings[row].params for row in drawn]
        points = [uniform(samplings[row].seed, numbers[row]) for row in drawn]
        scores = warp(logits if len(drawn) == len(samplings) else logits[drawn], params)
        ids[drawn] = draw(scores, torch.tensor(points, dtype=torch.float64, device=logits.device))
    return best, ids


def forbid(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[bytes]) -> None:
    """Set logits, of shape [num_sequences, vocab_size], to -inf at the tokens that the row's mask does not allow.

    Args:
        masks: of each of the rows, a bit per token, the lowest bit of the first byte for token 0.
    """
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).to(logits.device).view(len(masks), -1)
    # To look up eight bits at a time is many times as fast as to shift all of them out.
    bytes_, bits = (torch.arange(count, device=logits.device) for count in (256, 8))
    forbidden_by_byte = (bytes_[:, None] >> bits & 1) == 0
    forbidden = forbidden_by_byte[packed.int()].flatten(1)[:, : logits.shape[-1]]
    if len(rows) == len(logits):
        logits.masked_fill_(forbidden, _NEVER)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, _NEVER)


def warp(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p: a new tensor of the same shape, -inf at tokens that are out."""
    device = logits.device
    temperatures = torch.tensor([[one.temperature] for one in params], device=device)
    # Less the maximum, which changes no probability: a tiny temperature must not overflow.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures
    vocab_size = scores.shape[-1]
    num_kept = [one.top_k if 0 < one.top_k < vocab_size else vocab_size for one in params]
    _keep_top_k(scores, num_kept)
    _keep_nucleus(scores, [one.top_p for one in params])
    if any(one.min_p for one in params):
        least = [[math.log(one.min_p) if one.min_p else _NEVER] for one in params]
        top = scores.amax(dim=-1, keepdim=True)
        scores.masked_fill_(scores < top + torch.tensor(least, device=device), _NEVER)
    return scores


def draw(scores: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Token ids, shape [n], for points in [0, 1), by the inverse of the distribution function.

    The function is summed in the order of token ids, not of probabilities: so where two machines differ in the last
    digit, the interval of each token moves by as little, and two tokens that are nearly as likely don't change places.
    In float64, since a vocabulary has 10**5 summands.
    """
    distribution = torch.softmax(scores, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total = distribution[:, -1:]
    # Below the total in spite of rounding: what is found is then a token that can occur.
    targets = torch.minimum(points[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(distribution, targets, right=True)[:, 0].clamp_(max=scores.shape[-1] - 1)


def _keep_top_k(scores: torch.Tensor, num_kept: Sequence[int]) -> None:
    vocab_size = scores.shape[-1]
    limited = [k for k in num_kept if k < vocab_size]
    if not limited:
        return
    top = scores.topk(max(limited), dim=-1).values
    ranks = torch.tensor([[min(k, max(limited)) - 1] for k in num_kept], device=scores.device)
    least = top.gather(1, ranks)
    unlimited = [row for row, k in enumerate(num_kept) if k == vocab_size]
    least[unlimited] = _NEVER
    scores.masked_fill_(scores < least, _NEVER)


def _keep_nucleus(scores: torch.Tensor, top_p: Sequence[float]) -> None:
    """Keep the likeliest tokens up to the one that reaches the mass `top_p`, with that one and its equals."""
    rows = [row for row, p in enumerate(top_p) if p < 1]
    if not rows:
        return
    chosen = scores[rows]
    probabilities = torch.softmax(chosen, dim=-1)
    masses = torch.tensor([[top_p[row]] for row in rows], dtype=torch.float64, device=scores.device)
    top, before = _ranked(probabilities, masses)
    num_kept = (before < masses).sum(dim=-1, keepdim=True)
    least = top.gather(1, num_kept.clamp_(min=1) - 1)
    scores[rows] = chosen.masked_fill(probabilities < least, _NEVER)


def _ranked(probabilities: torch.Tensor, masses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens' probabilities in falling order, enough to reach the masses, and the sum before each.

    Sorting a whole vocabulary takes many times as long as finding its likeliest few, which nearly always are enough.
    """
    vocab_size = probabilities.shape[-1]
    for num_top in (*NUCLEUS_TRIES, vocab_size):
        top = probabilities.topk(min(num_top, vocab_size), dim=-1).values
        sums = top.cumsum(dim=-1, dtype=torch.float64)
        if num_top >= vocab_size or bool((sums[:, -1:] >= masses).all()):
            break
    return top, sums - top


def _bias(logit_bias: dict[str, float], vocab_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [int(token) for token in logit_bias]
    if max(ids) >= vocab_size:
        raise SequenceError(
            "invalid_request", f"logit_bias names token {max(ids)}; the model's tokens are 0 to {vocab_size - 1}"
        )
    return torch.tensor(ids, device=device), torch.tensor(list(logit_bias.values()), dtype=torch.float32, device=device)
