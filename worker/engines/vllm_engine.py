"""The engine on vLLM: its own continuous batching, paged KV cache and prefix cache, inside the Model worker's process.

vLLM is imported by `load` and not before, since it reads its environment as it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker.engines import vllm_setup
from worker.engines.base import Emission, EngineSequence, Logprob, Report, SequenceError, check_room, context_exceeded
from worker.engines.grammar import Grammar, GrammarCompiler
from worker.engines.model_source import find_model
from worker.engines.pretrained import check_memory, files_of, fingerprint, identity_of, load_tokenizer
from worker.engines.transformers_tokenizer import TransformersTokenizer
from worker.messages import ModelCard
from worker.model_manager import choose_dtype, share_processors

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

ENGINE: Final = "vllm"
#: A sequence that warms the engine up: any tokens, and few.
_WARM_UP_IDS: Final = (1, 2, 3)
_WARM_UP_TOKENS: Final = 2


@dataclass(slots=True)
class _Ride:
    id: str
    num_tokens: int
    num_prompt: int
    num_logprobs: int | None
    grammar: Grammar | None
    is_prefilled: bool = False


class VllmEngine:
    """vLLM's engine with a fixed number of slots.

    Args:
        vocab_size: number of logits; ids below it are the model's tokens.
    """

    def __init__(
        self,
        engine: LLMEngine,
        tokenizer: TransformersTokenizer,
        card: ModelCard,
        max_batch_size: int,
        vocab_size: int,
        grammars: GrammarCompiler,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._card = card
        self._max_batch_size = max_batch_size
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._riding: dict[str, _Ride] = {}

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def tokenizer(self) -> TransformersTokenizer:
        return self._tokenizer

    @property
    def num_free_slots(self) -> int:
        return self._max_batch_size - len(self._riding)

    def add(self, sequence: EngineSequence) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        from worker.engines.vllm_sampling import extra_args

        self._check(sequence)
        grammar = self._grammars.grammar_for(sequence.params, sequence.output_ids)
        token_ids = [*sequence.prompt_ids, *sequence.output_ids]
        params = VllmParams(
            temperature=0.0,  # What is drawn is drawn by our logits processor.
            max_tokens=self._card.context_length - len(token_ids),
            # Where a text ends is the Model worker's to say, the same for every engine.
            ignore_eos=True,
            detokenize=False,
            logprobs=sequence.params.logprobs,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args(sequence),
        )
        try:
            self._engine.add_request(sequence.id, {"prompt_token_ids": token_ids}, params)
        except ValueError as error:
            raise SequenceError(
                "invalid_request", f"vLLM refuses the sequence: {error}. Change what it names"
            ) from error
        self._riding[sequence.id] = _Ride(
            sequence.id, len(token_ids), len(sequence.prompt_ids), sequence.params.logprobs, grammar
        )

    def abort(self, id: str) -> None:
        if self._riding.pop(id, None) is not None:
            self._engine.abort_request([id])

    def step(self) -> list[Emission]:
        emissions = self._end_full_sequences()
        for output in self._engine.step():
            ride = self._riding.get(output.request_id)
            if ride is not None:
                emissions.append(self._emit(ride, output))
        return emissions

    def close(self) -> None:
        self._engine.abort_request(list(self._riding))
        self._riding.clear()
        self._engine.engine_core.shutdown()

    def _check(self, sequence: EngineSequence) -> None:
        token_ids = [*sequence.prompt_ids, *sequence.output_ids]
        check_room(sequence, self.num_free_slots, self._max_batch_size, self._card.context_length)
        named = [int(token_id) for token_id in sequence.params.logit_bias]
        for what, ids in (("the prompt holds", token_ids), ("logit_bias names", named)):
            if ids and max(ids) >= self._vocab_size:
                raise SequenceError(
                    "invalid_request", f"{what} token {max(ids)}; the model's tokens are 0 to {self._vocab_size - 1}"
                )

    def _end_full_sequences(self) -> list[Emission]:
        """End those whose last token fills the context: vLLM has let go of them already."""
        full = [ride for ride in self._riding.values() if ride.num_tokens >= self._card.context_length]
        for ride in full:
            del self._riding[ride.id]
        return [Emission(ride.id, error=context_exceeded(ride.num_tokens, self._card.context_length)) for ride in full]

    def _emit(self, ride: _Ride, output: RequestOutput) -> Emission:
        completion = output.outputs[0]
        ids = tuple(completion.token_ids)
        ride.num_tokens += len(ids)
        if ride.grammar is not None and not ride.grammar.advance(ids):
            self.abort(ride.id)
            return Emission(ride.id, error=ride.grammar.failure)
        if output.finished and ride.num_tokens < self._card.context_length:
            del self._riding[ride.id]
            reason = completion.finish_reason
            return Emission(ride.id, error=SequenceError("engine_error", f"vLLM ended the sequence: {reason}"))
        logprobs = tuple(
            _logprob(token_id, {id: one.logprob for id, one in alternatives.items()}, ride.num_logprobs)
            for token_id, alternatives in zip(ids, completion.logprobs or (), strict=False)
        )
        is_complete = ride.grammar is not None and ride.grammar.is_complete
        num_cached = 0
        if ids and not ride.is_prefilled:
            ride.is_prefilled = True
            num_cached = min(output.num_cached_tokens or 0, ride.num_prompt)
        return Emission(ride.id, ids, logprobs=logprobs, is_complete=is_complete, num_cached=num_cached)

    def warm_up(self) -> None:
        """Let one sequence ride, so that nothing is left to be compiled or allocated for the first one that counts."""
        params = SamplingParams(temperature=0)
        self.add(EngineSequence("warm-up", _WARM_UP_IDS, (), params, 0, ""))
        num_tokens = 0
        while num_tokens < _WARM_UP_TOKENS:
            num_tokens += sum(len(emission.ids) for emission in self.step())
        self.abort("warm-up")


def _logprob(token_id: int, values: Mapping[int, float], count: int | None) -> Logprob:
    """The logprob of a drawn token with its alternatives; of equally likely ones the lower id comes first."""
    ranked = sorted(values.items(), key=lambda pair: (-pair[1], pair[0]))
    return Logprob(token_id, values[token_id], tuple(ranked[: count or 0]))


def load(settings: Settings, report: Report) -> VllmEngine:
    """Load the model that the settings name into vLLM, and warm it up.

    Args:
        report: is given phases with rising fractions from 0 to 1 where they are known.

    Raises:
        EngineError: vLLM is not installed, the model can't be had, or vLLM can't serve it.
    """
    vllm_setup.set_environment(settings)
    report("importing vLLM", 0.0)
    vllm_setup.check_installed()
    from vllm.v1.engine.llm_engine import LLMEngine

    from worker.engines.vllm_sampling import grammar_compiler

    device = vllm_setup.device_of(settings)
    dtype = choose_dtype(settings.dtype, device)
    share_processors(settings.workers, device)
    source = find_model(settings.model)
    folder, _ = files_of(
        source, settings, device, dtype, lambda phase, fraction: report(phase, 0.1 + 0.5 * (fraction or 0))
    )
    report("loading the tokenizer", 0.6)
    tokenizer = load_tokenizer(folder, settings)
    config = vllm_setup.config_of(vllm_setup.engine_args(settings, folder, device), settings)
    model = config.model_config
    check_memory(folder, model.hf_config, settings, device, model.dtype, model.max_model_len, copies_output_head=False)
    report("vLLM loads and compiles the model", 0.7)
    engine = vllm_setup.start(LLMEngine, config, settings)
    dtype_name = str(model.dtype).removeprefix("torch.")
    card = ModelCard(
        model=settings.pool,
        engine=ENGINE,
        device=settings.device if settings.device.startswith(f"{device.type}:") else device.type,
        dtype=dtype_name,
        fingerprint=fingerprint(identity_of(source, settings), tokenizer.vocabulary, ENGINE, dtype_name),
        context_length=model.max_model_len,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
    )
    vocab_size = model.get_vocab_size()
    grammars = grammar_compiler(str(folder), settings.revision, settings.trust_remote_code, vocab_size)
    served = VllmEngine(engine, tokenizer, card, settings.max_batch_size, vocab_size, grammars)
    report("warming up", 0.95)
    served.warm_up()
    report("warmed up", 1.0)
    return served
