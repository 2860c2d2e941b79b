"""Logs: every line of every process is JSON where nobody looks on, and a job can be followed by its id."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import structlog

from ops.log_lines import readable, supervisor_line
from tasks.logs import JsonHandler, configure_logging, logs_are_json
from tasks.reports import Reports
from tasks.settings import Settings
from tests.api_process import ApiProcess
from tests.instance import CARPOOL, Instance, plain_environment
from tests.receiver import Receiver
from tests.service import ROOT, Service, eventually
from tests.webhooks_process import WebhooksProcess, webhook_settings

pytestmark = pytest.mark.timeout(120)
SHORT: dict[str, Any] = {"lease_s": 1, "renew_s": 0.3, "grace_s": 0.5, "reaper_tick_s": 0.2, "heartbeat_s": 0.3}


def lines_of(text: str) -> list[dict[str, Any]]:
    """All lines of a log, each of which is JSON with what every line has."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert {"timestamp", "level", "event", "role", "process"} <= line.keys(), line
        assert line["timestamp"].endswith("Z")
        assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None
    return lines


def of_job(lines: list[dict[str, Any]], job: str) -> list[str]:
    """The events of the lines that a search for the job's id finds, in the order of their times."""
    found = sorted((line for line in lines if line.get("job_id") == job), key=lambda line: line["timestamp"])
    return [line["event"] for line in found]


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=10, **SHORT) as service:
        yield service


# --- a job's life ----------------------------------------------------------------------------------------------------


def test_a_job_can_be_followed_by_its_id_from_process_to_process(service: Service, tmp_path: Path) -> None:
    first = service.worker("worker-1")
    with ApiProcess(service.settings, tmp_path) as api:
        body = {"prompt": "xylophone", "max_tokens": 200, "seed": 7}
        job = httpx2.post(f"{api.url}/jobs", json=body, trust_env=False).json()["id"]
        service.wait_for_token(job, 10)
        (info,) = service.list_workers()
        assert info.child_pid is not None
        psutil.Process(info.child_pid).kill()
        service.wait_for_token(job, 40)
        first.signal(signal.SIGKILL)
        first.wait()
        second = service.worker("worker-2", simulated_step_ms=0)
        service.wait_for_end(job)
        eventually("its end is told", lambda: '"job_ended"' in second.log.read_text())
        lines = [line for log in (api.log, first.log, second.log) for line in lines_of(log.read_text())]
    assert of_job(lines, job) == [
        "job_accepted",
        "job_claimed",
        "job_first_token",
        "job_lost_its_model_process",
        "job_first_token",
        "job_recovered",
        "job_first_token",
        "job_ended",
    ]
    by_event = {line["event"]: line for line in lines if line.get("job_id") == job}
    assert by_event["job_accepted"]["role"] == "api"
    assert by_event["job_claimed"]["process"] == "worker-1"
    assert by_event["job_lost_its_model_process"]["cause"] == "signal 9 (SIGKILL) while decoding"
    recovered, ended = by_event["job_recovered"], by_event["job_ended"]
    assert (recovered["process"], recovered["lost_worker"], recovered["ride"]) == ("worker-2", "worker-1", 2)
    assert recovered["tokens"] >= 40
    assert (ended["status"], ended["finish_reason"], ended["tokens"]) == ("succeeded", "length", 200)
    assert "xylophone" not in json.dumps(lines)


