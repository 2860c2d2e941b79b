"""An engine without a model: the tokens of `worker/simulation.py`, in times that the settings fix.

Sleeping is this engine's work, as matrix products are another's; it synchronises nothing. Markers in a prompt make the
process exit, a sequence fail or end, or a step hang, which is how every failure path is tested in a real child process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tasks.chat import Message
from tasks.chat_template import ChatTemplate
from tasks.settings import Settings
from worker import simulation
from worker.engines.base import Emission, EngineSequence, Logprob, Report, SequenceError
from worker.messages import ModelCard

#: The same counting as `simulation.prompt_ids`, in the format with which the API counts any model's tokens.
_TOKENIZER_JSON = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    }
)
_NO_GRAMMAR = "the simulated engine has no grammar, so {} can't be had: leave it out, or use a worker with a model"
#: Longest slice of a prefill where a step takes no time that could bound it.
PREFILL_SLICE_S = 0.02
#: A line `role: text` for each message, then the assistant's turn, opened.
_CHAT_TEMPLATE: Final = ChatTemplate(
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


class SimulatedTokenizer:
    """One token per word; the text of a token is fixed by its id."""

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({simulation.EOS_ID})

    def encode(self, text: str) -> list[int]:
        return simulation.prompt_ids(text)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        if tools:
            raise SequenceError("unsupported_field", _NO_GRAMMAR.format("tools"))
        prompt = _CHAT_TEMPLATE.render(messages)
        return prompt, simulation.prompt_ids(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(simulation.token_text, ids))

    def token_bytes(self, token_id: int) -> bytes:
        return simulation.token_text(token_id).encode()


@dataclass(slots=True)
class _Slot:
    draws: simulation.Draws
    next_position: int
    prefill_left_s: float
    num_logprobs: int | None


class SimulatedEngine:
    """Continuous batching of simulated sequences.

    Args:
        max_batch_size: slots.
        step_s: seconds that one decoding step of the whole batch takes.
        prefill_s: seconds that the prefill of one prompt takes, in slices of at most one step, one slice per turn.
    """

    def __init__(self, card: ModelCard, max_batch_size: int, step_s: float, prefill_s: float) -> None:
        self._card = card
        self._tokenizer = SimulatedTokenizer()
        self._max_batch_size = max_batch_size
        self._step_s = step_s
        self._prefill_s = prefill_s
        self._slots: dict[str, _Slot] = {}

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def tokenizer(self) -> SimulatedTokenizer:
        return self._tokenizer

    def add(self, sequence: EngineSequence) -> None:
        if len(self._slots) >= self._max_batch_size:
            raise SequenceError(
                "engine_error",
                f"sequence {sequence.id} found all {self._max_batch_size} slots taken: raise CARPOOL_MAX_BATCH_SIZE",
            )
        if sequence.params.response_format is not None:
            raise SequenceError("unsupported_field", _NO_GRAMMAR.format("response_format"))
        self._slots[sequence.id] = _Slot(
            draws=simulation.Draws(sequence.prompt, sequence.seed),
            next_position=len(sequence.output_ids) + 1,
            prefill_left_s=self._prefill_s,
            num_logprobs=sequence.params.logprobs,
        )

    def abort(self, id: str) -> None:
        self._slots.pop(id, None)

    def step(self) -> list[Emission]:
        work_s = self._prefill_slice()
        decoding = [(id, slot) for id, slot in self._slots.items() if slot.prefill_left_s <= 0]
        if decoding:
            work_s += self._step_s
        if work_s > 0:
            time.sleep(work_s)
        return [_emit(id, slot) for id, slot in decoding]

    def close(self) -> None:
        self._slots.clear()

    def _prefill_slice(self) -> float:
        """Advance the oldest unfinished prefill by one slice; returns how long that takes, in seconds."""
        for slot in self._slots.values():
            if slot.prefill_left_s > 0:
                slice_s = min(slot.prefill_left_s, self._step_s or PREFILL_SLICE_S)
                slot.prefill_left_s -= slice_s
                return slice_s
        return 0.0


def _emit(id: str, slot: _Slot) -> Emission:
    position = slot.next_position
    marker = slot.draws.marker(position)
    if marker is not None and marker.kind == "exit":
        os._exit(marker.code)
    if marker is not None and marker.kind == "hang":
        threading.Event().wait()
    if marker is not None and marker.kind == "raise":
        return Emission(id, error=SequenceError("engine_error", f"the prompt asked for an error at token {position}"))
    slot.next_position += 1
    token_id = slot.draws.token_id(position)
    if slot.num_logprobs is None:
        return Emission(id, (token_id,))
    ((_, own),) = simulation.alternatives(token_id, 1)
    top = tuple(simulation.alternatives(token_id, slot.num_logprobs))
    return Emission(id, (token_id,), logprobs=(Logprob(token_id, own, top),))


def load(settings: Settings, report: Report) -> SimulatedEngine:
    """Make the engine. There is nothing to load, so this takes no time and never fails."""
    report("starting the simulated engine", 1.0)
    card = ModelCard(
        model=settings.pool,
        engine="simulated",
        device="cpu",
        dtype="none",
        fingerprint=simulation.VERSION,
        context_length=settings.simulated_context_length,
        tokenizer_json=_TOKENIZER_JSON,
        chat_template=_CHAT_TEMPLATE,
    )
    return SimulatedEngine(
        card,
        max_batch_size=settings.max_batch_size,
        step_s=settings.simulated_step_ms / 1000,
        prefill_s=settings.simulated_prefill_ms / 1000,
    )
