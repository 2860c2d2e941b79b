"""What a soak asks for: random jobs by every endpoint, whose right answers can be computed."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from tasks.job_request import child_seed
from worker.simulation import completion

#: How a client asks, and how it gets its answer.
Way = Literal["stream", "poll", "basic_generate", "generate", "generate_stream"]
#: What the prompt does to the engine.
Marker = Literal["", "end", "raise", "exit", "hang"]

_TAG: Final = re.compile(r"soak (\d+) part (\d+) ")
_WAYS: Final[dict[Way, int]] = {"stream": 40, "poll": 15, "basic_generate": 15, "generate": 12, "generate_stream": 18}
_MARKERS: Final[dict[Marker, float]] = {"": 88, "end": 6, "raise": 4, "exit": 1.8, "hang": 0.2}
_WORDS: Final = ("strangers", "share", "one", "car", "Grüße", "世界", "to", "the", "end", "of", "it")


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt of a plan: one job."""

    prompt: str
    seed: int
    max_tokens: int
    marker: Marker
    marked_at: int

    def text(self, tokens: int | None = None) -> str:
        """What the simulated engine says, the first `tokens` of it."""
        return completion(self.prompt, self.seed, self.max_tokens if tokens is None else tokens)

    @property
    def kills(self) -> bool:
        """Whether the process that runs it dies of it."""
        return self.marker in ("exit", "hang")


@dataclass(frozen=True, slots=True)
class Plan:
    """One request and what its client does.

    Attributes:
        number: names the plan; the prompts hold it, so that a record leads to its plan.
        key: its Idempotency-Key, "" without one.
        resends: how often it is posted again after it was accepted, with the same key.
        cut_every: tokens between two cuts of a stream by the client, on average; 0: it cuts none.
        cancel_after: tokens after which the client cancels; None: it does not.
        leave_after_s: seconds after which the client of a request without a key goes away for good.
    """

    number: int
    way: Way
    parts: tuple[Part, ...]
    seed: int
    key: str
    resends: int = 0
    cut_every: int = 0
    cancel_after: int | None = None
    deadline_s: float | None = None
    leave_after_s: float | None = None

    @property
    def path(self) -> str:
        return "/jobs" if self.way in ("stream", "poll") else f"/{self.way}"

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"seed": self.seed, "max_tokens": self.parts[0].max_tokens}
        if self.way == "generate":
            body["prompts"] = [part.prompt for part in self.parts]
        else:
            body["prompt"] = self.parts[0].prompt
        if self.deadline_s is not None:
            body["deadline_s"] = self.deadline_s
        return body

    @property
    def headers(self) -> dict[str, str]:
        return {"Idempotency-Key": self.key} if self.key else {}


def plan_and_part_of(prompt: str) -> tuple[int, int] | None:
    """The number of the plan that a prompt belongs to, and of its part; None for a prompt that is none of ours."""
    found = _TAG.match(prompt)
    return (int(found[1]), int(found[2])) if found else None


def draw_plan(draw: random.Random, number: int, *, poison: bool = True) -> Plan:
    """The plan of this number; the same generator in the same state draws the same one.

    Args:
        poison: some prompts kill or hang the process that runs them.
    """
    (way,) = draw.choices(list(_WAYS), list(_WAYS.values()))
    seed = draw.randrange(2**53)
    max_tokens = draw.choice((1, 2, 3, 8, 20, 20, 40, 40, 80, 80, 160))
    num_parts = draw.randrange(1, 5) if way == "generate" else 1
    # a group's children have seeds of their own, also where there is only one
    seeds = [child_seed(seed, i) for i in range(num_parts)] if way == "generate" else [seed]
    parts = tuple(_draw_part(draw, number, i, own, max_tokens, poison) for i, own in enumerate(seeds))
    has_key = draw.random() < 0.85
    rare = draw.random()
    return Plan(
        number=number,
        way=way,
        parts=parts,
        seed=seed,
        key=f"soak-{draw.getrandbits(64):016x}-{number}" if has_key else "",
        resends=draw.choice((0, 0, 0, 1, 2)) if has_key else 0,
        cut_every=draw.choice((0, 3, 10, 30)),
        cancel_after=draw.randrange(0, max_tokens) if rare < 0.10 else None,
        deadline_s=draw.uniform(0.2, 4.0) if 0.10 <= rare < 0.17 else None,
        leave_after_s=draw.uniform(0.0, 1.5) if not has_key and draw.random() < 0.4 else None,
    )


def _draw_part(draw: random.Random, number: int, i: int, seed: int, max_tokens: int, poison: bool) -> Part:
    (marker,) = draw.choices(list(_MARKERS), list(_MARKERS.values()))
    marked_at = draw.randrange(1, max_tokens + 1)
    prompt = f"soak {number} part {i} {' '.join(draw.choices(_WORDS, k=draw.randrange(1, 9)))}"
    if marker in ("exit", "hang") and not poison:
        marker = ""
    if marker:
        prompt += f" [[{'exit 137' if marker == 'exit' else marker}]]@{marked_at}"
    return Part(prompt, seed, max_tokens, marker, marked_at)
