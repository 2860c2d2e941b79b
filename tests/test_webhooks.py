"""Webhooks from the request to the receiver, with real processes: whatever dies, the end of a job is told."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import redis

from ops.process import with_parent_death_signal
from tasks import keys
from tasks.app import plain_celery
from tasks.invitations import invitation_template
from tasks.ledger import script_text
from tasks.settings import Settings
from tasks.webhook_calls import WebhookCalls
from tests.api_server import ApiServer, running_api
from tests.receiver import OTHER_SECRET, SECRET, Received, Receiver, Reply
from tests.redis_server import RedisServer, free_port
from tests.scripted_owner import ScriptedOwner
from tests.service import ROOT, eventually
from tests.webhooks_process import WebhooksProcess, webhook_settings


class World:
    """An API, a worker that a test moves by hand, and a receiver. The worker of webhooks is the test's to start."""

    def __init__(self, settings: Settings, api: ApiServer, owner: ScriptedOwner, receiver: Receiver) -> None:
        self.settings = settings
        self.api = api
        self.owner = owner
        self.receiver = receiver
        self.client = api.client()

    def submit(self, prompt: str = "Hello", **body: Any) -> str:
        """Submit a job with a webhook; returns its id."""
        answer = self.client.post("/jobs", json={"prompt": prompt, "webhook_url": self.receiver.url, **body})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def view(self, id: str) -> dict[str, Any]:
        view: dict[str, Any] = self.client.get(f"/jobs/{id}").json()
        return view

    def webhook(self, id: str) -> dict[str, Any]:
        webhook: dict[str, Any] = self.view(id)["webhook"]
        return webhook

    def settled(self, id: str, status: str = "delivered") -> dict[str, Any]:
        """Wait until nothing is left to be done."""
        found: dict[str, Any] = eventually(
            f"the webhook of {id} is {status}", lambda: (seen := self.webhook(id))["status"] == status and seen
        )
        return found


@pytest.fixture
def world(own_redis: RedisServer) -> Iterator[World]:
    settings = webhook_settings(own_redis.url)
    with (
        Receiver() as receiver,
        ScriptedOwner(settings) as owner,
        running_api(settings) as api,
    ):
        owner.heartbeat()
        world = World(settings, api, owner, receiver)
        with world.client:
            yield world


@pytest.fixture
def webhooks(world: World, tmp_path: Path) -> Iterator[WebhooksProcess]:
    with WebhooksProcess(world.settings, tmp_path) as process:
        yield process


# --- what a receiver is told ------------------------------------------------------------------------------------------


def test_a_job_s_end_is_told_signed_and_as_the_job_is_shown(world: World, webhooks: WebhooksProcess) -> None:
    id = world.submit(metadata={"order": 17})
    assert world.webhook(id) == {
        "url": world.receiver.url,
        "event_id": f"evt_{id}",
        "status": "waiting",
        "attempts": [],
        "next_attempt_at": None,
    }
    world.owner.run([" a", " b"], id)
    (request,) = world.receiver.wait_for(1)
    event = request.event()
    delivered = world.settled(id)
    view = world.view(id)
    del view["webhook"]
    assert (event["type"], event["id"], event["data"]) == ("job.succeeded", f"evt_{id}", view)
    assert event["text_omitted"] is False
    assert request.id == event["id"]
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("Carpool/")
    (attempt,) = delivered["attempts"]
    assert (attempt["status_code"], attempt["error"], delivered["next_attempt_at"]) == (200, None, None)
    assert view["finished_at"] <= attempt["at"] <= view["finished_at"] + 5


