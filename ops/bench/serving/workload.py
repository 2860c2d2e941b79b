"""What the clients ask, and when. Both follow from the seed alone: two sides get the same requests at the same pace."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench.serving.plan import Endpoint, Plan, usage_error

#: Common English words: with a space before it, each is one token of nearly every tokenizer.
_WORDS: Final = re.findall(
    r"\w+",
    "time people year way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city name team minute idea body back parent "
    "face level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education",
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: what every endpoint and every server is asked alike.

    Attributes:
        prompt: a text, or the messages of a chat.
    """

    number: int
    prompt: str | Sequence[Mapping[str, Any]]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a data set. `max_tokens` is None where the line does not say."""

    content: str | Sequence[Mapping[str, Any]]
    max_tokens: int | None = None


class Workload:
    """The endless row of requests of a plan; number n is the same whoever asks for it, and whenever.

    Args:
        prompts: to take in turn; made up from words where there are none.
    """

    def __init__(self, plan: Plan, prompts: Sequence[Prompt] = ()) -> None:
        self._plan = plan
        self._prompts = prompts

    def request(self, number: int) -> Request:
        """Warm-ups have numbers below 0."""
        plan = self._plan
        chance = random.Random(f"carpool-bench {plan.seed} {number}")  # noqa: S311
        drawn = chance.randint(plan.max_tokens.least, plan.max_tokens.most)
        seed = chance.randrange(2**31)
        if self._prompts:
            prompt = self._prompts[number % len(self._prompts)]
            return Request(number, prompt.content, prompt.max_tokens or drawn, seed)
        length = chance.randint(plan.prompt_tokens.least, plan.prompt_tokens.most)
        return Request(number, " ".join(chance.choices(_WORDS, k=length)), drawn, seed)


def arrivals(plan: Plan, round_number: int) -> Iterator[float]:
    """When the requests of an open loop begin, in seconds from the start of the round, without end.

    The times between them are drawn from a gamma distribution with the mean 1/rate and the shape `burstiness`: with 1
    it is the exponential one of a Poisson process.
    """
    assert plan.rate is not None
    chance = random.Random(f"carpool-bench arrivals {plan.seed} {round_number}")  # noqa: S311
    scale = 1 / (plan.rate * plan.burstiness)
    at = 0.0
    while True:
        at += chance.gammavariate(plan.burstiness, scale)
        yield at


def read_prompts(path: Path, endpoint: Endpoint) -> list[Prompt]:
    """A data set: of a `.jsonl` file each line's `prompt` or `messages`, alone or in a `body`, with its `max_tokens`;
    of any other file each line that is not blank. Raises OperationError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error(f"--prompts {path} cannot be read: {error}", "Name a text file, or a .jsonl file") from error
    is_json = path.suffix == ".jsonl"
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = [_of_line(path, number, line, endpoint) if is_json else Prompt(line) for number, line in numbered]
    if not prompts:
        raise usage_error(f"--prompts {path} holds no prompt", "Write one a line")
    return prompts


def _of_line(path: Path, number: int, line: str, endpoint: Endpoint) -> Prompt:
    where = f"--prompts {path}, line {number}"
    fix = 'Write {"prompt": "…"} or {"messages": […]}, with "max_tokens" where it matters'
    try:
        value = json.loads(line)
    except ValueError as error:
        raise usage_error(f"{where} is no JSON: {error}", fix) from error
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    if not isinstance(value, dict):
        raise usage_error(f"{where} is no object", fix)
    max_tokens = value.get("max_tokens", value.get("max_completion_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise usage_error(f"{where}: max_tokens {max_tokens!r} is no number of tokens", fix)
    prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(prompt, str) and prompt:
        return Prompt(prompt, max_tokens)
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise usage_error(f"{where} has neither a prompt nor messages", fix)
    if endpoint == "completions":
        raise usage_error(f"{where} has messages, which completions do not take", "Use --endpoint chat")
    return Prompt(messages, max_tokens)
