"""A prompt that cannot fit is refused before it is accepted, with both numbers, on every endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tasks.chat_template import NO_CHAT_TEMPLATE, ChatTemplate
from tasks.registry import publish_card
from tasks.settings import Settings
from tests.api_server import running_api
from tests.scripted_owner import ScriptedOwner

CONTEXT = 20
#: Two tokens around each message and one behind them all.
TEMPLATE = ChatTemplate(
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ raise_exception('no such turn') }}{% endif %}"
    "? {{ message.content }} ? {% endfor %}?"
)


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
        card = publish_card(first.client, tokenizer.to_str(), TEMPLATE)
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


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/jobs", {}),
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"stream": True}),
        ("/v1/chat/completions", {"n": 2}),
    ],
    ids=["job", "chat", "stream", "several"],
)
def test_a_chat_is_counted_with_what_its_template_writes(
    client: httpx2.Client, path: str, body: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": words(8)}, {"role": "user", "content": words(6)}]  # 19 with the template
    response = client.post(path, json={"messages": messages, "max_tokens": 2, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "has 19 tokens and max_tokens is 2, 21 together" in error["message"]
    response = client.post(path, json={"messages": [*messages, messages[1]], **body})
    assert response.json()["error"]["param"] == "messages"
    assert client.get("/jobs").json()["data"] == []
    assert client.post("/jobs", json={"messages": messages, "max_tokens": 1}).status_code == 202


def test_a_chat_that_the_template_refuses_is_not_accepted(client: httpx2.Client) -> None:
    messages = [{"role": "user", "content": "word"}, {"role": "assistant", "content": "word"}]
    response = client.post("/v1/chat/completions", json={"messages": messages, "stream": True})
    assert response.status_code == 400
    assert "refuses messages of user, assistant: no such turn" in response.json()["error"]["message"]
    assert client.get("/jobs").json()["data"] == []


def test_a_chat_with_a_model_that_has_no_template_is_not_accepted(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated")
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    with ScriptedOwner(settings, context_length=CONTEXT) as first:
        first.heartbeat()
        card = publish_card(first.client, tokenizer.to_str(), NO_CHAT_TEMPLATE)
    with ScriptedOwner(settings, context_length=CONTEXT, card=card) as owner:
        owner.heartbeat()
        with running_api(settings) as api, api.client() as client:
            for stream in (False, True):
                body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
                response = client.post("/v1/chat/completions", json=body)
                assert (response.status_code, response.json()["error"]["code"]) == (400, "chat_template_missing")
            assert client.get("/jobs").json()["data"] == []


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
