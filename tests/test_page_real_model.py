"""The page with the bundled model behind it: the tokens of a real tokenizer, put together in the browser."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from tests.api_server import running_api
from tests.browser import visiting
from tests.playground import Playground, shown
from tests.redis_server import RedisServer
from tests.service import Service


@pytest.mark.timeout(400)
def test_a_real_chat_is_answered_as_the_api_answers_it(
    chromium: Browser, own_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("real")
    with Service(own_redis.url, folder, engine="transformers", dtype="float32", device="cpu") as service:
        service.worker(ready_s=300)
        with running_api(service.settings) as api, visiting(chromium, api.url) as visitor:
            page = Playground.of(visitor)
            page.set(max_tokens=24, temperature=0)
            page.send("Say hello in French, Japanese and with an emoji. ☂")
            page.wait_for_status("succeeded", 120)
            with api.client(timeout=120) as client:
                messages = [{"role": "user", "content": "Say hello in French, Japanese and with an emoji. ☂"}]
                body = {"messages": messages, "max_tokens": 24, "temperature": 0}
                answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]
            expect(page.words).to_have_text(shown(answer["message"]["content"]))
            assert answer["message"]["content"]
            expect(page.page.get_by_role("combobox", name="Model")).to_contain_text("SmolLM2-135M-Instruct")