def test_every_kind_of_end_is_told(world: World, webhooks: WebhooksProcess) -> None:
    error = json.dumps({"message": "x", "type": "server_error", "param": None, "code": "engine_error"})
    ids = {}
    ids["succeeded"] = world.submit()
    world.owner.run([" a"], ids["succeeded"])
    ids["failed"] = world.submit()
    world.owner.finish(world.owner.claim(ids["failed"]), "failed", "error", error=error)
    ids["cancelled"] = world.submit()
    world.client.post(f"/jobs/{ids['cancelled']}/cancel", json={})
    ids["expired"] = world.submit(deadline_s=0.3)
    requests = world.receiver.wait_for(4)
    assert {request.event()["type"]: request.event()["data"]["id"] for request in requests} == {
        f"job.{status}": id for status, id in ids.items()
    }
    assert {request.event()["data"]["status"] for request in requests} == set(ids)


def test_a_response_in_the_background_is_told_of_too(world: World, webhooks: WebhooksProcess) -> None:
    body = {"input": "Hello", "background": True, "webhook_url": f"{world.receiver.url}?token=s3cret"}
    answer = world.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    id = answer.json()["id"]
    world.owner.run([" a"], id)
    (request,) = world.receiver.wait_for(1)
    assert request.path == "/hook?token=s3cret"
    assert (request.event()["data"]["id"], request.event()["data"]["status"]) == (id, "succeeded")
    assert world.settled(id)["url"] == f"{world.receiver.url}?…", "a query may hold a secret of the receiver"


def test_a_request_sent_again_with_its_key_is_one_job_with_one_event(world: World, webhooks: WebhooksProcess) -> None:
    body = {"prompt": "Hello", "webhook_url": world.receiver.url}
    header = {"Idempotency-Key": "order-17"}
    ids = {world.client.post("/jobs", json=body, headers=header).json()["id"] for _ in range(3)}
    (id,) = ids
    other = world.client.post("/jobs", json={**body, "webhook_url": f"{world.receiver.url}/2"}, headers=header)
    assert other.status_code == 409
    world.owner.run([" a"], id)
    world.settled(id)
    assert len(world.receiver.requests) == 1


def test_a_secret_that_takes_another_s_place_signs_beside_it(world: World, tmp_path: Path) -> None:
    settings = world.settings.model_copy(
        update={
            "webhook_secret": webhook_settings(
                world.settings.redis_url, webhook_secret=f"{OTHER_SECRET} {SECRET}"
            ).webhook_secret
        }
    )
    with WebhooksProcess(settings, tmp_path):
        world.owner.run([" a"], world.submit())
        (request,) = world.receiver.wait_for(1)
    assert request.event(SECRET) == request.event(OTHER_SECRET)


def test_a_long_text_is_left_out_and_can_be_fetched(world: World, webhooks: WebhooksProcess) -> None:
    id = world.submit()
    world.owner.run(["x" * 300_000], id)
    (request,) = world.receiver.wait_for(1)
    event = request.event()
    assert len(request.body) < 2000
    assert (event["text_omitted"], event["data"]["text"]) == (True, None)
    assert len(world.view(id)["text"]) == 300_000


