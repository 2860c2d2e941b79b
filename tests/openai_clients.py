"""OpenAI's own client against the API in a test, and what the simulated engine is to say through it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
import openai

from tests.api_server import BOUND_S, ApiServer
from tests.service import simulated_text


@contextmanager
def openai_client(api: ApiServer, **options: Any) -> Iterator[openai.OpenAI]:
    """A client of this server that tries once, unless it is told otherwise."""
    with openai.OpenAI(**{**_defaults(api), **options}) as client:
        yield client


def async_client(api: ApiServer) -> openai.AsyncOpenAI:
    """The same for asyncio; close it."""
    return openai.AsyncOpenAI(**_defaults(api))


def _defaults(api: ApiServer) -> dict[str, Any]:
    return {"base_url": f"{api.url}/v1", "api_key": "none", "max_retries": 0, "timeout": BOUND_S}


def chat_text(messages: Sequence[tuple[str, str]], seed: int, tokens: int) -> str:
    """What the simulated engine answers to (role, text) messages, computed apart from it."""
    prompt = "".join(f"{role}: {text}\n" for role, text in messages) + "assistant:"
    return simulated_text(prompt, seed, tokens)


def raw_events(response: httpx2.Response) -> list[tuple[str, str]]:
    """The (id, data) of each event of a stream that has ended, as the wire has them; "" where there is no id."""
    found = []
    for block in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id", ""), fields["data"]))
    return found


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, without its `[DONE]`, which has to be there."""
    *chunks, done = [data for _, data in raw_events(response)]
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]
