"""The page at `/` in a real browser: sending, following, stopping, what is shown and what is asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.api_server import ApiServer, running_api
from tests.browser import Visitor, visiting
from tests.openai_clients import chat_text
from tests.playground import AWAY, Playground, chat_answer, shown
from tests.redis_server import RedisServer
from tests.service import Service, simulated_text

STEP_MS = 25


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("page")
    with (
        RedisServer(folder / "redis") as server,
        Service(server.url, folder, simulated_step_ms=STEP_MS) as service,
    ):
        service.worker()
        yield service


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


@pytest.fixture
def visitor(chromium: Browser, api: ApiServer) -> Iterator[Visitor]:
    with visiting(chromium, api.url) as visitor:
        yield visitor


@pytest.fixture
def page(visitor: Visitor) -> Playground:
    return Playground.of(visitor)


def jobs_of(api: ApiServer) -> list[dict[str, Any]]:
    with api.client() as client:
        found: list[dict[str, Any]] = client.get("/jobs").json()["data"]
    return found


def sent_body(page: Playground, text: str) -> dict[str, Any]:
    """Send a text; returns the body of the request that the page makes of it."""
    with page.page.expect_request(lambda request: request.method == "POST" and request.url.endswith("/jobs")) as sent:
        page.send(text)
    body = sent.value.post_data_json
    assert isinstance(body, dict)
    return body


def test_tokens_appear_as_they_come_and_the_numbers_with_them(page: Playground) -> None:
    page.set(max_tokens=60, seed=7)
    page.send("Tell me of the sea.")
    whole = chat_answer("Tell me of the sea.", 7, 60)
    page.wait_for_status("running")
    page.wait_for_tokens(3)
    part = page.words.inner_text()
    assert 0 < len(part) < len(whole)
    assert whole.startswith(part)
    page.wait_for_status("succeeded")
    expect(page.words).to_have_text(whole)
    expect(page.fact("tokens")).to_have_text("60 tokens")
    expect(page.fact("ttft")).to_have_text(re.compile(r"^first after \d[\d.]* s$"))
    expect(page.fact("rate")).to_have_text(re.compile(r"^\d[\d.]* tokens/s$"))
    rate = float(page.fact("rate").inner_text().split()[0])
    assert 0.3 * 1000 / STEP_MS < rate <= 1.1 * 1000 / STEP_MS
    expect(page.fact("reason")).to_have_text("stopped at most tokens")
    expect(page.fact("seed")).to_have_text("seed 7")
    expect(page.page.get_by_role("status")).to_have_text("Done: 60 tokens")
    expect(page.stop).to_be_hidden()


def test_a_prompt_is_continued_as_it_is(page: Playground) -> None:
    page.mode("Prompt")
    page.set(max_tokens=8, seed=3)
    page.send("Hello, I am")
    page.wait_for_status("succeeded")
    expect(page.words).to_have_text(shown(simulated_text("Hello, I am", 3, 8)))


def test_a_chat_goes_on_with_all_its_turns(page: Playground) -> None:
    page.set(max_tokens=5, seed=1, system="Be brief.")
    page.send("One")
    page.wait_for_status("succeeded")
    first = chat_text([("system", "Be brief."), ("user", "One")], 1, 5)
    body = sent_body(page, "Two")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two"},
    ]
    page.wait_for_status("succeeded")
    expect(page.page.locator(".turn")).to_have_count(4)
    page.page.get_by_role("button", name="New", exact=True).click()
    expect(page.page.locator(".turn")).to_have_count(0)
    expect(page.page.get_by_text("Where to?")).to_be_visible()


def test_only_parameters_that_are_set_are_sent(page: Playground) -> None:
    page.set(max_tokens="")
    body = sent_body(page, "Short")
    assert body == {"messages": [{"role": "user", "content": "Short"}], "metadata": {"title": "Short"}}
    page.page.keyboard.press("Escape")
    page.wait_for_status("cancelled")
    asked = {
        "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11,
        "repetition_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": -0.5, "priority": "low",
    }  # fmt: skip
    page.mode("Prompt")
    page.set(**asked, stop="###\nEnd of it")
    page.page.get_by_role("combobox", name="Model").select_option("simulated")
    body = sent_body(page, "All of it")
    assert body == {
        **asked,
        "model": "simulated",
        "prompt": "All of it",
        "stop": ["###", "End of it"],
        "metadata": {"title": "All of it"},
    }
    page.wait_for_status("succeeded")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_job_and_keeps_what_came(page: Playground, api: ApiServer, how: str) -> None:
    page.set(max_tokens=2000)
    page.send("A long way")
    page.wait_for_tokens(3)
    if how == "button":
        page.stop.click()
    else:
        page.page.keyboard.press("Escape")
    page.wait_for_status("cancelled")
    assert len(page.words.inner_text().split()) >= 3
    with api.client() as client:
        job = client.get(f"/jobs/{page.job()}").json()
    assert (job["status"], shown(job["text"])) == ("cancelled", page.words.inner_text())
    expect(page.prompt).to_be_enabled()


def test_a_job_that_is_stopped_before_it_is_accepted_is_stopped_all_the_same(page: Playground, api: ApiServer) -> None:
    held: list[Route] = []
    page.page.route("**/jobs", lambda route: held.append(route) if route.request.method == "POST" else route.fallback())
    page.set(max_tokens=2000)
    page.send("Never mind")
    page.stop.click()
    expect(page.fact("note")).to_have_text("stopping")
    held[0].continue_()
    page.wait_for_status("cancelled")
    assert jobs_of(api)[0]["status"] == "cancelled"


def test_what_the_api_refuses_is_told_in_its_words_and_nothing_is_lost(chromium: Browser, api: ApiServer) -> None:
    with visiting(chromium, api.url, expected=["status of 422"]) as visitor:
        page = Playground.of(visitor)
        page.set(temperature=5)
        page.send("Too hot")
        expect(page.error).to_contain_text("temperature")
        expect(page.prompt).to_have_value("Too hot")
        expect(page.page.locator(".turn")).to_have_count(0)
        page.set(temperature=1, max_tokens=3)
        page.page.get_by_role("button", name="Send", exact=True).click()
        page.wait_for_status("succeeded")
        expect(page.error).to_be_hidden()


def test_a_job_that_fails_says_why(page: Playground) -> None:
    page.mode("Prompt")
    page.send("Break [[raise]]@3")
    page.wait_for_status("failed")
    expect(page.answer.locator(".problem")).not_to_be_empty()


def test_text_is_never_taken_for_html(chromium: Browser, api: ApiServer) -> None:
    evil = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
    with visiting(chromium, api.url, expected=["requires 'TrustedHTML' assignment"]) as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=3)
        page.send(evil)
        page.wait_for_status("succeeded")
        expect(page.page.locator(".turn.user .words")).to_have_text(evil)
        expect(page.jobs.get_by_text("<img src=x").first).to_be_visible()
        with api.client() as client:
            client.post("/jobs", json={"prompt": "x", "max_tokens": 1, "metadata": {"title": {"toString": evil}}})
            client.post("/jobs", json={"prompt": "x", "max_tokens": 1, "metadata": {"title": f"second {evil}"}})
        expect(page.jobs.get_by_text("second <img").first).to_be_visible()
        assert page.page.title() == "Carpool"
        assert page.page.locator("main img").count() == 0
        # and should a part of the page ever forget that, the browser does not
        assigned = "() => { try { document.body.innerHTML = '<b>'; return 'taken' } catch { return 'refused' } }"
        assert page.page.evaluate(assigned) == "refused"


def test_after_a_reload_in_mid_stream_the_same_answer_goes_on(page: Playground, api: ApiServer) -> None:
    page.set(max_tokens=120, seed=5)
    page.send("Reload me")
    before = page.wait_for_tokens(10)
    num_jobs = len(jobs_of(api))
    for _ in range(2):
        page.page.reload()
        assert page.wait_for_tokens(before) >= before
    expect(page.page.locator(".turn.user .words")).to_have_text("Reload me")
    page.wait_for_status("succeeded")
    expect(page.words).to_have_text(chat_answer("Reload me", 5, 120))
    expect(page.fact("ttft")).to_be_visible()
    assert len(jobs_of(api)) == num_jobs
    page.page.reload()
    expect(page.words).to_have_text(chat_answer("Reload me", 5, 120))
    expect(page.page.locator("#parameter-form [name=seed]")).to_have_value("5")


def test_an_answer_that_was_lost_makes_no_second_job(chromium: Browser, api: ApiServer) -> None:
    with visiting(chromium, api.url, expected=[AWAY]) as visitor:
        page = Playground.of(visitor)
        lost: list[int] = []

        def lose(route: Route) -> None:
            if route.request.method != "POST" or len(lost) == 2:
                route.fallback()
                return
            lost.append(route.fetch().status)  # the server has it, and the page is not told
            route.abort("connectionreset")

        page.page.route("**/jobs", lose)
        num_jobs = len(jobs_of(api))
        page.set(max_tokens=4, seed=2)
        page.send("Only once")
        page.wait_for_status("succeeded")
        expect(page.words).to_have_text(chat_answer("Only once", 2, 4))
        assert lost == [202, 202]
    assert len(jobs_of(api)) == num_jobs + 1


def test_a_request_that_a_reload_cut_off_is_sent_again_as_the_same(page: Playground, api: ApiServer) -> None:
    num_jobs = len(jobs_of(api))
    had: list[int] = []

    def hold(route: Route) -> None:
        if route.request.method == "POST" and not had:
            had.append(route.fetch().status)  # the server has it, and the page is not told
        else:
            route.fallback()

    page.page.route("**/jobs", hold)
    page.set(max_tokens=6, seed=9)
    page.send("Cut off")
    page.wait_for_status("sending")
    expect(page.jobs.get_by_text("Cut off").first).to_be_visible()
    assert had == [202]
    page.page.reload()
    page.wait_for_status("succeeded")
    expect(page.words).to_have_text(chat_answer("Cut off", 9, 6))
    assert len(jobs_of(api)) == num_jobs + 1


def test_two_tabs_follow_one_job_and_each_has_its_own_conversation(page: Playground, visitor: Visitor) -> None:
    page.set(max_tokens=100, seed=4)
    page.send("Look here")
    page.wait_for_tokens(5)
    second = Playground.of(visitor, f"/#job={page.job()}")
    expect(second.page.locator(".turn.user .words")).to_have_text("Look here")
    third = Playground.of(visitor)
    third.set(max_tokens=5, seed=4)
    third.send("And there")
    third.wait_for_status("succeeded")
    expect(third.words).to_have_text(chat_answer("And there", 4, 5))
    for one in (page, second):
        one.wait_for_status("succeeded")
        expect(one.words).to_have_text(chat_answer("Look here", 4, 100))


def test_an_address_of_a_job_that_is_gone_says_so(chromium: Browser, api: ApiServer) -> None:
    with visiting(chromium, api.url, expected=["status of 404"]) as visitor:
        page = Playground.of(visitor, "/#job=never-was")
        expect(page.error).to_contain_text("there is no job 'never-was'")
        page.wait_for_status("failed")


def test_the_picture_shows_who_rides_and_who_waits(page: Playground, service: Service) -> None:
    others = [service.submit(f"other {n}", max_tokens=400) for n in range(3)]
    page.set(max_tokens=200)
    page.send("Mine")
    page.wait_for_tokens(1)
    expect(page.batch.locator(".seat.taken")).to_have_count(4)
    mine = page.batch.locator(".seat.own")
    expect(mine).to_have_count(1)
    expect(mine).to_contain_text(re.compile(r"Seat \d: yours, \d+ tokens? of at most 200"))
    expect(page.page.locator("#pulse")).to_contain_text("4 of 4 seats taken")
    waiting = Playground(page.page.context.new_page())
    waiting.page.goto(page.page.url.partition("#")[0])
    waiting.set(max_tokens=3)
    waiting.send("Behind")
    expect(waiting.fact("position")).to_have_text("position 1")
    expect(waiting.batch.locator(".person.own")).to_have_count(1)
    expect(waiting.batch).to_contain_text("1 job waiting")
    waiting.page.keyboard.press("Escape")
    waiting.wait_for_status("cancelled")
    for id in others:
        service.cancel(id)
    page.page.keyboard.press("Escape")
    page.wait_for_status("cancelled")
    expect(page.batch.locator(".seat.taken")).to_have_count(0)
    expect(page.batch).to_contain_text("Nobody waits")


def test_workers_appear_and_go(page: Playground, service: Service) -> None:
    expect(page.batch.get_by_text("worker-1 on")).to_be_visible()
    worker = service.worker("worker-2", ready=False)
    expect(page.batch.get_by_text(re.compile("worker-2 on cpu: on the road"))).to_be_visible()
    expect(page.page.locator("#pulse")).to_contain_text("of 8 seats taken")
    worker.end()
    expect(page.batch.get_by_text("worker-2 on cpu: not heard from")).to_be_visible()
    expect(page.batch.get_by_text("worker-2")).to_have_count(0)


def test_a_job_in_the_list_opens_stops_and_is_forgotten(chromium: Browser, api: ApiServer, service: Service) -> None:
    with visiting(chromium, api.url, expected=["status of 404"]) as visitor:
        page = Playground.of(visitor)
        id = service.submit("Listed", max_tokens=2000, seed=6, metadata={"title": "The listed one"})
        head = page.jobs.get_by_role("button", name="The listed one")
        expect(head).to_contain_text("riding")
        head.click()
        expect(head).to_have_attribute("aria-expanded", "true")
        row = page.jobs.get_by_role("listitem").filter(has_text="The listed one")
        text = row.locator(".job-text")
        expect(text).to_contain_text(simulated_text("Listed", 6, 5))
        row.get_by_role("button", name="Cancel").click()
        expect(head).to_contain_text("stopped")
        expect(text).to_have_text(service.wait_for_end(id)["text"])
        row.get_by_role("button", name="Delete").click()
        expect(row).to_have_count(0)
        with api.client() as client:
            assert client.get(f"/jobs/{id}").status_code == 404


def test_a_group_of_jobs_opens_with_all_its_texts(page: Playground, api: ApiServer) -> None:
    with api.client() as client:
        answer = client.post("/generate", json={"prompts": ["One of", "Two of"], "max_tokens": 4, "seed": 1})
        assert answer.status_code == 200
        id = answer.headers["x-carpool-job-id"]
        one, two = client.get(f"/jobs/{id}").json()["texts"]
    page.jobs.get_by_role("button", name=id[:13]).click()
    expect(page.jobs.locator(".job-text")).to_have_text(f"1. {shown(one)}\n\n2. {shown(two)}")
    page.page.goto(f"{api.url}/#job={id}")
    page.page.reload()
    expect(page.error).to_contain_text("2 parts")


def test_older_jobs_come_when_they_are_asked_for(page: Playground, service: Service) -> None:
    ids = [service.submit(f"many {n}", max_tokens=1) for n in range(14)]
    for id in ids:
        service.wait_for_end(id)
    rows = page.jobs.locator(".job")
    expect(rows).to_have_count(12)
    page.jobs.get_by_role("button", name="Older ones").click()
    expect(rows).not_to_have_count(12)
    assert rows.count() >= 14


@pytest.mark.parametrize("mode", ["Chat", "Prompt"])
def test_the_code_on_the_screen_runs_and_gives_the_same(page: Playground, mode: str) -> None:
    text = 'It\'s "quoted" $HOME `x` \\n and a\nsecond line, 世界'
    page.mode(mode)
    page.set(max_tokens=7, seed=12, temperature=0.7, top_k=20, min_p=0.01, stop="never")
    page.send(text)
    page.wait_for_status("succeeded")
    wanted = page.words.inner_text()
    page.page.get_by_text("The same as code").click()
    code: dict[str, str] = {}
    for language in ("curl", "Python", "Job"):
        page.page.get_by_role("radio", name=language).check()
        code[language] = page.page.locator("#snippet").inner_text()
    done = run("bash", "-c", code["curl"])
    events = [json.loads(line[6:]) for line in done.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    pieces = [choice["delta"].get("content") or "" if mode == "Chat" else choice["text"] for choice in choices]
    assert shown("".join(pieces)) == wanted
    assert shown(run(sys.executable, "-c", code["Python"])).rstrip("\n") == wanted
    job = json.loads(run("bash", "-c", code["Job"]))
    page.page.goto(f"{page.page.url.partition('#')[0]}#job={job['id']}")
    page.page.reload()
    page.wait_for_status("succeeded")
    expect(page.words).to_have_text(wanted)


def run(*command: str) -> str:
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_follows_what_is_typed_and_can_be_copied(chromium: Browser, api: ApiServer) -> None:
    with visiting(chromium, api.url, permissions=["clipboard-read", "clipboard-write"]) as visitor:
        page = Playground.of(visitor)
        page.page.get_by_text("The same as code").click()
        page.prompt.fill("As I type")
        expect(page.page.locator("#snippet")).to_contain_text("As I type")
        page.set(top_p=0.5)
        expect(page.page.locator("#snippet")).to_contain_text('"top_p": 0.5')
        page.page.get_by_role("button", name="Copy", exact=True).click()
        expect(page.page.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.page.evaluate("navigator.clipboard.readText()")
        assert copied == page.page.locator("#snippet").inner_text()
        assert copied.startswith(f"curl -sN '{api.url}/v1/chat/completions'")


def test_under_a_proxy_s_prefix_all_of_it_works(chromium: Browser, service: Service) -> None:
    settings = service.settings.model_copy(update={"root_path": "/car"})
    with running_api(settings) as api, visiting(chromium, f"{api.url}/car") as visitor:
        page = Playground.of(visitor)
        page.set(max_tokens=5, seed=8)
        page.send("Prefixed")
        page.wait_for_status("succeeded")
        expect(page.words).to_have_text(chat_answer("Prefixed", 8, 5))
        expect(page.batch.get_by_text("worker-1")).to_be_visible()
        expect(page.jobs.get_by_text("Prefixed").first).to_be_visible()
