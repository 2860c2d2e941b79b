"""A prompt that cannot fit is refused before it is accepted, with both numbers, on every endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tasks.registry import publish_card
from tasks.settings import Settings
from tests.api_server import running_api
from tests.scripted_owner import ScriptedOwner

CONTEXT = 20


def words(count: int) -> str:
    return " ".join(["word"] * count)


@pytest.fixture
def client(redis_url: str) -> Iterator[httpx2.Client]:
    """An API whose model takes 20 tokens, of which each word is one."""
    settings = Settings(redis_url=redis_url, engine="simulated")
    tokenizer = Tokenizer(WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(5)  # as tokenizers of embedding models are published; a count must not follow it
    tokenizer.enable_padding(length=64)
    with ScriptedOwner(settings, engine="vllm", context_length=CONTEXT) as first:
        first.heartbeat()
        card = publish_card(first.client, tokenizer.to_str())
    with ScriptedOwner(settings, engine="vllm", context_length=CONTEXT, card=card) as owner:
        owner.heartbeat()
        with running_api(settings) as api, api.client() as client:
            yield client


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/jobs", {"prompt": words(15)}, "max_tokens"),
        ("/basic_generate", {"prompt": words(15)}, "max_tokens"),
        ("/generate_stream", {"prompt": words(15)}, "max_tokens"),
        ("/generate", {"prompts": ["word", words(15)]}, "max_tokens"),
        ("/generate_vllm", {"prompts": ["word", words(15)]}, "max_tokens"),
    ],
)
def test_an_explicit_max_tokens_that_does_not_fit_is_refused(
    client: httpx2.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = client.post(path, json={**body, "max_tokens": 6})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "15 tokens" in error["message"]
    assert "20 in all" in error["message"]
    assert client.get("/jobs").json()["data"] == []


def test_a_prompt_that_fills_the_context_is_refused_also_without_max_tokens(client: httpx2.Client) -> None:
    response = client.post("/jobs", json={"prompt": words(20)})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "20 tokens" in response.json()["error"]["message"]
    response = client.post("/generate", json={"prompts": ["word", words(21)]})
    assert response.json()["error"]["param"] == "prompts[1]"


def test_a_default_max_tokens_is_left_to_be_clamped(client: httpx2.Client) -> None:
    assert client.post("/jobs", json={"prompt": words(15)}).status_code == 202


def test_what_just_fits_is_accepted(client: httpx2.Client) -> None:
    assert client.post("/jobs", json={"prompt": words(15), "max_tokens": 5}).status_code == 202


def test_of_a_chat_the_contents_are_a_lower_bound(client: httpx2.Client) -> None:
    messages = [{"role": "user", "content": words(10)}, {"role": "user", "content": " " + words(10)}]
    response = client.post("/jobs", json={"messages": messages})
    assert response.status_code == 400
    assert "at least 20 tokens" in response.json()["error"]["message"]
    assert client.post("/jobs", json={"messages": messages[:1], "max_tokens": 10}).status_code == 202


def test_without_a_tokenizer_only_what_cannot_fit_by_itself_is_refused(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated")
    with (
        ScriptedOwner(settings, context_length=CONTEXT),
        running_api(settings) as api,
        api.client() as client,
    ):
        assert client.post("/jobs", json={"prompt": words(500), "max_tokens": 5}).status_code == 202
        assert client.post("/jobs", json={"prompt": "word", "max_tokens": 20}).status_code == 400


def test_with_no_model_known_nothing_is_refused(redis_url: str) -> None:
    with running_api(Settings(redis_url=redis_url, engine="simulated")) as api, api.client() as client:
        assert client.post("/jobs", json={"prompt": words(500), "max_tokens": 10**9}).status_code == 202
