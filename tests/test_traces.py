"""Traces from the request to the last token, with real processes and a real collector that decodes what it is sent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tasks.settings import Settings, SettingsError
from tasks.trace_context import headers_of, trace_context, trace_id_of
from tasks.tracing import start_tracing
from tests.api_process import ApiProcess
from tests.api_server import running_api, tokens_of
from tests.otlp_receiver import OtlpReceiver, SpanSeen
from tests.receiver import Receiver
from tests.service import ROOT, Service, eventually, simulated_text
from tests.webhooks_process import WebhooksProcess, webhook_settings

pytestmark = pytest.mark.timeout(120)
SHORT: dict[str, Any] = {"lease_s": 1, "renew_s": 0.3, "grace_s": 0.5, "reaper_tick_s": 0.2, "heartbeat_s": 0.3}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, CLIENT, PRODUCER, CONSUMER = 2, 3, 4, 5


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """Where processes that start from now on send their spans, at once."""
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield receiver


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, simulated_step_ms=10, **SHORT) as service:
        yield service


@pytest.fixture
def api(service: Service, collector: OtlpReceiver) -> Iterator[ApiProcess]:
    with ApiProcess(service.settings, service.folder) as api:
        yield api


def post(api: ApiProcess, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
    body = {"seed": 7, "prompt": "Hello, I am", **body}
    answer = httpx2.post(f"{api.url}{path}", json=body, headers=headers, timeout=30, trust_env=False)
    assert answer.status_code in (200, 202), answer.text
    return answer


def within(inner: SpanSeen, outer: SpanSeen) -> bool:
    return inner.parent_id == outer.span_id and outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


# --- one trace -------------------------------------------------------------------------------------------------------


def test_a_request_is_one_trace_from_its_head_to_its_last_token(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    service.worker()
    answer = post(api, "/basic_generate", max_tokens=20, temperature=0.5)
    job = answer.headers["x-carpool-job-id"]
    collector.until("all spans have come", lambda: len(collector.spans) >= 6)

    assert len({span.trace_id for span in collector.spans}) == 1
    by_name = {span.name: span for span in collector.spans}
    assert sorted(by_name) == ["POST /basic_generate", "accept", "decode", "prefill", "queue", "ride"]
    request, accept, ride = by_name["POST /basic_generate"], by_name["accept"], by_name["ride"]
    assert (request.parent_id, request.kind) == ("", SERVER)
    assert request.attributes["http.route"] == "/basic_generate"
    assert request.attributes["http.response.status_code"] == 200
    assert within(accept, request)
    assert accept.kind == PRODUCER
    assert by_name["queue"].parent_id == ride.parent_id == accept.span_id
    assert ride.kind == CONSUMER
    assert within(by_name["prefill"], ride)
    assert within(by_name["decode"], ride)
    assert by_name["queue"].end_ns == ride.start_ns
    assert by_name["prefill"].end_ns == by_name["decode"].start_ns
    assert by_name["decode"].end_ns - by_name["decode"].start_ns > 19 * 10e6 * 0.5, "19 tokens after the first one"

    assert (
        ride.attributes
        | {
            "carpool.job.id": job,
            "carpool.ride": 1,
            "carpool.position": 0,
            "carpool.worker": "worker-1",
            "carpool.outcome": "succeeded",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "simulated",
            "gen_ai.request.max_tokens": 20,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 7,
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.response.finish_reasons": ["length"],
        }
        == ride.attributes
    )
    assert ride.resource["service.name"] == request.resource["service.name"] == "carpool"
    assert (ride.resource["carpool.role"], request.resource["carpool.role"]) == ("worker", "api")


def test_the_trace_of_the_client_goes_on_and_its_state_with_it(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    service.worker()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=yes"}
    post(api, "/jobs", headers, max_tokens=3)
    collector.until("the ride is told", lambda: collector.named("ride"))
    collector.until("the request is told", lambda: collector.named("POST /jobs"))
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert collector.named("POST /jobs")[0].parent_id == PARENT
    assert collector.named("ride")[0].trace_state == "vendor=yes"


@pytest.mark.parametrize("path", ["/jobs", "/generate_stream"])
def test_a_trace_that_is_not_sampled_makes_no_span_at_all(
    path: str, service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    service.worker()
    unsampled = post(api, path, {"traceparent": f"00-{TRACE}-{PARENT}-00"}, max_tokens=3)
    service.wait_for_end(unsampled.headers["x-carpool-job-id"])
    sampled = post(api, path, {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-01"}, max_tokens=3)
    job = sampled.headers["x-carpool-job-id"]
    collector.until("a later one is told", lambda: collector.named("ride", carpool__job__id=job))
    assert {span.trace_id for span in collector.spans} == {TRACE[::-1]}


def test_no_word_of_a_prompt_or_an_answer_is_in_a_span(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    service.worker()
    post(api, "/jobs", prompt="xylophone", max_tokens=3, stop=["secretstop"], user="somebody", metadata={"a": "hidden"})
    collector.until("the ride is told", lambda: collector.named("ride"))
    collector.until("the request is told", lambda: collector.named("POST /jobs"))
    words = ["xylophone", "secretstop", "somebody", "hidden", *simulated_text("xylophone", 7, 3).split()]
    told = json.dumps([[span.name, span.attributes, span.events] for span in collector.spans])
    assert [word for word in words if word in told] == []


def test_a_stream_is_traced_as_long_as_it_lasts_and_says_when_it_failed(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    service.worker()
    body = {"prompt": "Hello", "max_tokens": 30}
    with httpx2.stream("POST", f"{api.url}/generate_stream", json=body, trust_env=False) as answer:
        assert len(tokens_of(answer)) == 31
    collector.until("the request is told", lambda: collector.named("POST /generate_stream"))
    collector.until("the ride is told", lambda: collector.named("ride"))
    (request,) = collector.named("POST /generate_stream")
    (ride,) = collector.named("ride")
    assert request.end_ns >= collector.named("decode")[0].end_ns - 5e6
    assert request.trace_id == ride.trace_id
    httpx2.get(f"{api.url}/jobs/nothing", trust_env=False)
    collector.until("a request that found nothing is told", lambda: collector.named("GET /jobs/{id}"))
    (missed,) = collector.named("GET /jobs/{id}")
    assert (missed.attributes["http.response.status_code"], missed.is_error) == (404, False)


def test_health_is_asked_for_too_often_to_be_told(service: Service, collector: OtlpReceiver, api: ApiProcess) -> None:
    httpx2.get(f"{api.url}/health/ready", trust_env=False)
    httpx2.get(f"{api.url}/jobs", trust_env=False)
    collector.until("the list is told", lambda: collector.named("GET /jobs"))
    assert [span.name for span in collector.spans] == ["GET /jobs"]


def test_a_group_is_one_trace_with_a_ride_for_each_child(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    service.worker()
    body = {"prompts": ["a", "b", "c"], "max_tokens": 3}
    answer = httpx2.post(f"{api.url}/generate", json=body, trust_env=False, timeout=30)
    group = answer.headers["x-carpool-job-id"]
    collector.until("all rides are told", lambda: len(collector.named("ride")) == 3)
    rides = collector.named("ride")
    assert sorted(ride.attributes["carpool.job.id"] for ride in rides) == [f"{group}.{i}" for i in range(3)]
    assert len({(ride.trace_id, ride.parent_id) for ride in rides}) == 1


# --- recoveries ------------------------------------------------------------------------------------------------------


def test_a_killed_worker_s_ride_stands_in_the_trace_beside_its_successor_s(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    killed = service.worker("worker-1")
    job = post(api, "/jobs", max_tokens=200).headers["x-carpool-job-id"]
    service.wait_for_token(job, 20)
    killed.signal(signal.SIGKILL)
    killed.wait()
    service.worker("worker-2", simulated_step_ms=0)
    assert service.wait_for_end(job)["text"] == simulated_text("Hello, I am", 7, 200)
    collector.until("both rides are told", lambda: len(collector.named("ride")) == 2)

    assert len({span.trace_id for span in collector.spans}) == 1
    lost, ride = collector.named("ride")
    assert (lost.attributes["carpool.ride"], ride.attributes["carpool.ride"]) == (1, 2)
    assert (lost.attributes["carpool.worker"], ride.attributes["carpool.worker"]) == ("worker-1", "worker-2")
    assert (lost.attributes["carpool.outcome"], lost.is_error) == ("lost", True)
    assert lost.resource["service.instance.id"] == ride.resource["service.instance.id"], "its successor tells"
    position = lost.attributes["gen_ai.usage.output_tokens"]
    assert 20 <= position < 200
    assert ride.attributes["carpool.position"] == position
    assert ride.links == [lost.span_id]
    assert lost.parent_id == ride.parent_id == collector.named("accept")[0].span_id
    assert lost.end_ns <= ride.start_ns
    assert ("worker lost", {"carpool.position": position}) in lost.events
    for outer in (lost, ride):
        assert [span.name for span in collector.spans if within(span, outer)] == ["prefill", "decode"]
    _, second = collector.named("queue")
    assert second.end_ns == ride.start_ns
    assert second.start_ns == pytest.approx(lost.end_ns, abs=2e6), "it waits from the end of the lease on"


def test_a_death_of_the_model_process_is_told_in_its_ride_with_its_cause(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    service.worker()
    job = post(api, "/jobs", max_tokens=150).headers["x-carpool-job-id"]
    service.wait_for_token(job, 20)
    (info,) = service.list_workers()
    assert info.child_pid is not None
    psutil.Process(info.child_pid).kill()
    service.wait_for_end(job)
    collector.until("the ride is told", lambda: collector.named("ride"))
    (ride,) = collector.named("ride")
    (death,) = (attributes for name, attributes in ride.events if name == "model process died")
    assert death == {"carpool.cause": "signal 9 (SIGKILL) while decoding"}
    inner = sorted((span for span in collector.spans if within(span, ride)), key=lambda span: span.start_ns)
    assert [span.name for span in inner] == ["prefill", "decode", "prefill", "decode"]
    assert inner[2].attributes["carpool.position"] >= 20
    assert ride.attributes["gen_ai.usage.output_tokens"] == 150


def test_a_drained_worker_hands_back_and_both_rides_are_told_each_by_its_own(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    drained = service.worker("worker-1", drain_s=0)
    job = post(api, "/jobs", max_tokens=200).headers["x-carpool-job-id"]
    service.wait_for_token(job, 10)
    drained.signal(signal.SIGTERM)
    assert drained.wait() == 0
    assert collector.named("ride")[0].attributes["carpool.outcome"] == "handed_back", "flushed before the end"
    service.worker("worker-2", simulated_step_ms=0)
    service.wait_for_end(job)
    collector.until("both rides are told", lambda: len(collector.named("ride")) == 2)
    first, second = collector.named("ride")
    assert first.trace_id == second.trace_id
    assert second.links == [first.span_id]
    assert first.resource["service.instance.id"] != second.resource["service.instance.id"]


def test_a_cancel_and_a_failure_are_told(service: Service, collector: OtlpReceiver, api: ApiProcess) -> None:
    service.worker()
    job = post(api, "/jobs", max_tokens=2000).headers["x-carpool-job-id"]
    service.wait_for_token(job, 3)
    post(api, f"/jobs/{job}/cancel")
    poison = post(api, "/jobs", prompt="[[raise]]@2", max_tokens=5).headers["x-carpool-job-id"]
    collector.until("both rides are told", lambda: len(collector.named("ride")) == 2)
    (cancelled,) = collector.named("ride", carpool__job__id=job)
    assert ("stop requested", {"carpool.outcome": "cancelled"}) in cancelled.events
    assert (cancelled.attributes["gen_ai.response.finish_reasons"], cancelled.is_error) == (["cancelled"], False)
    (failed,) = collector.named("ride", carpool__job__id=poison)
    assert (failed.attributes["error.type"], failed.is_error) == ("engine_error", True)


def test_deliveries_of_a_webhook_are_in_the_trace(redis_url: str, tmp_path: Path, collector: OtlpReceiver) -> None:
    settings = webhook_settings(redis_url)
    with Receiver() as receiver, Service(redis_url, tmp_path) as service, ApiProcess(settings, tmp_path) as api:
        service.worker()
        with WebhooksProcess(settings, tmp_path):
            post(api, "/jobs", max_tokens=2, webhook_url=receiver.url)
            collector.until("both are told", lambda: collector.named("webhook") and collector.named("accept"))
    (webhook,) = collector.named("webhook")
    assert webhook.trace_id == collector.named("accept")[0].trace_id
    assert (webhook.kind, webhook.attributes["http.response.status_code"]) == (CLIENT, 200)
    assert receiver.url not in json.dumps(webhook.attributes)


def test_a_task_of_plain_celery_goes_on_in_the_trace_of_its_sender(service: Service, collector: OtlpReceiver) -> None:
    service.worker()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    task = service.celery.send_task("carpool.generate", kwargs={"prompt": "a", "max_tokens": 2}, headers=headers)
    service.wait_for_end(str(task.id))
    collector.until("the ride is told", lambda: collector.named("ride"))
    (ride,) = collector.named("ride")
    assert (ride.trace_id, ride.parent_id) == (TRACE, PARENT)


# --- collectors that are away ----------------------------------------------------------------------------------------


def test_a_collector_that_does_not_answer_holds_up_neither_jobs_nor_the_drain(
    service: Service, collector: OtlpReceiver, api: ApiProcess
) -> None:
    worker = service.worker()
    collector.hold.clear()
    for i in range(5):
        assert post(api, "/basic_generate", prompt=f"number {i}", max_tokens=3).status_code == 200
    eventually("a request is held", lambda: collector.num_requests > 0)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 8


def test_a_collector_that_refuses_is_no_harm(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    worker = service.worker()
    with ApiProcess(service.settings, tmp_path) as api:
        for i in range(5):
            job = post(api, "/jobs", prompt=f"number {i}", max_tokens=3).headers["x-carpool-job-id"]
            assert service.wait_for_end(job)["status"] == "succeeded"
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 8


# --- off -------------------------------------------------------------------------------------------------------------

_WITHOUT = """
import sys
for name in ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.semconv", *sys.argv[1:]):
    sys.modules[name] = None
