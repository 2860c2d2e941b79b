"""Flower as whoever runs it sees it: a real process in a real browser, with real workers behind it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from celery.result import AsyncResult
from playwright.sync_api import Browser, Error, Page, expect

from ops.flower_ledger import LedgerView
from tasks import keys
from tests.browser import visiting
from tests.instance import CARPOOL, plain_environment
from tests.redis_server import RedisServer, free_port
from tests.service import Service, eventually

pytestmark = pytest.mark.timeout(120)
PASSWORD = "a-password-of-this-test"
LONG = 8000
#: Flower looks at the ledger once a second, and believes in an end that it has seen twice.
SEEN_S = 15.0


class FlowerProcess:
    """`carpool flower` on a free port; `end` and `start` again keep what it knows."""

    def __init__(self, service: Service, folder: Path) -> None:
        (folder / "password").write_text(PASSWORD)
        self.port = free_port()
        self._folder = folder
        self._environment = plain_environment(
            {
                **service.settings.renders_as_environment,
                "CARPOOL_FLOWER_PASSWORD_FILE": str(folder / "password"),
            }
        ) | {"FLOWER_PERSISTENT": "true", "FLOWER_DB": str(folder / "flower"), "FLOWER_STATE_SAVE_INTERVAL": "1000"}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self._folder / "flower.log").open("ab") as log:
            self._process = subprocess.Popen(
                [CARPOOL, "flower", "--port", str(self.port)],
                env=self._environment,
                cwd=self._folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        eventually("Flower answers", self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "flower.log").read_text()
        try:
            return httpx2.get(f"{self.url}/healthcheck", trust_env=False).status_code == 200
        except httpx2.TransportError:
            return False

    def tasks(self) -> dict[str, dict[str, Any]]:
        """All tasks as its own API tells them."""
        answer = httpx2.get(f"{self.url}/api/tasks", auth=("carpool", PASSWORD), trust_env=False)
        assert answer.status_code == 200
        found: dict[str, dict[str, Any]] = answer.json()
        return found

    def state(self, id: str) -> str:
        return str(self.tasks().get(id, {}).get("state"))

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None


@pytest.fixture
def service(own_redis: RedisServer, tmp_path: Path) -> Iterator[Service]:
    settings = {"lease_s": 2, "renew_s": 0.5, "grace_s": 1, "heartbeat_s": 0.5, "simulated_step_ms": 10}
    with Service(own_redis.url, tmp_path, **settings) as service:
        yield service


@pytest.fixture
def flower(service: Service, tmp_path: Path) -> Iterator[FlowerProcess]:
    flower = FlowerProcess(service, tmp_path)
    flower.start()
    try:
        yield flower
    finally:
        flower.end(signal.SIGKILL)


def shows(flower: FlowerProcess, id: str, state: str) -> dict[str, Any]:
    eventually(f"Flower shows {state}, not {flower.state(id)}", lambda: flower.state(id) == state, SEEN_S)
    return flower.tasks()[id]


def row(page: Page, id: str) -> Any:
    return page.locator("#tasks-table tbody tr", has_text=id)


def test_in_a_browser_each_job_has_its_state_and_terminate_cancels_it(
    service: Service, flower: FlowerProcess, chromium: Browser
) -> None:
    service.worker(max_batch_size=1)
    service.worker("worker-2", max_batch_size=1)
    done = service.submit("told in confidence", max_tokens=5)
    service.wait_for_end(done)
    failed = service.submit("[[raise]]@3", max_tokens=9)
    service.wait_for_end(failed)
    riding = [service.submit(f"long {n}", max_tokens=LONG) for n in range(2)]
    for id in riding:
        service.wait_for_token(id, 3)
    waiting = service.submit("waits", max_tokens=5)
    for id, state in ((done, "SUCCESS"), (failed, "FAILURE"), (riding[0], "STARTED"), (waiting, "RECEIVED")):
        shows(flower, id, state)

    with visiting(chromium, flower.url, http_credentials={"username": "carpool", "password": PASSWORD}) as visitor:
        page = visitor.open("/tasks")
        expect(row(page, done)).to_contain_text("SUCCESS")
        expect(row(page, done)).to_contain_text("worker-")
        expect(row(page, failed)).to_contain_text("FAILURE")
        expect(row(page, riding[0])).to_contain_text("STARTED")
        expect(row(page, waiting)).to_contain_text("RECEIVED")

        page = visitor.open(f"/task/{done}")
        expect(page.locator(".task-details-card")).to_contain_text("5 tokens, length")
        expect(page.locator(".task-details-card")).to_contain_text("Runtime")
        assert "confidence" not in page.content(), "a prompt is nobody's business but its owner's"
        expect(visitor.open(f"/task/{failed}").locator(".task-details-card")).to_contain_text("Exception")

        page = visitor.open(f"/task/{riding[0]}")
        page.locator("#task-terminate").click()
        expect(page.locator("body")).to_contain_text(f"Cancelled '{riding[0]}'")
        assert service.wait_for_end(riding[0])["status"] == "cancelled"
        assert str(AsyncResult(riding[0], app=service.celery).state) == "REVOKED"

        service.wait_for_end(waiting)  # the slot is free for it
        shows(flower, waiting, "SUCCESS")
        shows(flower, riding[0], "REVOKED")
        page = visitor.open(f"/task/{riding[0]}")
        expect(page.locator(".task-details-card")).to_contain_text("REVOKED")
        page = visitor.open("/workers")
        for name in ("worker-1@", "worker-2@"):
            expect(page.locator("body")).to_contain_text(name)
    assert service.cancel(riding[1]) == "requested"


def test_nobody_comes_in_without_the_password(flower: FlowerProcess, chromium: Browser) -> None:
    with (
        visiting(chromium, flower.url, expected=["401"]) as visitor,
        pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"),
    ):
        visitor.open("/tasks")
    answer = httpx2.post(f"{flower.url}/api/task/revoke/x?terminate=true", trust_env=False)
    assert answer.status_code == 401


def test_what_waits_is_shown_and_can_be_cancelled_while_no_worker_is_there(
    service: Service, flower: FlowerProcess, chromium: Browser
) -> None:
    """No event tells of either: there is no message yet, and nobody who would hear of a revoke."""
    job = service.submit("waits")
    task = shows(flower, job, "RECEIVED")
    assert (task["name"], task.get("worker")) == (keys.TASK_NAME, None)
    assert task["received"] == pytest.approx(service.view(job)["created_at"], abs=1)
    with visiting(chromium, flower.url, http_credentials={"username": "carpool", "password": PASSWORD}) as visitor:
        page = visitor.open(f"/task/{job}")
        page.locator("#task-revoke").click()
        expect(page.locator("body")).to_contain_text(f"Cancelled '{job}'")
    assert service.wait_for_end(job)["status"] == "cancelled"
    shows(flower, job, "REVOKED")


def test_a_job_whose_worker_is_killed_goes_on_at_another_one_and_is_shown_there(
    service: Service, flower: FlowerProcess
) -> None:
    first = service.worker()
    job = service.submit("long", max_tokens=600)
    service.wait_for_token(job, 5)
    assert shows(flower, job, "STARTED")["worker"].startswith("worker-1@")
    first.end()
    service.worker("worker-2")
    eventually("it goes on", lambda: service.view(job)["attempts"] == 2)
    eventually("Flower shows where", lambda: str(flower.tasks()[job]["worker"]).startswith("worker-2@"), SEEN_S)
    service.wait_for_end(job)
    task = shows(flower, job, "SUCCESS")
    assert task["worker"].startswith("worker-2@")
    assert task["result"] == "600 tokens, length"
    assert task["runtime"] > 0


def test_what_happened_while_flower_was_away_is_made_good(service: Service, flower: FlowerProcess) -> None:
    service.worker()
    jobs = {name: service.submit(name, max_tokens=LONG) for name in ("cancelled", "riding")}
    for id in jobs.values():
        service.wait_for_token(id, 2)
        shows(flower, id, "STARTED")
    flower.end()
    service.cancel(jobs["cancelled"])
    service.wait_for_end(jobs["cancelled"])
    late = service.submit("late", max_tokens=LONG)
    service.wait_for_token(late, 2)
    flower.start()
    shows(flower, jobs["cancelled"], "REVOKED")
    shows(flower, jobs["riding"], "STARTED")
    assert shows(flower, late, "STARTED")["worker"].startswith("worker-1@")
    for id in (jobs["riding"], late):
        service.cancel(id)


def test_a_job_that_expires_while_it_waits_has_failed(service: Service, flower: FlowerProcess) -> None:
    job = service.submit("waits", deadline_s=2)
    shows(flower, job, "RECEIVED")
    service.wait_for_end(job)
    assert "expired" in shows(flower, job, "FAILURE")["exception"]


def test_flower_goes_on_after_redis_was_away(service: Service, flower: FlowerProcess, own_redis: RedisServer) -> None:
    before = service.submit("before")
    shows(flower, before, "RECEIVED")
    own_redis.stop()
    own_redis.start()
    after = service.submit("after")
    shows(flower, after, "RECEIVED")


def test_many_waiting_jobs_cost_one_round_trip_and_are_bounded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [service.submit(f"{n}") for n in range(12)]
    monkeypatch.setattr("ops.flower_ledger.MOST_LIVE", 10)
    view = LedgerView(service.settings)
    assert len(view.look([])) == 10
    known = {job.id for job in view.look(jobs)}
    assert known == set(jobs)
    assert view.look(["no-such-job"]) != []
