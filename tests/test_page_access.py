"""The page where the API asks for keys: it asks for one, keeps it as it is told to, and puts it into no address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from playwright.sync_api import Browser, Page, expect

from tests.api_keys import Holder, make_key, revoke
from tests.api_server import ApiServer, running_api, until
from tests.browser import visiting
from tests.playground import Playground, chat_answer
from tests.service import Service

REFUSED = ["status of 401"]


@pytest.fixture
def service(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(redis_url, tmp_path_factory.mktemp("access"), simulated_step_ms=30) as service:
        service.worker()
        yield service


@pytest.fixture
def holder(redis_client: redis.Redis, service: Service) -> Holder:
    return make_key(redis_client, "page")


@pytest.fixture
def api(service: Service, holder: Holder) -> Iterator[ApiServer]:
    with running_api(service.settings) as api, api.client() as client:
        until(lambda: client.get("/jobs").status_code == 401)
        yield api


def give(page: Page, secret: str, *, keep: bool = False) -> None:
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    expect(dialog.get_by_label("Key", exact=True)).to_be_focused()
    dialog.get_by_label("Key", exact=True).fill(secret)
    if keep:
        dialog.get_by_role("checkbox").check()
    dialog.get_by_role("button", name="Use it").click()


def test_a_key_is_asked_for_and_then_everything_works(chromium: Browser, api: ApiServer, holder: Holder) -> None:
    with visiting(chromium, api.url, expected=REFUSED) as visitor:
        addresses: list[str] = []
        visitor.context.on("request", lambda request: addresses.append(request.url))
        page = Playground.of(visitor)
        give(page.page, "cpk_no-such-key")
        expect(page.page.get_by_text("The key is not good")).to_be_visible()
        give(page.page, f"  {holder.secret} ")
        expect(page.page.get_by_role("dialog")).to_have_count(0)
        expect(page.batch.get_by_text("worker-1")).to_be_visible()
        page.set(max_tokens=5, seed=31)
        page.send("With a key")
        page.wait_for_status("succeeded")
        expect(page.words).to_have_text(chat_answer("With a key", 31, 5))
        expect(page.jobs.get_by_text("With a key")).to_be_visible()
        page.page.get_by_text("The same as code").click()
        for language in ("curl", "Python", "Job"):
            page.page.get_by_role("radio", name=language).check()
            expect(page.page.locator("#snippet")).to_contain_text("CARPOOL_API_KEY")
            assert holder.secret not in page.page.content()
        page.page.reload()
        expect(page.words).to_have_text(chat_answer("With a key", 31, 5))
        expect(page.jobs.get_by_text("With a key")).to_be_visible()
        assert [address for address in addresses if holder.secret in address] == []
        assert holder.secret not in str(page.page.evaluate("JSON.stringify(localStorage)"))
        other = visitor.open()
        expect(other.get_by_role("dialog", name="API key")).to_be_visible()


def test_a_key_is_kept_in_the_browser_only_where_that_is_ticked_and_until_it_is_forgotten(
    chromium: Browser, api: ApiServer, holder: Holder
) -> None:
    with visiting(chromium, api.url, expected=REFUSED) as visitor:
        give(visitor.open(), holder.secret, keep=True)
        page = Playground.of(visitor)
        expect(page.batch.get_by_text("worker-1")).to_be_visible()
        page.page.get_by_role("button", name="API key").click()
        page.page.get_by_role("button", name="Forget it").click()
        expect(page.page.get_by_role("dialog", name="API key")).to_be_visible()
        for store in ("localStorage", "sessionStorage"):
            assert holder.secret not in str(page.page.evaluate(f"JSON.stringify({store})"))


def test_what_was_sent_without_a_key_is_sent_with_it(chromium: Browser, api: ApiServer, holder: Holder) -> None:
    with visiting(chromium, api.url, expected=REFUSED) as visitor:
        page = Playground.of(visitor)
        page.page.get_by_role("button", name="Cancel").click()
        expect(page.page.get_by_role("dialog")).to_have_count(0)
        page.set(max_tokens=5, seed=32)
        page.send("Let me in")
        expect(page.error).to_contain_text("API key")
        page.page.get_by_role("button", name="API key").click()
        give(page.page, holder.secret)
        page.wait_for_status("succeeded")
        expect(page.words).to_have_text(chat_answer("Let me in", 32, 5))


def test_a_key_that_is_revoked_in_mid_stream_is_asked_for_again(
    chromium: Browser, api: ApiServer, holder: Holder, redis_client: redis.Redis, service: Service
) -> None:
    spare = make_key(redis_client, "spare")
    with visiting(chromium, api.url, expected=[*REFUSED, "status of 404"]) as visitor:
        page = Playground.of(visitor)
        give(page.page, holder.secret)
        page.set(max_tokens=400, seed=33)
        page.send("For how long?")
        page.wait_for_tokens(5)
        revoke(redis_client, holder)
        expect(page.page.get_by_role("dialog", name="API key")).to_be_visible()
        id = page.job()
        give(page.page, spare.secret)
        # it is another key's job
        expect(page.error).to_contain_text(f"there is no job '{id}'")
    assert service.view(id)["status"] in ("running", "succeeded")


def test_another_key_s_riders_are_seen_and_not_told(
    chromium: Browser, api: ApiServer, holder: Holder, redis_client: redis.Redis, service: Service
) -> None:
    other = make_key(redis_client, "other")
    with api.client() as client:
        until(lambda: client.get("/jobs", headers=other.headers).status_code == 200)
        answer = client.post("/jobs", json={"prompt": "x", "max_tokens": 600}, headers=other.headers)
        id = answer.json()["id"]
    service.wait_for_token(id, 1)
    with visiting(chromium, api.url, expected=REFUSED) as visitor:
        page = Playground.of(visitor)
        give(page.page, holder.secret)
        expect(page.batch.locator(".seat.taken")).to_have_count(1)
        expect(page.jobs.get_by_text("None yet.")).to_be_visible()
        assert id not in page.page.content()
    service.cancel(id)