from tasks.settings import load_settings
"""
_API_WITHOUT = f"{_WITHOUT}\nfrom api.app import create_app; import api.server; create_app(load_settings())"
_WORKER_WITHOUT = f"{_WITHOUT}\nimport worker.serve; from tasks.tracing import start_tracing\n"


@pytest.mark.parametrize(
    ("code", "more"),
    [
        # FastAPI imports OpenTelemetry's API itself
        (_API_WITHOUT, "api.tracing"),
        (f"{_WORKER_WITHOUT}assert start_tracing(load_settings(), 'worker', 'w') is None", "opentelemetry"),
        (f"{_WITHOUT}\nimport worker.webhooks.main, worker.model_worker", "opentelemetry"),
    ],
)
def test_nothing_of_opentelemetry_is_needed_where_nobody_asked_for_traces(code: str, more: str, redis_url: str) -> None:
    environment = {"PATH": "", "CARPOOL_REDIS_URL": redis_url}
    done = subprocess.run(
        [sys.executable, "-c", code, more], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_record_has_no_trace_where_nobody_asked_for_one(service: Service) -> None:
    with running_api(service.settings) as api, api.client() as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        job = client.post("/jobs", json={"prompt": "a"}, headers=headers).json()["id"]
    assert service.client.hget(f"{{carpool}}:j:{job}", "trace") is None


@pytest.mark.parametrize(
    ("traces", "environment"),
    [
        ("off", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}),
        ("auto", {}),
        ("auto", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}),
        ("auto", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}),
        ("auto", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}),
    ],
)
def test_who_does_not_want_traces_gets_none(
    traces: Any, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert start_tracing(Settings(traces=traces), "worker", "w") is None


def test_traces_that_were_asked_for_by_name_and_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SettingsError, match=r"TRACES=on: .*OTEL_EXPORTER_OTLP_PROTOCOL=grpc\. Name an endpoint"):
        start_tracing(Settings(traces="on"), "worker", "w")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((f"00-{TRACE}-{PARENT}-01", ""), f"00-{TRACE}-{PARENT}-01"),
        ((f"00-{TRACE}-{PARENT}-03", "a=b,c=d"), f"00-{TRACE}-{PARENT}-03 a=b,c=d"),
        ((f"00-{TRACE}-{PARENT}-01", "x" * 513), f"00-{TRACE}-{PARENT}-01"),
        ((f"00-{TRACE}-{PARENT}-01", "a=b\nc"), f"00-{TRACE}-{PARENT}-01"),
        ((f"00-{TRACE}-{PARENT}-00", "a=b"), ""),
        ((f"00-{'0' * 32}-{PARENT}-01", ""), ""),
        ((f"00-{TRACE}-{'0' * 16}-01", ""), ""),
        (("nonsense", "a=b"), ""),
    ],
)
def test_a_trace_is_kept_where_it_is_one_and_sampled(given: tuple[str, str], kept: str) -> None:
    assert trace_context(*given) == kept
    if kept:
        assert trace_id_of(kept) == TRACE
        assert trace_context(**headers_of(kept)) == kept
