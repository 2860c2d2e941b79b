"""The engine on transformers: continuous batching over a fixed number of slots, one forward pass per step.

Each step carries one token of every sequence that decodes and a chunk of the prompts that wait: several short ones, or
the end of one and the beginning of the next. So newcomers cost the others no pass of their own, those who come together
start together, and nobody waits longer than one chunk.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tasks.settings import Settings
from worker.engines.base import Emission, EngineSequence, Logprob, Report, SequenceError, check_room, context_exceeded
from worker.engines.chunk_budget import ChunkBudget
from worker.engines.forward import Chunk, ForwardPass, num_embeddings, num_logits
from worker.engines.grammar import GrammarCompiler
from worker.engines.kv_cache import SlotCache
from worker.engines.logprobs import RawLogprobs
from worker.engines.prefix_cache import PrefixCache
from worker.engines.sampler import SequenceSampling, sample
from worker.engines.self_check import check_model
from worker.engines.threads import ThreadGovernor
from worker.engines.transformers_tokenizer import TransformersTokenizer
from worker.messages import ModelCard
from worker.model_manager import load_model

#: Share of a load's progress that is behind us when the weights are on the device.
LOADED = 0.95


@dataclass(slots=True, eq=False)
class _Ride:
    """A sequence in a slot.

    Attributes:
        token_ids: prompt and output.
        num_prompt: how many of them are the prompt.
        num_computed: how many of them have their keys and values in the cache.
        num_cached: as many were there from an earlier sequence.
        row: of the cache; None while it holds nothing of the sequence.
    """

    id: str
    token_ids: list[int]
    num_prompt: int
    sampling: SequenceSampling
    num_computed: int = 0
    num_cached: int = 0
    row: int | None = None

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt


class TransformersEngine:
    """Continuous batching of a decoder-only model.

    A sequence waits, then is prefilled in chunks in the order of arrival, then decodes. Decoding sequences have rows
    0 to n - 1 of the KV cache: where one leaves, the last takes its row. The prompts that a step takes along have the
    rows behind them, and only the last of them may go on at the next step.

    Args:
        model: on its device, with the attention of `worker/engines/attention.py`.
        card: its context_length bounds each sequence.
        prefill_chunk_tokens: most prompt tokens computed in one step.
        prefix_cache_bytes: most that is kept of sequences for others that begin the same way; 0 keeps nothing.
        governor: chooses the number of threads, on a CPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: TransformersTokenizer,
        card: ModelCard,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        prefix_cache_bytes: int = 0,
        governor: ThreadGovernor | None = None,
    ) -> None:
        self._card = card
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        self._budget = ChunkBudget(prefill_chunk_tokens)
        self._governor = governor
        self.model = model
        self._device = model.device
        self._num_embeddings = num_embeddings(model)
        self._vocab_size = num_logits(model)
        self._grammars = GrammarCompiler(lambda: tokenizer.json, self._vocab_size, tokenizer.eos_ids)
        self.cache = SlotCache(max_batch_size, card.context_length)
        self.prefixes = PrefixCache(prefix_cache_bytes)
        self._forward = ForwardPass(model, self.cache)
        #: Those that don't decode yet, in the order of arrival. The first may have a part of its prompt behind it.
        self._waiting: deque[_Ride] = deque()
        self._decoding: list[_Ride] = []

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def tokenizer(self) -> TransformersTokenizer:
        return self._tokenizer

    @property
    def num_free_slots(self) -> int:
        return self._max_batch_size - len(self._decoding) - len(self._waiting)

    @torch.inference_mode()
    def add(self, sequence: EngineSequence) -> None:
        token_ids = [*sequence.prompt_ids, *sequence.output_ids]
        check_room(sequence, self.num_free_slots, self._max_batch_size, self._card.context_length)
        if max(token_ids) >= self._num_embeddings:
            raise SequenceError(
                "invalid_request",
                f"the prompt holds token {max(token_ids)}; the model's tokens are 0 to {self._num_embeddings - 1}",
            )
        sampling = SequenceSampling(
            sequence.params,
            sequence.seed,
            sequence.prompt_ids,
            sequence.output_ids,
            self._vocab_size,
            self._device,
            self._grammars.grammar_for(sequence.params, sequence.output_ids),
        )
        self._waiting.append(_Ride(sequence.id, token_ids, len(sequence.prompt_ids), sampling))

    @torch.inference_mode()
    def abort(self, id: str) -> None:
        for ride in self._riding():
            if ride.id == id:
                # Half a prompt's logits were never looked at: there may be NaNs behind.
                self._remove(ride, is_clean=ride in self._decoding)

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        emissions = self._end_full_sequences()
        self._compact()
        self._find_prefixes()
        emissions += self._make_room()
        chunks = self._next_chunks()
        if not self._decoding and not chunks:
            return emissions
        num_sequences = len(self._decoding) + len(chunks)
        started_at = time.perf_counter()
        self._load_prefixes(chunks)
        logits = self._forward.run(
            [ride.token_ids[-1] for ride in self._decoding], [ride.num_computed for ride in self._decoding], chunks
        )
        emissions += self._advance(chunks, logits)
        self._note(num_sequences, chunks, time.perf_counter() - started_at)
        return emissions

    def close(self) -> None:
        self._waiting.clear()
        self._decoding.clear()
        del self._forward, self.cache, self.prefixes, self.model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _riding(self) -> list[_Ride]:
        return [*self._decoding, *self._waiting]

    def _end_full_sequences(self) -> list[Emission]:
        """End those whose last token fills the context: nobody should have asked for another."""
        length = self._card.context_length
        full = [ride for ride in self._decoding if len(ride.token_ids) >= length]
        return [self._fail(ride, context_exceeded(len(ride.token_ids), length)) for ride in full]

    def _find_prefixes(self) -> None:
        """Where the prompts that have not begun are to begin: behind what an earlier sequence has left."""
        for ride in self._waiting:
            if ride.row is None:
                ride.num_computed = ride.num_cached = self.prefixes.match(ride.token_ids)

    def _load_prefixes(self, chunks: Sequence[Chunk]) -> None:
        for ride, chunk in zip(self._waiting, chunks, strict=False):
            if ride.row is None and ride.num_cached:
                self.prefixes.load(ride.token_ids, ride.num_cached, self.cache, chunk.row)

    def _make_room(self) -> list[Emission]:
        """Room in the KV cache for what this step adds; where the device has none, the longest sequence ends."""
        emissions: list[Emission] = []
        while self._decoding or self._waiting:
            lengths = [len(ride.token_ids) for ride in self._decoding] + [chunk.end for chunk in self._next_chunks()]
            longest = max(lengths)
            try:
                self.cache.reserve(len(lengths), longest)
                break
            except torch.OutOfMemoryError as error:
                message = (
                    f"the device has no memory for {longest} tokens in each of {self._max_batch_size} "
                    f"slots ({str(error).splitlines()[0]}): send a shorter prompt or lower CARPOOL_MAX_BATCH_SIZE"
                )
                ride = self._riding()[lengths.index(longest)]
                emissions.append(self._fail(ride, SequenceError("engine_error", message)))
                self._compact()
        return emissions

    def _compact(self) -> None:
        """Bring decoding sequences into rows 0 to n - 1, in the order of the list, and a begun prompt behind them."""
        num_decoding = len(self._decoding)
        free = sorted(set(range(num_decoding)) - {ride.row for ride in self._decoding})
        for ride in self._decoding:
            assert ride.row is not None
            if ride.row >= num_decoding:
                target = free.pop(0)
                self.cache.move(ride.row, target, ride.num_computed)
                ride.row = target
        self._decoding.sort(key=lambda ride: ride.row or 0)
        first = self._waiting[0] if self._waiting else None
        if first is not None and first.row is not None and first.row != num_decoding:
            self.cache.move(first.row, num_decoding, first.num_computed)
            # Nobody has looked at its logits: there may be NaNs.
            self.cache.clear(first.row, first.num_computed)
            first.row = num_decoding

    def _next_chunks(self) -> list[Chunk]:
        """What the next step computes of the first of `_waiting`, one chunk each: of all but the last to the end."""
        chunks: list[Chunk] = []
        num_tokens = 0
        for ride in self._waiting:
            row = len(self._decoding) + len(chunks)
            room = self._budget.tokens(is_shared=row > 0) - num_tokens
            if room <= 0:
                break
            start = ride.num_computed
            token_ids = ride.token_ids[start : start + room]
            chunks.append(Chunk(row, start, token_ids, ends_prompt=start + len(token_ids) == len(ride.token_ids)))
            num_tokens += len(token_ids)
        return chunks

    def _advance(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> list[Emission]:
        """Draw the next tokens and note what the cache now holds."""
        num_decoding = len(self._decoding)
        for ride in self._decoding:
            ride.num_computed += 1
        unfinished: list[Emission] = []
        for chunk in chunks:
            ride = self._waiting[0]
            ride.row, ride.num_computed = chunk.row, chunk.end
            if chunk.ends_prompt:
                self._decoding.append(self._waiting.popleft())
            else:
                unfinished.append(Emission(ride.id))
        sampled = list(self._decoding)
        if not sampled:
            return unfinished
        raw_logprobs = RawLogprobs(logits, [ride.sampling.params.logprobs for ride in sampled])
        token_ids = sample(logits, [ride.sampling for ride in sampled], [ride.num_outputs + 1 for ride in sampled])
        logprobs = raw_logprobs.of(token_ids)
        emissions = [self._emit(*one) for one in zip(sampled, token_ids, logprobs, strict=True)]
        for ride in sampled[num_decoding:]:
            self._keep(ride)
        return emissions + unfinished

    def _note(self, num_sequences: int, chunks: Sequence[Chunk], seconds: float) -> None:
        """Tell those who choose threads and chunks how long the step took. One chunk alone tells them nothing."""
        if not chunks:
            self._budget.note_decoding(seconds)
            if self._governor is not None:
                self._governor.note(seconds)
        elif num_sequences > 1:
            self._budget.note_shared(sum(len(chunk.token_ids) for chunk in chunks), seconds)

    def _emit(self, ride: _Ride, token_id: int | None, logprobs: tuple[Logprob, ...]) -> Emission:
        if ride.sampling.failure is not None:
            return self._fail(ride, ride.sampling.failure)
        if token_id is None:
            message = (
                f"the model gave no finite logits for token {ride.num_outputs + 1} (dtype {self._card.dtype}): "
                "try another prompt, or set CARPOOL_DTYPE=float32"
            )
            return self._fail(ride, SequenceError("engine_error", message))
        num_cached, ride.num_cached = ride.num_cached, 0
        ride.token_ids.append(token_id)
        ride.sampling.record(token_id)
        return Emission(
            ride.id,
            (token_id,),
            logprobs=logprobs,
            is_complete=ride.sampling.is_complete,
            num_cached=min(num_cached, ride.num_prompt),
        )

    def _fail(self, ride: _Ride, error: SequenceError) -> Emission:
        self._remove(ride, is_clean=False)
        return Emission(ride.id, error=error)

    def _keep(self, ride: _Ride) -> None:
        """Keep what was computed of a sequence whose logits were looked at; one that failed has left."""
        if ride in self._decoding and ride.row is not None:
            self.prefixes.store(ride.token_ids, ride.num_computed, self.cache, ride.row)

    def _remove(self, ride: _Ride, is_clean: bool) -> None:
        if is_clean:
            self._keep(ride)
        if ride in self._decoding:
            self._decoding.remove(ride)
        else:
            self._waiting.remove(ride)
        if not is_clean and ride.row is not None:
            self.cache.clear(ride.row, ride.num_computed)
        if not self._riding():
            self.cache.shrink()


def load(settings: Settings, report: Report) -> TransformersEngine:
    """Load the model that the settings name, check that it can be batched, and warm it up.

    Args:
        report: is given phases with rising fractions from 0 to 1.

    Raises:
        EngineError: the model can't be had or can't be served.
    """
    loaded = load_model(
        settings, lambda phase, fraction: report(phase, None if fraction is None else LOADED * fraction)
    )
    report("warming up", LOADED)
    check_model(loaded.model, settings.model)
    report("warmed up", 1.0)
    return TransformersEngine(
        loaded.model,
        loaded.tokenizer,
        loaded.card,
        max_batch_size=settings.max_batch_size,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        prefix_cache_bytes=settings.prefix_cache_mb * 2**20,
        governor=_governor(loaded.model.device),
    )


def _governor(device: torch.device) -> ThreadGovernor | None:
    """None where the model is not on the CPU, or where the user has fixed the number of threads."""
    if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return ThreadGovernor(torch.get_num_threads(), torch.set_num_threads)
