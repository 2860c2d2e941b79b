"""`/metrics`: true after jobs, kills and outages, bounded, and cheap."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.registry import Collector

from api import metrics
from api.metric_families import MOST_MODELS, OTHER, ledger_families
from tasks import keys
from tasks.calls import Call
from tasks.metric_calls import MetricCalls, PoolNumbers
from tasks.metric_histograms import FIRST_TOKEN, OF_JOBS, QUEUE, WHOLE
from tasks.registry import ModelInfo, register_model
from tasks.settings import Settings
from tests.api_keys import make_key
from tests.api_server import ApiServer, running_api, tokens_of
from tests.redis_server import RedisServer
from tests.scrapes import Scrape, parse, scrape
from tests.service import Service, eventually

MODEL = "simulated"


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path, max_batch_size=2, lease_s=2, renew_s=0.5, grace_s=2, heartbeat_s=0.5) as service:
        yield service


@pytest.fixture
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


def later(client: httpx2.Client, what: str, holds: Callable[[Scrape], bool]) -> Scrape:
    """A scrape of which something is true, in the end."""

    def found() -> Scrape | None:
        now = scrape(client)
        return now if holds(now) else None

    result = eventually(what, found)
    assert isinstance(result, Scrape)
    return result


def test_what_jobs_did_is_counted(service: Service, client: httpx2.Client) -> None:
    service.worker()
    for _ in range(3):
        assert client.post("/basic_generate", json={"prompt": "Hello, I am", "max_tokens": 5}).status_code == 200
    id = service.submit(max_tokens=8, priority="low")
    service.wait_for_end(id)
    now = later(client, "all is counted", lambda now: now.value("carpool_request_success_total", model=MODEL) == 4)
    assert now.value("carpool_request_success_total", model=MODEL, finished_reason="length") == 4
    assert now.value("carpool_generation_tokens_total", model=MODEL) == 3 * 5 + 8
    assert now.value("carpool_prompt_tokens_total", model=MODEL) > 0
    for name in ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert now.value(f"carpool_{name}_count", model=MODEL, priority="normal") == 3
        assert now.value(f"carpool_{name}_count", model=MODEL, priority="low") == 1
        assert now.value(f"carpool_{name}_bucket", model=MODEL, priority="low", le="+Inf") == 1
    assert now.value("carpool_request_generation_tokens_sum", model=MODEL) == 23
    assert (now.value("carpool_slots", model=MODEL), now.value("carpool_workers", state="ready")) == (2, 1)
    assert now.value("carpool_redis_up") == 1
    # what the worker measures comes with its heartbeat
    now = later(client, "steps are counted", lambda now: now.value("carpool_step_batch_size_sum", model=MODEL) == 23)
    assert now.value("carpool_inter_token_latency_seconds_count", model=MODEL) == 3 * 4 + 7
    assert now.value("carpool_step_seconds_count", model=MODEL) >= 23


def test_a_dead_workers_jobs_leave_what_runs_and_no_counter_falls_or_counts_twice(
    service: Service, client: httpx2.Client
) -> None:
    first = service.worker("first", simulated_step_ms=20)
    ids = [service.submit(f"number {n}", max_tokens=150) for n in range(3)]
    for id in ids[:2]:
        service.wait_for_token(id, 5)
    now = later(client, "two ride", lambda now: now.value("carpool_num_requests_running", model=MODEL) == 2)
    assert now.value("carpool_num_requests_waiting", model=MODEL) == 1
    before = {
        sample.name: sample.value
        for family in now.families.values()
        if family.type == "counter"
        for sample in family.samples
        if sample.labels.get("model") == MODEL
    }
    first.signal(signal.SIGKILL)
    now = later(client, "nothing rides", lambda now: now.value("carpool_num_requests_running", model=MODEL) == 0)
    assert now.value("carpool_num_requests_waiting", model=MODEL) == 3
    assert now.value("carpool_oldest_waiting_seconds", model=MODEL) > 0
    later(client, "its heartbeat is over", lambda now: now.value("carpool_workers", model=MODEL) == 0)
    service.worker("second", simulated_step_ms=0)
    for id in ids:
        service.wait_for_end(id)
        service.assert_whole(id)
    now = later(client, "all have ended", lambda now: now.value("carpool_request_success_total", model=MODEL) == 3)
    assert now.value("carpool_generation_tokens_total", model=MODEL) == 3 * 150, "each token once"
    assert now.value("carpool_recoveries_total", model=MODEL, cause="worker_lost") == 2
    for name in ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert now.value(f"carpool_{name}_count", model=MODEL) == 3
    for name, value in before.items():
        assert now.value(name, model=MODEL) >= value
    assert now.value("carpool_num_requests_waiting", model=MODEL) == 0


def test_streams_and_refusals_are_those_of_the_process(service: Service, client: httpx2.Client) -> None:
    service.worker(simulated_step_ms=20)
    id = service.submit(max_tokens=200)
    with client.stream("GET", f"/jobs/{id}/stream") as response:
        stream = response.iter_bytes()
        next(stream)
        assert scrape(client).value("carpool_stream_clients") == 1
    later(client, "the client has left", lambda now: now.value("carpool_stream_clients") == 0)
    with client.stream("GET", f"/jobs/{id}/stream", headers={"last-event-id": "2"}) as response:
        assert tokens_of(response)[0].id == "3"
    assert client.post("/jobs", json={"prompt": "x", "maximum": 1}).status_code == 422
    assert client.post("/jobs", json={"prompt": "x", "model": "nobody"}).status_code == 404
    now = scrape(client)
    assert now.value("carpool_stream_resumes_total") == 1
    assert now.value("carpool_refusals_total", code="unsupported_field") == 1
    assert now.value("carpool_refusals_total", code="model_not_found") == 1
    assert now.value("carpool_http_requests_total", endpoint="/jobs/{id}/stream", status="200") == 2


def test_a_job_that_fails_is_no_refusal(service: Service, client: httpx2.Client) -> None:
    response = client.post("/basic_generate", json={"prompt": "x", "deadline_s": 1})
    assert response.json()["error"]["code"] == "deadline_exceeded"
    now = scrape(client)
    assert now.value("carpool_refusals_total") == 0
    assert now.value("carpool_request_failure_total", code="deadline_exceeded") == 1
    assert now.value("carpool_http_requests_total", endpoint="/basic_generate", status="504") == 1


def test_nobody_can_make_up_series(client: httpx2.Client) -> None:
    for n in range(20):
        client.get(f"/nowhere-{n}")
        client.get(f"/jobs/made-up-{n}")
        client.request(f"M{n}", "/jobs")
        client.post("/jobs", json={"prompt": "x", "model": f"made-up-{n}"})
    now = scrape(client)
    assert "made-up" not in repr(now.families)
    assert now.values_of("model") == {MODEL}
    assert now.values_of("endpoint") == {"/jobs", "/jobs/{id}", "other"}
    assert {method for method in now.values_of("method") if method.startswith("M")} == set()


def test_prometheus_gets_the_format_that_it_asks_for(client: httpx2.Client) -> None:
    plain = client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    other = client.get("/metrics", headers={"accept": accept})
    assert other.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    named = {family.name for family in parse_openmetrics(other.text)}  # type: ignore[no-untyped-call]
    assert set(parse(plain.text).families) == (named - {"carpool_build"}) | {"carpool_build_info"}


def test_without_redis_it_says_so_and_makes_up_no_zeros(own_redis: RedisServer, tmp_path: Path) -> None:
    with (
        Service(own_redis.url, tmp_path, redis_timeout_s=0.5) as service,
        running_api(service.settings) as api,
        api.client() as client,
    ):
        service.wait_for_end(_cancelled(service))
        assert scrape(client).value("carpool_request_failure_total", code="cancelled") == 1
        own_redis.pause()
        try:
            started = time.monotonic()
            away = later(client, "it is known", lambda now: now.value("carpool_redis_up") == 0)
            assert time.monotonic() - started < 10
            assert not {name for name in away.families if "request_" in name or "workers" in name}
            assert away.value("process_resident_memory_bytes") > 0
            assert "carpool_refusals" in away.families
        finally:
            own_redis.resume()
        back = later(client, "it is back", lambda now: now.value("carpool_redis_up") == 1)
        assert back.value("carpool_request_failure_total", code="cancelled") == 1


def _cancelled(service: Service) -> str:
    id = service.submit()
    service.cancel(id)
    return id


def test_it_needs_a_key_where_there_are_any_also_while_redis_is_away(own_redis: RedisServer, tmp_path: Path) -> None:
    with Service(own_redis.url, tmp_path, redis_timeout_s=0.5) as service:
        holder = make_key(service.client, "prometheus")
        with running_api(service.settings) as api, api.client() as client:
            assert client.get("/metrics").status_code == 401
            assert client.get("/metrics", headers=holder.headers).status_code == 200
            own_redis.pause()
            try:
                found = eventually(
                    "it is known",
                    lambda: (
                        "carpool_redis_up 0.0" in (answer := client.get("/metrics", headers=holder.headers)).text
                        and answer
                    ),
                )
                assert found.status_code == 200
                assert client.get("/metrics").status_code in (401, 503)
                assert client.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code in (401, 503)
            finally:
                own_redis.resume()


def numbers(pool: str, **counted: int) -> PoolNumbers:
    states = {"ready": 1}
    return PoolNumbers(pool, 1, 2, 0, 3000, 2, 20, None, 4, 1, 7, states, counted)


def test_models_beyond_the_bound_are_one_more() -> None:
    pools = [numbers(f"m{n:02}", **{"ended:succeeded:stop": 2}) for n in range(MOST_MODELS + 5)]
    pools.insert(0, numbers(OTHER, **{"ended:succeeded:stop": 2}))
    found = {family.name: family for family in ledger_families(pools, Settings())}
    running = {sample.labels["model"]: sample.value for sample in found["carpool_num_requests_running"].samples}
    assert len(running) <= MOST_MODELS
    assert running[OTHER] == len(pools) - len(running) + 1
    assert sum(running.values()) == len(pools)
    ended = [
        sample.value
        for sample in found["carpool_request_success"].samples
        if sample.labels == {"model": OTHER, "finished_reason": "stop"}
    ]
    assert ended == [2 * running[OTHER]]
    assert not found["carpool_queue_eta_seconds"].samples, "nobody can tell"


def test_labels_that_this_release_does_not_know_are_one_more() -> None:
    pool = numbers("m", **{"ended:failed:new_code": 2, "ended:succeeded:new_reason": 3, "recovered:magic": 4})
    found = {family.name: family for family in ledger_families([pool], Settings())}
    for name, value in (("request_failure", 2), ("request_success", 3), ("recoveries", 4)):
        samples = found[f"carpool_{name}"].samples
        assert [sample.value for sample in samples if OTHER in sample.labels.values()] == [value]


def test_scrapes_that_come_together_ask_redis_once(
    service: Service, api: ApiServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    gauges = MetricCalls.gauges

    def counting(calls: MetricCalls) -> Call[list[PoolNumbers]]:
        nonlocal asked
        asked += 1
        return gauges(calls)

    monkeypatch.setattr(MetricCalls, "gauges", counting)
    monkeypatch.setattr(metrics, "_FRESH_S", 60.0)
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: httpx2.get(f"{api.url}/metrics", trust_env=False), range(20)))
    assert all("carpool_redis_up 1.0" in answer.text for answer in answers)
    assert asked == 1


def test_a_scrape_of_many_models_leaves_the_event_loop_to_the_streams(
    service: Service, api: ApiServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_FRESH_S", 0.0)  # each scrape asks Redis anew
    for n in range(MOST_MODELS):
        pool = f"model-{n}"
        register_model(service.client, ModelInfo(pool, pool, "simulated", registered_at=time.time()))
        counted = {
            one.field(bound, of_class): 5
            for one in OF_JOBS
            for of_class in (("high", "normal", "low") if one in (QUEUE, FIRST_TOKEN, WHOLE) else ("all",))
            for bound in one.bounds
        }
        service.client.hset(keys.counted(pool), mapping=counted)  # type: ignore[arg-type]
    assert len(scrape(client).families["carpool_time_to_first_token_seconds"].samples) > 2000
    spent = []
    for _ in range(5):
        before = api.call(time.thread_time)
        scrape(client)
        spent.append(api.call(time.thread_time) - before)
    assert min(spent) < 0.005, spent


def test_the_text_is_made_beside_the_event_loop(
    api: ApiServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in: list[int] = []
    choose = choose_encoder

    def choosing(accept: str) -> tuple[Callable[[Collector], bytes], str]:
        encode, content_type = choose(accept)

        def encoding(found: Collector) -> bytes:
            made_in.append(threading.get_ident())
            return encode(found)

        return encoding, content_type

    monkeypatch.setattr(metrics, "choose_encoder", choosing)
    assert scrape(client).value("carpool_redis_up") == 1
    assert made_in
    assert made_in[0] != api.call(threading.get_ident)
