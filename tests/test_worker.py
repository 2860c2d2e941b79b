"""Generation workers as they run: real Celery workers, real model processes with the simulated engine, a real Redis."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery.result import AsyncResult

from ops.process import ProcessIdentity, wait_until_ended
from tasks import keys
from tasks.codes import JobFailed
from tests.service import BOUND_S, ROOT, Service, eventually, simulated_text


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path) as running:
        yield running


@pytest.fixture
def slow_service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    """Steps of 20 ms, so that a test can do things while jobs ride; leases of a second."""
    short = {"lease_s": 1.5, "renew_s": 0.4, "grace_s": 0.5, "reaper_tick_s": 0.3, "heartbeat_s": 0.3}
    with Service(redis_url, tmp_path, simulated_step_ms=20, **short) as running:
        yield running


# --- the ordinary life of a job --------------------------------------------------------------------------------------


def test_a_job_gets_the_text_of_its_prompt_and_seed(service: Service) -> None:
    service.worker()
    job = service.submit("Hello, I am", seed=42, max_tokens=12)
    view = service.wait_for_end(job)
    assert view["status"] == "succeeded"
    assert view["text"] == simulated_text("Hello, I am", 42, 12)
    assert view["finish_reason"] == "length"
    assert view["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert view["attempts"] == 1
    service.assert_whole(job)


def test_jobs_accepted_before_a_worker_is_there_wait_and_run(service: Service) -> None:
    jobs = [service.submit(f"number {i}") for i in range(6)]
    assert {service.view(job)["status"] for job in jobs} == {"queued"}
    assert [service.view(job)["queue_position"] for job in jobs] == [1, 2, 3, 4, 5, 6]
    service.worker()
    for i, job in enumerate(jobs):
        assert service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, 10)


def test_never_more_ride_than_there_are_slots_and_all_get_through(slow_service: Service) -> None:
    slow_service.worker(max_batch_size=3)
    jobs = [slow_service.submit(f"number {i}", max_tokens=5 + i) for i in range(10)]
    most = 0
    while any(slow_service.view(job)["status"] in ("queued", "running") for job in jobs):
        most = max(most, sum(slow_service.view(job)["status"] == "running" for job in jobs))
    assert most == 3
    for i, job in enumerate(jobs):
        assert slow_service.view(job)["text"] == simulated_text(f"number {i}", 7, 5 + i)


def test_a_late_sequence_joins_the_running_batch_and_a_short_one_leaves_it(slow_service: Service) -> None:
    slow_service.worker()
    long = slow_service.submit("long", max_tokens=60)
    slow_service.wait_for_token(long, 5)
    late = slow_service.submit("late", max_tokens=5)
    assert slow_service.wait_for_end(late)["status"] == "succeeded"
    assert slow_service.view(long)["status"] == "running"
    assert slow_service.wait_for_end(long)["text"] == simulated_text("long", 7, 60)


def test_five_jobs_on_two_workers_of_four_slots_all_ride_at_once(slow_service: Service) -> None:
    slow_service.worker("worker-1")
    slow_service.worker("worker-2")
    jobs = [slow_service.submit(f"number {i}", max_tokens=100) for i in range(5)]
    for job in jobs:
        slow_service.wait_for_token(job, 1)
    assert {slow_service.view(job)["status"] for job in jobs} == {"running"}
    for job in jobs:
        slow_service.cancel(job)


def test_an_error_in_one_sequence_ends_only_that_one(slow_service: Service) -> None:
    slow_service.worker()
    beside = slow_service.submit("beside", max_tokens=30)
    broken = slow_service.submit("broken [[raise]]@5", max_tokens=30)
    view = slow_service.wait_for_end(broken)
    assert view["status"] == "failed"
    assert view["error"]["code"] == "engine_error"
    assert view["text"] == simulated_text("broken [[raise]]@5", 7, 4)
    assert slow_service.wait_for_end(beside)["status"] == "succeeded"
    assert slow_service.view(beside)["attempts"] == 1


def test_a_prompt_that_is_too_long_ends_its_job_with_both_numbers(service: Service) -> None:
    service.worker(simulated_context_length=16)
    view = service.wait_for_end(service.submit("a b c d e f g h i j", max_tokens=10))
    assert view["error"]["code"] == "context_length_exceeded"
    assert "10" in view["error"]["message"]
    assert "16" in view["error"]["message"]


# --- deaths ----------------------------------------------------------------------------------------------------------


def test_a_killed_worker_s_jobs_go_on_at_their_position_elsewhere(slow_service: Service) -> None:
    first = slow_service.worker("worker-1")
    jobs = [slow_service.submit(f"number {i}", max_tokens=80) for i in range(4)]
    for job in jobs:
        slow_service.wait_for_token(job, 10)
    children = first.children()
    first.signal(signal.SIGKILL)
    slow_service.worker("worker-2")
    for i, job in enumerate(jobs):
        view = slow_service.wait_for_end(job)
        assert view["status"] == "succeeded"
        assert view["text"] == simulated_text(f"number {i}", 7, 80)
        assert view["attempts"] == 2
        slow_service.assert_whole(job)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive, "the model process outlived its parent"


def test_a_killed_model_process_comes_back_and_its_riders_go_on(slow_service: Service) -> None:
    slow_service.worker()
    job = slow_service.submit("long", max_tokens=60)
    slow_service.wait_for_token(job, 10)
    (info,) = slow_service.list_workers()
    assert info.child_pid is not None
    psutil.Process(info.child_pid).kill()
    view = slow_service.wait_for_end(job)
    assert view["text"] == simulated_text("long", 7, 60)
    assert view["attempts"] == 1
    slow_service.assert_whole(job)


@pytest.mark.parametrize("position", [1, 2, 9])
def test_a_poison_job_is_found_out_and_its_neighbours_finish(slow_service: Service, position: int) -> None:
    slow_service.worker()
    beside = [slow_service.submit(f"number {i}", max_tokens=40) for i in range(3)]
    for job in beside:
        slow_service.wait_for_token(job, 1)
    poison = slow_service.submit(f"poison [[exit 137]]@{position}", max_tokens=40)
    view = slow_service.wait_for_end(poison)
    assert view["status"] == "failed"
    assert view["error"]["code"] == "worker_died"
    assert "exit code 137" in view["error"]["message"]
    assert view["text"] == simulated_text(f"poison [[exit 137]]@{position}", 7, position - 1)
    for i, job in enumerate(beside):
        assert slow_service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, 40)
    assert slow_service.wait_for_end(slow_service.submit("next"))["status"] == "succeeded"


def test_a_hung_step_is_treated_as_a_death(redis_url: str, tmp_path: Path) -> None:
    with Service(redis_url, tmp_path, step_timeout_s=1, redis_timeout_s=0.5) as service:
        service.worker()
        view = service.wait_for_end(service.submit("hangs [[hang]]@3", max_tokens=5))
        assert view["error"]["code"] == "worker_died"
        assert "no progress for 1 s" in view["error"]["message"]
        assert service.wait_for_end(service.submit("next"))["status"] == "succeeded"


# --- stops -----------------------------------------------------------------------------------------------------------


def test_cancelling_a_riding_job_frees_its_slot_and_keeps_its_text(slow_service: Service) -> None:
    slow_service.worker(max_batch_size=1)
    job = slow_service.submit("long", max_tokens=5000)
    slow_service.wait_for_token(job, 5)
    assert slow_service.cancel(job) == "requested"
    view = slow_service.wait_for_end(job)
    assert view["status"] == "cancelled"
    assert view["finish_reason"] == "cancelled"
    assert view["text"] == simulated_text("long", 7, view["usage"]["completion_tokens"])
    assert slow_service.wait_for_end(slow_service.submit("next"))["status"] == "succeeded"
    slow_service.assert_whole(job)


def test_a_job_cancelled_while_no_worker_is_up_is_never_run(service: Service) -> None:
    job = service.submit()
    assert service.cancel(job) == "cancelled"
    service.worker()
    assert service.wait_for_end(service.submit("next"))["status"] == "succeeded"
    assert service.view(job)["status"] == "cancelled"
    assert service.view(job)["attempts"] == 0


def test_a_deadline_ends_a_job_with_no_worker_alive(slow_service: Service) -> None:
    view = slow_service.wait_for_end(slow_service.submit(deadline_s=0.5), bound_s=5)
    assert view["status"] == "expired"
    assert view["error"]["code"] == "deadline_exceeded"


def test_a_deadline_ends_a_riding_job_and_keeps_its_text(slow_service: Service) -> None:
    slow_service.worker()
    view = slow_service.wait_for_end(slow_service.submit("long", max_tokens=5000, deadline_s=1))
    assert view["status"] == "expired"
    assert view["text"] == simulated_text("long", 7, view["usage"]["completion_tokens"])
    eventually("the slot is free", lambda: slow_service.riding() == 0)


# --- Celery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["a/b", "ä", "x" * 200, "-begins wrong"])
def test_a_task_whose_id_cannot_be_a_job_s_is_told_so(service: Service, id: str) -> None:
    service.worker()
    result = service.celery.send_task("carpool.generate", kwargs={"prompt": "native", "max_tokens": 4}, task_id=id)
    with pytest.raises(JobFailed, match="cannot be a job's"):
        result.get(timeout=20)
    assert result.state == "FAILURE"


def test_a_task_sent_with_plain_celery_runs_and_is_a_job(service: Service) -> None:
    service.worker()
    result = service.celery.send_task("carpool.generate", kwargs={"prompt": "native", "max_tokens": 4, "seed": 3})
    value = result.get(timeout=20)
    assert value == service.view(result.id)
    assert value["text"] == simulated_text("native", 3, 4)


def test_a_task_sent_before_any_worker_is_up_runs_later(service: Service) -> None:
    result = service.celery.send_task("carpool.generate", ["native"], {"max_tokens": 4, "seed": 3})
    service.worker()
    assert result.get(timeout=20)["text"] == simulated_text("native", 3, 4)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ({"kwargs": {"prompt": "x"}, "countdown": 3}, "eta_unsupported"),
        ({"kwargs": {"prompt": "x", "max_tokens": 0}}, "invalid_request"),
        ({"kwargs": {"prompt": "x", "temprature": 1}}, "invalid_request"),
        ({"args": ["x", "y"]}, "invalid_request"),
        ({"kwargs": {"prompt": "x", "model": "no-such-model"}}, "model_not_found"),
    ],
)
def test_a_task_that_cannot_run_ends_as_failed_and_says_why(service: Service, sent: dict[str, Any], code: str) -> None:
    service.worker()
    result = service.celery.send_task("carpool.generate", **sent)
    with pytest.raises(JobFailed) as failure:
        result.get(timeout=20)
    assert failure.value.args[1:] == (code, result.id)
    assert service.view(result.id)["status"] == "failed"
    assert service.wait_for_end(service.submit("next"))["status"] == "succeeded"


def test_a_message_that_is_no_task_harms_nobody(service: Service) -> None:
    service.worker()
    with service.celery.producer_pool.acquire() as producer:
        for body in ([1], [[], 5, None], "text", {"args": "x"}):
            headers = {"id": "odd", "task": keys.TASK_NAME, "lang": "py", "retries": 0}
            producer.publish(body, routing_key=keys.NATIVE_QUEUE, headers=headers, serializer="json")
        producer.publish("{", routing_key=keys.NATIVE_QUEUE, content_type="application/json", content_encoding="utf-8")
    assert service.wait_for_end(service.submit("next"))["status"] == "succeeded"


def test_celery_s_result_has_the_state_of_the_job(slow_service: Service) -> None:
    slow_service.worker()
    job = slow_service.submit("long", max_tokens=5000)
    slow_service.wait_for_token(job, 1)
    assert AsyncResult(job, app=slow_service.celery).state == "STARTED"
    slow_service.cancel(job)
    slow_service.wait_for_end(job)
    assert str(AsyncResult(job, app=slow_service.celery).state) == "REVOKED"


def test_celery_s_events_tell_each_job_s_life(slow_service: Service) -> None:
    slow_service.worker()
    seen: list[tuple[str, str]] = []
    ended = threading.Event()
    wanted: set[str] = set()

    def note(event: dict[str, Any]) -> None:
        if event["type"].startswith("task-"):
            seen.append((event["uuid"], event["type"]))
            assert "secret" not in str(event)
            if wanted and wanted <= {
                uuid for uuid, kind in seen if kind in ("task-succeeded", "task-failed", "task-revoked")
            }:
                ended.set()

    with slow_service.celery.connection() as connection:
        receiver = slow_service.celery.events.Receiver(connection, handlers={"*": note})
        capture = receiver.itercapture(limit=None, timeout=20, wakeup=True)
        next(capture)
        good = slow_service.submit("secret", max_tokens=3)
        bad = slow_service.submit("secret [[raise]]@2", max_tokens=3)
        cancelled = slow_service.submit("secret long", max_tokens=5000)
        wanted.update((good, bad, cancelled))
        slow_service.wait_for_token(cancelled, 1)
        slow_service.cancel(cancelled)
        for _ in capture:
            if ended.is_set():
                break
    for job, end in ((good, "task-succeeded"), (bad, "task-failed"), (cancelled, "task-revoked")):
        assert [kind for uuid, kind in seen if uuid == job] == ["task-received", "task-started", end]


@pytest.mark.parametrize("terminate", [False, True])
def test_celery_s_revoke_cancels_a_riding_job(slow_service: Service, terminate: bool) -> None:
    slow_service.worker()
    job = slow_service.submit("long", max_tokens=5000)
    slow_service.wait_for_token(job, 1)
    slow_service.celery.control.revoke(job, terminate=terminate)
    view = slow_service.wait_for_end(job)
    assert view["status"] == "cancelled"
    slow_service.assert_whole(job)


def test_a_full_worker_hears_a_revoke_and_its_event_loop_rests(slow_service: Service) -> None:
    worker = slow_service.worker(max_batch_size=1)
    job = slow_service.submit("long", max_tokens=5000)
    slow_service.wait_for_token(job, 1)
    process = psutil.Process(worker.pid)
    slow_service.celery.control.broadcast("enable_events")  # a message for the socket that must not be left unread
    before = process.cpu_times().user + process.cpu_times().system
    slow_service.wait_for_token(job, 60)  # a second
    spent = process.cpu_times().user + process.cpu_times().system - before
    assert spent < 0.7, f"{spent:.2f} s of processor time in about a second"
    answers: Any = slow_service.celery.control.ping(timeout=10, limit=1)
    (answer,) = answers
    assert list(answer.values()) == [{"ok": "pong"}]
    slow_service.celery.control.revoke(job)
    assert slow_service.wait_for_end(job)["status"] == "cancelled"


def test_a_worker_whose_slots_are_closed_hears_remote_control(slow_service: Service) -> None:
    slow_service.worker(max_batch_size=1)
    job = slow_service.submit("long", max_tokens=5000)
    slow_service.wait_for_token(job, 1)
    replies: Any = slow_service.celery.control.revoke(job, reply=True, timeout=10)
    assert [list(reply.values()) for reply in replies] == [[{"ok": f"{job}: requested"}]]
    assert slow_service.wait_for_end(job)["status"] == "cancelled"


def test_a_prefork_worker_is_refused_with_the_reason(service: Service) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tasks.app", "worker", "-P", "prefork", "-c", "1", "-Q", "carpool"],
        cwd=ROOT,
        env={"CARPOOL_REDIS_URL": service.settings.redis_url, "PATH": "/usr/bin:/bin", "C_FORCE_ROOT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode != 0
    assert "carpool worker" in run.stdout + run.stderr


# --- the broker ------------------------------------------------------------------------------------------------------


def test_connections_killed_again_and_again_lose_and_double_nothing(slow_service: Service) -> None:
    slow_service.worker()
    jobs = [slow_service.submit(f"number {i}", max_tokens=150) for i in range(8)]
    for job in jobs[:4]:
        slow_service.wait_for_token(job, 3)
    most = 0
    for round_ in range(3):
        slow_service.client.client_kill_filter(_type="normal", skipme=True)
        slow_service.client.client_kill_filter(_type="pubsub", skipme=True)
        slow_service.wait_for_token(jobs[0], 20 + 20 * round_)
        most = max(most, sum(slow_service.view(job)["status"] == "running" for job in jobs))
    for i, job in enumerate(jobs):
        assert slow_service.wait_for_end(job)["text"] == simulated_text(f"number {i}", 7, 150)
        slow_service.assert_whole(job)
    assert most == 4
    assert slow_service.wait_for_end(slow_service.submit("next"), bound_s=10)["status"] == "succeeded"


def test_another_app_s_short_visibility_timeout_does_not_double_our_jobs(slow_service: Service) -> None:
    slow_service.worker()
    job = slow_service.submit("long", max_tokens=150)
    slow_service.wait_for_token(job, 1)
    with slow_service.celery.connection(transport_options={"visibility_timeout": 1}) as other:
        channel: Any = other.channel()
        while slow_service.view(job)["status"] == "running":
            channel.qos.restore_visible(interval=1)
    slow_service.assert_whole(job)
    assert slow_service.view(job)["attempts"] == 1


# --- the end of a worker ---------------------------------------------------------------------------------------------


def test_sigterm_lets_riders_finish_and_takes_no_new_job(slow_service: Service) -> None:
    worker = slow_service.worker(drain_s=20)
    children = [ProcessIdentity.of(child.pid) for child in worker.children()]
    riding = [slow_service.submit(f"number {i}", max_tokens=50) for i in range(4)]
    for job in riding:
        slow_service.wait_for_token(job, 1)
    waiting = slow_service.submit("waiting")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert {slow_service.view(job)["status"] for job in riding} == {"succeeded"}
    assert slow_service.view(waiting)["status"] == "queued"
    assert not wait_until_ended(children, BOUND_S)  # multiprocessing's tracker ends after us
    assert slow_service.list_workers() == []


def test_a_drain_that_takes_too_long_hands_riders_back_at_their_position(slow_service: Service) -> None:
    first = slow_service.worker("worker-1", drain_s=0.2)
    jobs = [slow_service.submit(f"number {i}", max_tokens=100) for i in range(3)]
    for job in jobs:
        slow_service.wait_for_token(job, 5)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    views = [slow_service.view(job) for job in jobs]
    assert {view["status"] for view in views} == {"queued"}
    slow_service.worker("worker-2")
    for i, job in enumerate(jobs):
        view = slow_service.wait_for_end(job)
        assert view["text"] == simulated_text(f"number {i}", 7, 100)
        assert view["attempts"] == 2
        slow_service.assert_whole(job)


def test_a_second_signal_ends_a_draining_worker_at_once(slow_service: Service) -> None:
    worker = slow_service.worker(drain_s=30)
    job = slow_service.submit("long", max_tokens=5000)
    slow_service.wait_for_token(job, 1)
    children = worker.children()
    worker.signal(signal.SIGTERM)
    eventually("it drains", lambda: slow_service.list_workers()[0].state == "draining")
    worker.signal(signal.SIGTERM)
    assert worker.wait(5) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_nothing_without_a_ttl_is_left_but_what_is_constant(service: Service) -> None:
    service.worker()
    for i in range(10):
        service.wait_for_end(service.submit(f"number {i}"))
    service.wait_for_end(service.submit("x [[raise]]@2"))
    assert service.keys_without_ttl() == set()
    assert service.client.zcard(keys.DUE) == 0
    eventually("no message is unacknowledged", lambda: service.client.hlen(keys.UNACKED) == 0)
