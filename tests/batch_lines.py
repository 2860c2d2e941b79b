"""Lines of batches, and what their files say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import openai
from openai.types import Batch

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
ENDED: Final = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str, body: Mapping[str, Any]) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def chat_line(i: int, *, custom_id: str = "", **fields: Any) -> str:
    """A request of 3 tokens, told apart by `i`."""
    body = {"model": "simulated", "seed": i, "max_tokens": 3, "messages": [{"role": "user", "content": f"Say {i}"}]}
    return line(custom_id or f"line-{i}", CHAT, {**body, **fields})


def submit(client: openai.OpenAI, lines: Sequence[str], endpoint: Any = CHAT, **more: Any) -> Batch:
    """Upload the lines and make a batch of them."""
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


def answers_of(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file, in order; none where there is no file."""
    text = client.files.content(file).text if file else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(answer) for answer in text.split("\n")[:-1]]


def by_custom_id(answers: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Answers by their custom_id, of which none may come twice."""
    found = {answer["custom_id"]: answer for answer in answers}
    assert len(found) == len(answers)
    return found