def test_the_receiver_of_the_document_does_what_it_says(
    world: World, webhooks: WebhooksProcess, tmp_path: Path
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/webhooks.md").read_text(), re.DOTALL)
    program = tmp_path / "receiver.py"
    program.write_text(code)
    port = free_port()
    environment = {**os.environ, "CARPOOL_WEBHOOK_SECRET": SECRET, "PORT": str(port)}
    receiver = subprocess.Popen(
        with_parent_death_signal([sys.executable, str(program)], signal.SIGKILL),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        url = f"http://127.0.0.1:{port}/hook"
        assert eventually("it listens", lambda: unsigned_post(url)) == 401
        id = world.submit(webhook_url=url)
        world.owner.run([" a"], id)
        assert [attempt["status_code"] for attempt in world.settled(id)["attempts"]] == [204]
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == f'job.succeeded {id} " a"\n'
    finally:
        receiver.kill()
        receiver.communicate()


def unsigned_post(url: str) -> int | None:
    """The status of a POST that nobody signed, None where nobody answers."""
    try:
        return httpx2.post(url, json={"type": "job.succeeded"}, trust_env=False).status_code
    except httpx2.TransportError:
        return None


# --- receivers that fail ----------------------------------------------------------------------------------------------


def test_a_receiver_that_fails_is_told_again_with_the_same_id_and_body(world: World, webhooks: WebhooksProcess) -> None:
    statuses = [500, 503, 302, 404, 200]
    world.receiver.reply = lambda number, request: Reply(statuses[number - 1], {"Location": "/elsewhere"})
    id = world.submit()
    world.owner.run([" a"], id)
    requests = world.receiver.wait_for(5)
    assert len({request.id for request in requests}) == 1
    assert len({request.body for request in requests}) == 1
    assert {request.path for request in requests} == {"/hook"}
    for request in requests:
        request.event()
    assert [attempt["status_code"] for attempt in world.settled(id)["attempts"]] == statuses
    gaps = [later.at - earlier.at for earlier, later in itertools.pairwise(requests)]
    for number, gap in enumerate(gaps):
        assert gap >= 0.2 * 2**number / 2 - 0.02, "each wait is drawn from the upper half of twice the last"


def test_a_receiver_that_asks_for_time_gets_it(world: World, webhooks: WebhooksProcess) -> None:
    world.receiver.reply = lambda number, request: Reply(429, {"Retry-After": "2"}) if number == 1 else Reply()
    id = world.submit()
    world.owner.run([" a"], id)
    first, second = world.receiver.wait_for(2)
    assert second.at - first.at >= 1.9
    assert world.settled(id)["attempts"][0]["status_code"] == 429


def test_a_receiver_that_is_gone_for_good_is_not_asked_again(world: World, webhooks: WebhooksProcess) -> None:
    world.receiver.reply = lambda number, request: Reply(410)
    id = world.submit()
    world.owner.run([" a"], id)
    assert [attempt["status_code"] for attempt in world.settled(id, "failed")["attempts"]] == [410]


def test_a_receiver_that_is_slow_or_away_is_tried_until_the_span_is_over(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    settings = webhook_settings(own_redis.url, webhook_retry_s=3, webhook_timeout_s=0.5)
    release = threading.Event()
    with (
        Receiver(lambda number, request: Reply(before=lambda: release.wait(20))) as receiver,
        ScriptedOwner(settings) as owner,
        running_api(settings) as api,
        api.client() as client,
        WebhooksProcess(settings, tmp_path),
    ):
        world = World(settings, api, owner, receiver)
        slow = world.submit()
        away = str(client.post("/jobs", json={"prompt": "x", "webhook_url": "http://127.0.0.1:9/"}).json()["id"])
        for id in (slow, away):
            owner.run([" a"], id)
        found = {id: world.settled(id, "failed")["attempts"] for id in (slow, away)}
        world.client.close()
        release.set()
    assert len(found[slow]) >= 2
    assert {attempt["error"] for attempt in found[slow]} == {"timeout: no answer within 0.5 s"}
    assert {attempt["error"] for attempt in found[away]} == {"connect: connection refused"}
    for attempts in found.values():
        assert attempts[-1]["at"] - attempts[0]["at"] == pytest.approx(3, abs=1.5), "the last one ends the span"


def test_an_address_that_is_refused_gets_no_request(own_redis: RedisServer, tmp_path: Path) -> None:
    open_settings = webhook_settings(own_redis.url)
    settings = open_settings.model_copy(update={"webhook_allow_private": False, "webhook_retry_s": 1.0})
    with (
        Receiver() as receiver,
        ScriptedOwner(settings) as owner,
        running_api(open_settings) as api,  # it takes the job; the worker of webhooks looks for itself
        WebhooksProcess(settings, tmp_path),
    ):
        world = World(settings, api, owner, receiver)
        with world.client:
            id = world.submit()
            owner.run([" a"], id)
            attempts = world.settled(id, "failed")["attempts"]
        assert not receiver.requests
    assert {attempt["error"].partition(":")[0] for attempt in attempts} == {"address_refused"}


def test_one_receiver_that_hangs_does_not_hold_up_the_others(own_redis: RedisServer, tmp_path: Path) -> None:
    settings = webhook_settings(own_redis.url, webhook_concurrency=4, webhook_timeout_s=20)
    release = threading.Event()
    with (
        Receiver(lambda number, request: Reply(before=lambda: release.wait(40))) as hanging,
        Receiver() as receiver,
        ScriptedOwner(settings) as owner,
        running_api(settings) as api,
        WebhooksProcess(settings, tmp_path),
    ):
        world = World(settings, api, owner, receiver)
        with world.client as client:
            for _ in range(20):
                # hosts are told apart by their names
                url = hanging.url.replace("127.0.0.1", "localhost")
                owner.run([" a"], str(client.post("/jobs", json={"prompt": "x", "webhook_url": url}).json()["id"]))
            hanging.wait_for(2)
            for _ in range(5):
                owner.run([" a"], world.submit())
            receiver.wait_for(5, 10)
        release.set()


# --- what dies --------------------------------------------------------------------------------------------------------


def test_a_worker_of_webhooks_that_is_killed_in_an_attempt_is_followed_by_another(world: World, tmp_path: Path) -> None:
    settings = world.settings.model_copy(update={"webhook_timeout_s": 1.0})
    release = threading.Event()
    world.receiver.reply = lambda number, request: Reply(before=lambda: release.wait(30)) if number == 1 else Reply()
    id = world.submit()
    with WebhooksProcess(settings, tmp_path) as first:
        world.owner.run([" a"], id)
        world.receiver.wait_for(1)
        first.kill()
    with WebhooksProcess(settings, tmp_path):
        requests = world.receiver.wait_for(2, 40)
        delivered = world.settled(id)
    release.set()
    assert len({request.id for request in requests}) == 1
    assert [attempt["status_code"] for attempt in delivered["attempts"]] == [None, 200]
    assert delivered["attempts"][0]["error"].startswith("interrupted")


def test_ends_that_come_while_nobody_delivers_are_told_later(world: World, tmp_path: Path) -> None:
    ids = [world.submit() for _ in range(5)]
    for id in ids:
        world.owner.run([" a"], id)
    assert world.webhook(ids[0])["status"] == "pending"
    with WebhooksProcess(world.settings, tmp_path):
        requests = world.receiver.wait_for(5)
    assert sorted(request.event()["data"]["id"] for request in requests) == sorted(ids)


def test_a_drain_lets_an_attempt_come_to_its_end(world: World, tmp_path: Path) -> None:
    arrived, release = threading.Event(), threading.Event()

    def hold(number: int, request: Received) -> Reply:
        arrived.set()
        return Reply(before=lambda: release.wait(10))

    world.receiver.reply = hold
    id = world.submit()
    with WebhooksProcess(world.settings, tmp_path) as process:
        world.owner.run([" a"], id)
        assert arrived.wait(20)
        process.signal(signal.SIGTERM)
        threading.Timer(0.5, release.set).start()
        assert process.wait() == 0
    assert world.webhook(id)["status"] == "delivered"
    assert len(world.webhook(id)["attempts"]) == 1


def test_messages_that_the_broker_loses_or_doubles_change_nothing(world: World, webhooks: WebhooksProcess) -> None:
    client = world.owner.client
    calls = WebhookCalls(world.settings, invitation_template(plain_celery(world.settings), keys.WEBHOOK_TASK))
    webhooks.signal(signal.SIGSTOP)
    ids = [world.submit() for _ in range(6)]
    for id in ids:
        world.owner.run([" a"], id)
    assert world.owner.ledger.run(calls.pump_webhooks("1 elsewhere other", 5000, 32)).num_messages == 6
    # the worker may have been asking for one message when it was stopped, and have it
    messages = [str(one) for one in client.lrange(keys.WEBHOOK_QUEUE, 0, -1)]
    client.delete(keys.WEBHOOK_QUEUE)
    client.rpush(keys.WEBHOOK_QUEUE, *messages[:3] * 5)  # the others are lost
    webhooks.signal(signal.SIGCONT)
    for id in ids:
        world.settled(id)
    assert Counter(request.id for request in world.receiver.requests) == Counter({f"evt_{id}": 1 for id in ids})


def test_redis_that_is_killed_and_comes_back_loses_no_event(
    world: World, own_redis: RedisServer, webhooks: WebhooksProcess
) -> None:
    broken = threading.Event()
    world.receiver.reply = lambda number, request: Reply(200 if broken.is_set() else 500)
    ids = [world.submit() for _ in range(5)]
    for id in ids:
        world.owner.run([" a"], id)
    world.receiver.wait_for(5)
    on_disk: Any = world.owner.client.execute_command("WAITAOF", 1, 0, 5000)  # type: ignore[no-untyped-call]
    assert on_disk[0] == 1
    own_redis.kill()
    own_redis.start()
    broken.set()
    for id in ids:
        world.settled(id)
    told = Counter(request.id for request in world.receiver.requests)
    assert set(told) == {f"evt_{id}" for id in ids}


def test_an_attempt_whose_end_could_not_be_told_at_once_is_told_when_redis_is_back(
    world: World, own_redis: RedisServer, webhooks: WebhooksProcess
) -> None:
    arrived, release = threading.Event(), threading.Event()

    def hold(number: int, request: Received) -> Reply:
        arrived.set()
        return Reply(before=lambda: release.wait(10))

    world.receiver.reply = hold
    id = world.submit()
    world.owner.run([" a"], id)
    assert arrived.wait(20)
    own_redis.pause()
    release.set()
    time.sleep(2.5)  # longer than one call waits for its answer
    own_redis.resume()
    assert len(world.settled(id)["attempts"]) == 1
    assert len(world.receiver.requests) == 1


def test_two_workers_of_webhooks_share_the_work(world: World, tmp_path: Path) -> None:
    with WebhooksProcess(world.settings, tmp_path, "one"), WebhooksProcess(world.settings, tmp_path, "two"):
        ids = [world.submit() for _ in range(40)]
        for id in ids:
            world.owner.run([" a"], id)
        for id in ids:
            world.settled(id)
    assert len(world.receiver.requests) == len({request.id for request in world.receiver.requests}) == 40


def test_a_thousand_jobs_that_end_at_once_are_told_of_once_each(world: World, webhooks: WebhooksProcess) -> None:
    ids = [world.submit() for _ in range(1000)]
    with world.owner.client.pipeline(transaction=False) as pipeline:
        script = world.owner.client.script_load(script_text("cancel"))
        for id in ids:
            call = world.owner.calls.cancel(id)
            pipeline.evalsha(script, len(call.keys), *call.keys, *call.args)
        pipeline.execute()
    began = time.monotonic()
    requests = world.receiver.wait_for(1000, 60)
    print(f"1000 events in {time.monotonic() - began:.1f} s")
    assert Counter(request.id for request in requests) == Counter({f"evt_{id}": 1 for id in ids})
    eventually("the outbox is empty", lambda: not world.owner.client.exists(keys.HOOKS))
    assert len(world.receiver.requests) == 1000


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://example.com/", "https:// or http://"),
        ("https://user:pw@example.com/", "credentials"),
        ("https://example.com/" + "x" * 3000, "at most 2048"),
        ("", "empty"),
        (17, "string"),
        ([], "string"),
        ("http://169.254.169.254/latest/meta-data", "link-local"),
    ],
)
def test_a_url_that_cannot_be_told_is_refused_by_name(world: World, url: object, reason: str) -> None:
    answer = world.client.post("/jobs", json={"prompt": "x", "webhook_url": url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "webhook_url")
    assert reason in answer.json()["error"]["message"]
    answer = world.client.post("/v1/responses", json={"input": "x", "background": True, "webhook_url": url})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook_url")


def test_a_null_is_no_webhook(world: World) -> None:
    assert world.view(world.submit(webhook_url=None))["webhook"] is None


def test_a_response_that_is_waited_for_takes_no_webhook(world: World) -> None:
    answer = world.client.post("/v1/responses", json={"input": "x", "webhook_url": world.receiver.url})
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/basic_generate", {"prompt": "x"}),
        ("/generate", {"prompts": ["x"]}),
        ("/generate_stream", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_elsewhere_the_field_is_refused_by_name(world: World, path: str, body: dict[str, Any]) -> None:
    answer = world.client.post(path, json={**body, "webhook_url": world.receiver.url})
    assert answer.status_code in (400, 422)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "webhook_url")


@pytest.fixture
def without_secret(redis_url: str) -> Iterator[httpx2.Client]:
    settings = Settings(redis_url=redis_url, engine="simulated")
    with ScriptedOwner(settings), running_api(settings) as api, api.client() as client:
        yield client


def test_without_a_secret_a_webhook_is_refused_with_advice(without_secret: httpx2.Client) -> None:
    body = {"prompt": "x", "webhook_url": "https://example.com/hook"}
    answer = without_secret.post("/jobs", json=body)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("webhooks_not_configured", "webhook_url")
    assert "CARPOOL_WEBHOOK_SECRET" in error["message"]
    assert without_secret.get("/jobs").json()["data"] == []


def test_private_hosts_are_refused_unless_they_are_allowed(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", webhook_secret=SECRET)
    with ScriptedOwner(settings), running_api(settings) as api, api.client() as client:
        for host in ("127.0.0.1", "localhost", "10.0.0.1", "[::1]", "0x7f.1", "[::ffff:10.0.0.1]"):
            answer = client.post("/jobs", json={"prompt": "x", "webhook_url": f"http://{host}/"})
            assert answer.status_code == 422, host
            assert "CARPOOL_WEBHOOK_ALLOW_PRIVATE" in answer.json()["error"]["message"]


# --- what is kept, and what is shown ----------------------------------------------------------------------------------


def test_no_log_has_a_url_a_secret_or_a_body(world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = world.settings.model_copy(update={"log_level": "debug"})
    with WebhooksProcess(settings, tmp_path) as process:
        world.receiver.reply = lambda number, request: Reply(500 if number == 1 else 200)
        id = world.submit("a prompt of its own", webhook_url=f"{world.receiver.url}/path-of-its-own?token=s3cret")
        world.owner.run([" text-of-its-own"], id)
        world.settled(id)
        process.signal(signal.SIGTERM)
        process.wait()
        log = process.log.read_text()
    assert id in log
    for hidden in ("path-of-its-own", "s3cret", SECRET, "text-of-its-own", "a prompt of its own"):
        assert hidden not in log
        assert hidden not in "".join(capfd.readouterr())


def test_a_deleted_job_is_not_told_of(world: World, tmp_path: Path) -> None:
    id = world.submit()
    world.owner.run([" a"], id)
    assert world.client.delete(f"/jobs/{id}").status_code == 204
    other = world.submit()
    world.owner.run([" a"], other)
    with WebhooksProcess(world.settings, tmp_path):
        (request,) = world.receiver.wait_for(1)
    assert request.event()["data"]["id"] == other


def test_nothing_is_left_behind(world: World, webhooks: WebhooksProcess, own_redis: RedisServer) -> None:
    id = world.submit()
    world.owner.run([" a"], id)
    world.settled(id)
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        left = {str(name) for name in client.keys("*") if client.ttl(str(name)) == -1}
    broker = {keys.UNACKED, keys.UNACKED_INDEX, keys.UNACKED_MUTEX}
    assert {name for name in left if not name.startswith(("_kombu.", "carpool"))} <= {keys.MODELS, keys.SCHEMA} | broker
    pid = webhooks.pid
    webhooks.signal(signal.SIGTERM)
    assert webhooks.wait() == 0
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
