"""How vLLM's engine draws Carpool's tokens: with the sampler of `worker/engines/sampler.py`, as a logits processor.

vLLM's own sampling has a generator per request that nobody can set to a position, counts a resumed sequence's tokens as
a part of its prompt, and starts a grammar at its first token. Here the draw depends on seed and number of the token,
penalties and grammar on the tokens of all rides: the next worker, of whatever engine, goes on as this one would have.

vLLM itself is asked for greedy decoding, and gets logits that leave the drawn token alone. A sequence that is greedy,
with no bias, penalty or grammar, is none of our business and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from vllm import SamplingParams as VllmParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker.engines.base import EngineSequence
from worker.engines.grammar import GrammarCompiler, grammar_text
from worker.engines.pretrained import load_tokenizer
from worker.engines.sampler import SequenceSampling, choose

#: Names in the extra arguments of vLLM's parameters.
_PARAMS: Final = "carpool_params"
_SEED: Final = "carpool_seed"
_NUM_PROMPT_TOKENS: Final = "carpool_num_prompt_tokens"


def extra_args(sequence: EngineSequence) -> dict[str, Any] | None:
    """What the processor has to know of a sequence, for `extra_args` of vLLM's parameters; None where vLLM does alone.

    Plain values, since with tensor parallelism they go to other processes.
    """
    params = sequence.params
    is_greedy = params.temperature == 0 and params.repetition_penalty == 1
    if is_greedy and not (
        params.presence_penalty or params.frequency_penalty or params.logit_bias or grammar_text(params)
    ):
        return None
    return {
        _PARAMS: params.model_dump_json(),
        _SEED: sequence.seed,
        _NUM_PROMPT_TOKENS: len(sequence.prompt_ids),
    }


@cache
def grammar_compiler(folder: str, revision: str, trust_remote_code: bool, vocab_size: int) -> GrammarCompiler:
    """The one compiler of this process, so that what the engine has compiled is there for the processor."""
    settings = Settings(model=folder, revision=revision, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(folder, settings)
    return GrammarCompiler(lambda: tokenizer.json, vocab_size, tokenizer.eos_ids)


@dataclass(slots=True)
class _Row:
    """A sequence in the batch. vLLM appends to `output_ids` as it goes; `num_counted` of them are in `sampling`."""

    sampling: SequenceSampling
    output_ids: list[int]
    first_number: int
    num_counted: int

    def catch_up(self) -> int:
        """Count what came since the last step; returns the number of the token that is next."""
        for token_id in self.output_ids[self.num_counted :]:
            self.sampling.record(token_id)
        self.num_counted = len(self.output_ids)
        return self.first_number + self.num_counted


class CarpoolSampling(LogitsProcessor):  # type: ignore[misc]  # vLLM is not where types are checked
    """Leaves of a sequence's logits the one token that Carpool's sampler has drawn."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._model_config = vllm_config.model_config
        self._device = device
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt_ids, output_ids in batch_update.added:
            self._rows.pop(index, None)
            if params.extra_args and _PARAMS in params.extra_args:
                self._rows[index] = self._row(params, prompt_ids or [], output_ids)
        for source, target, direction in batch_update.moved:
            moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if displaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows = [index for index in sorted(self._rows) if index < len(logits)]
        if not rows:
            return logits
        drawn = [self._rows[index] for index in rows]
        numbers = [row.catch_up() for row in drawn]
        best, ids = choose(logits[rows], [row.sampling for row in drawn], numbers)
        alone = torch.full((len(rows), logits.shape[-1]), -torch.inf, dtype=logits.dtype, device=logits.device)
        # Where nothing can be drawn all is -inf; the engine finds that the token which comes is none of the grammar's.
        alone.scatter_(1, ids[:, None], torch.where(best.isfinite(), 0.0, -torch.inf)[:, None].to(logits.dtype))
        logits[rows] = alone
        return logits

    def _row(self, vllm_params: VllmParams, prompt_ids: list[int], output_ids: list[int]) -> _Row:
        given: dict[str, Any] = vllm_params.extra_args or {}
        params = SamplingParams.model_validate_json(given[_PARAMS])
        num_prompt_tokens: int = given[_NUM_PROMPT_TOKENS]
        prompt, earlier = prompt_ids[:num_prompt_tokens], [*prompt_ids[num_prompt_tokens:], *output_ids]
        vocab_size = self._model_config.get_vocab_size()
        grammar = None
        if grammar_text(params) is not None:
            config = self._model_config
            compiler = grammar_compiler(
                config.tokenizer, config.tokenizer_revision or "", config.trust_remote_code, vocab_size
            )
            grammar = compiler.grammar_for(params, earlier)
        sampling = SequenceSampling(params, given[_SEED], prompt, earlier, vocab_size, self._device, grammar)
        return _Row(sampling, output_ids, len(prompt_ids) - num_prompt_tokens + 1, len(output_ids))
