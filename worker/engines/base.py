"""The interface of an engine: it turns token ids into further token ids, batch by batch, and does nothing else.

Text, stop strings, end-of-sequence and max_tokens are the Model worker's (`worker/sequence.py`), the same for every
engine. An engine does no I/O and knows nothing of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tasks.chat import Message
from tasks.job_request import SamplingParams
from worker.messages import ModelCard


class EngineError(Exception):
    """The engine cannot start; the message names the cause, the value and one thing to do."""


class SequenceError(Exception):
    """One sequence cannot ride; `code` is one of tasks.codes. The others are not touched."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class EngineSequence:
    """A sequence as an engine sees it.

    Attributes:
        prompt_ids: the prompt's tokens, at least one.
        output_ids: tokens it already has from an earlier ride; the next token is number len(output_ids) + 1.
        seed: with the number of a token, the key of that token's random draw.
        prompt: the prompt as text (after the chat template).
    """

    id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    prompt: str


def context_exceeded(num_tokens: int, context_length: int) -> SequenceError:
    """The error of a sequence whose tokens leave no room for another in the model's context."""
    return SequenceError(
        "context_length_exceeded",
        f"prompt and completion have {num_tokens} tokens and the model takes {context_length} in all, so that there is "
        "no room for another: send a shorter prompt",
    )


def check_room(sequence: EngineSequence, num_free_slots: int, max_batch_size: int, context_length: int) -> None:
    """What any engine with a context of `context_length` tokens asks of a newcomer.

    Raises:
        SequenceError: no slot is free, or the sequence has no token, or no room for another.
    """
    if num_free_slots == 0:
        raise SequenceError(
            "engine_error",
            f"sequence {sequence.id} found all {max_batch_size} slots taken: raise CARPOOL_MAX_BATCH_SIZE",
        )
    if not sequence.prompt_ids:
        raise SequenceError("invalid_request", "the prompt has no tokens: send at least one")
    num_tokens = len(sequence.prompt_ids) + len(sequence.output_ids)
    if num_tokens >= context_length:
        raise context_exceeded(num_tokens, context_length)


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a drawn token was, by the log-softmax of the model's logits before anything was done to them.

    Attributes:
        id: of the token.
        value: natural logarithm of its probability; may be -inf.
        top: the likeliest tokens and their logprobs in falling order, as many as were asked for.
    """

    id: int
    value: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Emission:
    """The outcome of one step for one sequence: new token ids (none during its prefill), or an error that ends it.

    Attributes:
        logprobs: one per id where the sequence asks for them, else none.
        is_complete: the sequence's grammar is complete with these ids: nothing can follow them.
        num_cached: with the first ids of a ride, tokens of the prompt that needed no prefill.
    """

    id: str
    ids: tuple[int, ...] = ()
    error: SequenceError | None = None
    logprobs: tuple[Logprob, ...] = ()
    is_complete: bool = False
    num_cached: int = 0


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a sequence."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the model expects before one."""

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        """Prompt text and token ids of a chat by the chat template, with the assistant's turn opened.

        Args:
            tools: function tools of OpenAI's form that the model is told of.

        Raises:
            SequenceError: "chat_template_missing" where the model has no template.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, nothing tidied up."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in UTF-8; a character may be cut in two. Of a special token its name."""


class Engine(Protocol):
    """Continuous batching over a fixed number of slots."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def add(self, sequence: EngineSequence) -> None:
        """Take a sequence into a free slot; it joins at the next step.

        Raises:
            SequenceError: this sequence cannot ride.
        """

    def abort(self, id: str) -> None:
        """Take a sequence out; its slot is free when this returns. Unknown ids are no error."""

    def step(self) -> list[Emission]:
        """One turn: at most one prefill chunk, and one decoding step of all sequences whose prefill is done."""

    def close(self) -> None:
        """Give back device memory."""


#: Reports progress of a load: a phase in plain words, and a fraction from 0 to 1 where it is known.
Report = Callable[[str, float | None], None]
