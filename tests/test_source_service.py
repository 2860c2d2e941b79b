"""The published test-suite of the source design's service, against this API: the familiar endpoints stay familiar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.api_server import running_api
from tests.redis_server import RedisServer
from tests.service import Service


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """A client of an API with one real worker and the simulated engine."""
    folder = tmp_path_factory.mktemp("source-service")
    with RedisServer(folder / "redis") as server, Service(server.url, folder) as service:
        service.worker()
        with running_api(service.settings) as api, api.client() as client:
            yield client


def test_basic_generate(client: httpx2.Client) -> None:
    response = client.post("/basic_generate", json={"prompt": "Hello, I am"})
    assert response.status_code == 200
    assert response.json()["generated_text"].startswith("Hello, I am")
    assert len(response.json()["generated_text"]) > len("Hello, I am")


def test_a_batch_of_five_prompts(client: httpx2.Client) -> None:
    prompts = ["Hello", "The sky is", "Once upon a time", "The capital of France is", "1 + 1 ="]
    response = client.post("/generate", json={"prompts": prompts})
    assert response.status_code == 200
    texts = response.json()["generated_texts"]
    assert [text[: len(prompt)] for text, prompt in zip(texts, prompts, strict=True)] == prompts


def _stream(client: httpx2.Client, prompt: str) -> list[dict[str, Any]]:
    """What the source's tests do: read lines, and parse each one that starts with `data: `."""
    with client.stream("POST", "/generate_stream", json={"prompt": prompt}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line[len("data: ") :]) for line in response.iter_lines() if line.startswith("data: ")]


def test_one_stream(client: httpx2.Client) -> None:
    events = _stream(client, "Hello, I am")
    assert all("token" in event for event in events)
    assert len({event["sequence_id"] for event in events}) == 1
    assert len([event for event in events if event["token"]]) == 20


def test_two_concurrent_streams(client: httpx2.Client) -> None:
    with ThreadPoolExecutor(2) as threads:
        streams = list(threads.map(lambda prompt: _stream(client, prompt), ["Hello", "The sky is"]))
    ids = [{event["sequence_id"] for event in events} for events in streams]
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]
    assert all(len([event for event in events if event["token"]]) == 20 for events in streams)