def test_a_line_of_a_traced_job_has_the_id_of_its_trace(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    worker = service.worker()
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with ApiProcess(service.settings, tmp_path) as api:
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        body = {"prompt": "a", "max_tokens": 2}
        job = httpx2.post(f"{api.url}/jobs", json=body, headers=headers, trust_env=False).json()["id"]
        service.wait_for_end(job)
        eventually("its end is told", lambda: '"job_ended"' in worker.log.read_text())
        lines = lines_of(api.log.read_text()) + lines_of(worker.log.read_text())
    assert {line.get("trace_id") for line in lines if line.get("job_id") == job} == {trace}


def test_a_failed_and_a_handed_back_job_say_so(service: Service) -> None:
    worker = service.worker(drain_s=0)
    failed = service.submit("[[raise]]@2", max_tokens=5)
    service.wait_for_end(failed)
    job = service.submit(max_tokens=500)
    service.wait_for_token(job, 3)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    lines = lines_of(worker.log.read_text())
    assert of_job(lines, failed)[-1] == "job_ended"
    (end,) = [line for line in lines if line.get("job_id") == failed and line["event"] == "job_ended"]
    assert (end["status"], end["error"]) == ("failed", "engine_error")
    assert of_job(lines, job)[-1] == "job_handed_back"


def test_at_a_higher_level_jobs_are_not_told(service: Service) -> None:
    worker = service.worker(log_level="warning")
    job = service.submit(max_tokens=3)
    service.wait_for_end(job)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert of_job(lines_of(worker.log.read_text()), job) == []


def test_deliveries_of_webhooks_are_told_in_json(redis_url: str, tmp_path: Path) -> None:

    settings = webhook_settings(redis_url)
    with Receiver() as receiver, Service(redis_url, tmp_path) as service, ApiProcess(settings, tmp_path) as api:
        service.worker()
        with WebhooksProcess(settings, tmp_path) as webhooks:
            body = {"prompt": "a", "max_tokens": 2, "webhook_url": receiver.url}
            job = httpx2.post(f"{api.url}/jobs", json=body, trust_env=False).json()["id"]
            eventually("it is told", lambda: '"webhook_attempted"' in webhooks.log.read_text())
            lines = lines_of(webhooks.log.read_text())
    assert of_job(lines, job) == ["webhook_attempted"]
    assert {line["role"] for line in lines} == {"webhooks"}


# --- every line ------------------------------------------------------------------------------------------------------

_LIBRARIES = """
import logging, sys, threading, warnings
from tasks.logs import configure_logging
from tasks.settings import load_settings
configure_logging(load_settings(), "worker", "w")
logging.getLogger("uvicorn.error").error("of a library: %s", 1)
logging.getLogger("celery.worker").warning("two\\nlines")
warnings.warn("careful", UserWarning)
thread = threading.Thread(target=lambda: 1 / 0, name="t")
thread.start()
thread.join()
secret = "xylophone"
raise RuntimeError("nobody catches this")
"""


def test_lines_of_libraries_warnings_and_exceptions_are_json_too() -> None:
    done = subprocess.run([sys.executable, "-c", _LIBRARIES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    lines = lines_of(done.stderr)
    assert [line["event"] for line in lines[:2]] == ["of a library: 1", "two\nlines"]
    assert lines[0]["logger"] == "uvicorn.error"
    assert "careful" in lines[2]["event"]
    assert [line["event"] for line in lines[3:]] == ["thread_ended_by_exception", "process_ended_by_exception"]
    assert (lines[3]["thread"], lines[4]["level"]) == ("t", "critical")
    assert "ZeroDivisionError" in lines[3]["exception"]
    assert "nobody catches this" in lines[4]["exception"]
    assert "xylophone" not in done.stderr.replace('secret = \\"xylophone\\"', "")


def test_each_process_of_an_instance_writes_json_and_each_line_says_whose_it_is(tmp_path: Path) -> None:
    settings = {"CARPOOL_WEBHOOK_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "CARPOOL_LOG_LEVEL": "debug"}
    with Instance(tmp_path, settings=settings) as instance:
        instance.ready()
        (model,) = [process for process in instance.status() if process["role"] == "model-worker"]
        os.kill(model["pid"], signal.SIGKILL)
        log = instance.data_dir / "logs" / "worker-1.log"
        eventually("its death is told", lambda: "model_process_died" in log.read_text())
        instance.interrupt(signal.SIGTERM)
        assert instance.process.wait(60) == 0
        roles = {
            path.stem: lines_of(path.read_text())
            for path in (instance.data_dir / "logs").glob("*.log")
            if path.stem != "redis"
        }
    assert set(roles) == {"supervisor", "api", "worker-1", "webhooks"}
    assert {line["role"] for line in roles["api"]} == {"api"}
    assert {line["process"] for line in roles["worker-1"]} <= {"worker-1", "worker-1/model"}
    states = [(line["process"], line["state"]) for line in roles["supervisor"] if line["event"] == "process_state"]
    assert states[0] == ("supervisor", "running")
    assert ("api", "stopped") in states


def test_a_model_process_that_breaks_tells_why_in_json(service: Service) -> None:
    worker = service.worker(ready=False, engine="transformers", model="/nowhere/at/all")
    assert worker.wait(100) != 0  # it has torch to import first
    told = lines_of(worker.log.read_text())
    assert any(line["event"] == "model_process_cannot_serve" for line in told)


def test_why_a_supervised_process_ends_is_json_and_plain_for_who_types(tmp_path: Path) -> None:
    def ended(**environment: str) -> str:
        settings = {"CARPOOL_REDIS_URL": "redis://127.0.0.1:1/0", "CARPOOL_DATA_DIR": str(tmp_path), **environment}
        done = subprocess.run(
            [CARPOOL, "worker", "--engine", "simulated"],
            capture_output=True,
            text=True,
            check=False,
            env=plain_environment(settings),
            timeout=60,
        )
        assert done.returncode != 0
        return done.stderr

    assert ended().startswith("Error: ")
    *_, last = lines_of(ended(CARPOOL_LOG_FORMAT="json"))
    assert (last["event"], last["role"]) == ("process_cannot_run", "worker")
    assert "127.0.0.1:1" in last["cause"]


# --- for people ------------------------------------------------------------------------------------------------------


def test_text_is_for_terminals_and_for_who_asks_for_it() -> None:
    code = _LIBRARIES.partition("thread =")[0]
    environment = {**os.environ, "CARPOOL_LOG_FORMAT": "text"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert "[error    ] of a library: 1" in done.stderr
    assert "\x1b" not in done.stderr, "no colours into a pipe"


def test_a_line_is_shown_to_people_as_text() -> None:
    line = supervisor_line("process_state", process="api", pid=7, state="failed")
    assert json.loads(line)["role"] == "supervisor"
    assert readable(line).endswith("info process_state pid=7 state=failed")
    assert readable("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert readable("[1, 2]") == "[1, 2]"


# --- the thread that tells -------------------------------------------------------------------------------------------


def test_who_reports_waits_for_nobody_and_what_is_too_much_is_dropped() -> None:
    held, told = threading.Event(), []
    reports = Reports()
    reports.start()
    reports.put(held.wait)
    for i in range(12_000):
        reports.put(lambda i=i: told.append(i))  # type: ignore[misc]
    assert told == []
    held.set()
    reports.close(timeout_s=10)
    assert len(told) + reports.num_dropped == 12_000
    assert told == list(range(len(told)))
    assert reports.num_dropped >= 1_000


def test_a_report_that_fails_does_not_end_the_others() -> None:
    told: list[int] = []
    reports = Reports()
    reports.start()
    reports.put(lambda: 1 // 0)
    reports.put(lambda: told.append(1))
    reports.close(timeout_s=10)
    assert told == [1]


def test_settings_say_the_format() -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        hooks = sys.excepthook, threading.excepthook
        stream = io.StringIO()
        configure_logging(Settings(log_format="json"), "api", "a", stream)
        assert logs_are_json()
        assert any(isinstance(handler, JsonHandler) for handler in root.handlers)
        structlog.get_logger("carpool.api").info("hello", job_id="j")
        (line,) = lines_of(stream.getvalue())
        assert (line["event"], line["job_id"], line["process"]) == ("hello", "j", "a")
        configure_logging(Settings(log_format="text"), "api", "a", stream)
        assert not logs_are_json()
    finally:
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hooks
        root.handlers[:] = before
        root.setLevel(level)
        logging.getLogger("carpool").setLevel(logging.NOTSET)
        structlog.reset_defaults()
