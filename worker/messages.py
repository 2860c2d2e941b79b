"""Every message between the Model executor (parent) and the Model worker (child). They cross as pickles on two pipes.

Commands go down: Add, Abort, Accepted, Close. Updates come up: Phase, Ready, Stepped, Aborted, Failed, Broken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tasks.chat import Message
from tasks.chat_template import NO_CHAT_TEMPLATE, ChatTemplate
from tasks.entries import TokenLogprob
from tasks.job_request import SamplingParams

#: Of this file: to be raised with any change of it. A child that is started after its files were replaced by another
#: release finds that its parent has another one.
VERSION: Final = 2

# --- down -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """A sequence boards. `ids` are the tokens it already has, from an earlier ride: the child goes on behind them.

    Exactly one of `prompt` and `messages` is given.
    `params.max_tokens` is set and `seed` is the job's own.
    """

    id: str
    prompt: str | None
    messages: tuple[Message, ...] | None
    params: SamplingParams
    seed: int
    ids: tuple[int, ...] = ()
    max_tokens_is_default: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """Take a sequence out; answered by Aborted, also when the child no longer has it."""

    id: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The ledger holds everything up to step `step`; the child may run ahead of it by a bounded number of steps."""

    step: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the child: nothing that it still holds is wanted."""


Command = Add | Abort | Accepted | Close

# --- up -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    """Progress before the child is ready: `name` in plain words, `fraction` from 0 to 1 where it is known."""

    name: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a loaded model is.

    Attributes:
        fingerprint: hash over model, revision, tokenizer and engine: equal where a job can go on at its position.
        context_length: most tokens of prompt and completion together.
        tokenizer_json: content of tokenizer.json, with which the API counts; None where there is none.
        chat_template: with which it counts chats.
        memory_bytes: size of the weights on the device.
    """

    model: str
    engine: str
    device: str
    dtype: str
    fingerprint: str
    context_length: int
    tokenizer_json: str | None = None
    chat_template: ChatTemplate = NO_CHAT_TEMPLATE
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and warm: sequences may board."""

    card: ModelCard
    load_s: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step did for one sequence.

    Attributes:
        ids, texts: new tokens and the text each one released ("" while the detokenizer or the stop matcher holds it).
        lp: logprobs, one item per id, also while its text is held; empty where they were not asked for.
        finish: "stop" or "length" where the sequence ends with this step; the child has then forgotten it.
        tail: text that was still held when the sequence ended.
        prompt_tokens: set on the first delta of a ride; it may come without tokens.
        cached_tokens: with the first tokens of a ride, how many of the prompt's needed no prefill.
    """

    id: str
    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    finish: str | None = None
    tail: str = ""
    prompt_tokens: int | None = None
    lp: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stepped:
    """One turn of the step loop is over: a decoding step, a prefill chunk, or both. `step` counts from 1."""

    step: int
    deltas: tuple[Delta, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Aborted:
    """The sequence is out and its slot is free. `tail` is text that was still held; `step` the last step that ran."""

    id: str
    tail: str
    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """This one sequence failed, the others ride on. `code` is one of tasks.codes; `tail` text that was still held."""

    id: str
    code: str
    message: str
    step: int
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Broken:
    """The child cannot serve at all (no such model, no memory) and exits. The message names one thing to do."""

    message: str


Update = Phase | Ready | Stepped | Aborted | Failed | Broken
