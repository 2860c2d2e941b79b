"""Logprobs, grammars and tools through the whole product: API, Redis, Celery worker, model process, their deaths."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks import keys
from tasks.entries import TokenLogprob, token_string
from tasks.tool_calls import ToolCallParser
from tests.api_server import ApiServer, running_api
from tests.redis_server import RedisServer
from tests.service import Service, simulated_text
from tests.test_grammar import schema_params, tool
from tests.test_tool_calls import folded
from tests.tiny_models import EOS_ID, save_tiny_model
from worker import simulation

#: Six hundred tokens, so that there is time to kill somebody.
DIGITS = schema_params(
    type="array", items={"type": "integer", "minimum": 0, "maximum": 9}, minItems=300, maxItems=300
).response_format
#: Of leases and ticks, so that a killed worker is soon replaced.
SHORT = {"lease_s": 1.5, "renew_s": 0.4, "grace_s": 0.5, "reaper_tick_s": 0.3, "heartbeat_s": 0.3}


def ids_of(service: Service, job: str) -> list[int]:
    return [id for _, entry in service.entries(job) for id in entry.ids]


def logprobs_of(service: Service, job: str) -> list[TokenLogprob]:
    """All logprobs of a job's log; every token entry has one for each of its tokens, or none has."""
    entries = [entry for _, entry in service.entries(job) if entry.kind == "tokens"]
    for entry in entries:
        assert len(entry.lp) in (0, len(entry.ids))
    return [item for entry in entries for item in entry.lp]


# --- the simulated engine -------------------------------------------------------------------------------------------


def simulated_logprobs(prompt: str, seed: int, tokens: int, count: int) -> list[TokenLogprob]:
    """As the page of the simulated engine states them."""

    def item(id: int, value: float) -> TokenLogprob:
        return {"id": id, "lp": round(value, 6), "b": list(simulation.token_text(id).encode())}

    return [
        {**item(*simulation.alternatives(id, 1)[0]), "top": [item(*one) for one in simulation.alternatives(id, count)]}
        for id in simulation.completion_ids(prompt, seed, tokens)
    ]


def test_logprobs_outlive_a_killed_worker_and_each_token_has_its_own_once(redis_url: str, tmp_path: Path) -> None:
    with Service(redis_url, tmp_path, simulated_step_ms=20, **SHORT) as service:
        first = service.worker()
        job = service.submit("Hello, I am", seed=3, max_tokens=60, logprobs=2)
        without = service.submit("Hello, I am", seed=3, max_tokens=60)
        service.wait_for_token(job, 10)
        first.signal(signal.SIGKILL)
        service.worker("worker-2")

        view = service.wait_for_end(job)
        service.wait_for_end(without)

        assert view["attempts"] == 2
        assert view["text"] == simulated_text("Hello, I am", 3, 60)
        assert logprobs_of(service, job) == simulated_logprobs("Hello, I am", 3, 60, 2)
        assert logprobs_of(service, without) == []
        assert ids_of(service, without) == ids_of(service, job)
        service.assert_whole(job)


def test_text_that_waits_for_a_stop_string_has_its_logprobs_in_the_log_at_once(redis_url: str, tmp_path: Path) -> None:
    words = simulated_text("Hello, I am", 3, 8).split()
    stop = " ".join(words[3:6])
    with Service(redis_url, tmp_path) as service:
        service.worker()
        job = service.submit("Hello, I am", seed=3, logprobs=1, stop=["never", stop, f"{stop} x", words[7]])

        assert service.wait_for_end(job)["finish_reason"] == "stop"

        assert service.view(job)["text"] == " " + " ".join(words[:3]) + " "
        assert logprobs_of(service, job) == simulated_logprobs("Hello, I am", 3, 6, 1)


def test_what_the_simulated_engine_lacks_fails_the_job_by_name(redis_url: str, tmp_path: Path) -> None:
    with Service(redis_url, tmp_path) as service:
        service.worker()
        view = service.wait_for_end(service.submit(response_format={"type": "json_object"}))

        assert (view["status"], view["error"]["code"]) == ("failed", "unsupported_field")
        assert "response_format" in view["error"]["message"]


# --- a tiny real model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("structured")
    model = save_tiny_model(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1_500}))
    settings = {"engine": "transformers", "model": str(model), "dtype": "float32", "device": "cpu", **SHORT}
    with (
        RedisServer(folder / "redis") as redis,
        Service(redis.url, folder, **settings) as running,
    ):
        running.worker(ready_s=120)
        yield running


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


def run(api: ApiServer, **body: Any) -> dict[str, Any]:
    with api.client(timeout=70) as client:
        response = client.post("/jobs", json=body)
        assert response.status_code == 202, response.text
        job: dict[str, Any] = client.get(f"/jobs/{response.json()['id']}", params={"wait": 60}).json()
        return job


def chat(text: str = "go") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.timeout(200)
def test_a_model_answers_in_a_schema_with_logprobs_and_calls_a_tool(api: ApiServer, service: Service) -> None:
    schema = schema_params(
        type="object",
        properties={"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        required=["n"],
        additionalProperties=False,
    )
    job = run(api, messages=chat(), seed=1, logprobs=3, response_format=schema.response_format)
    assert (job["status"], job["finish_reason"]) == ("succeeded", "stop")
    assert json.loads(job["text"]).keys() == {"n"}
    items = logprobs_of(service, job["id"])
    assert "".join(map(token_string, items)) == job["text"]
    assert [len(item["top"]) for item in items] == [3] * job["usage"]["completion_tokens"]

    call = tool("f", a={"type": "boolean"})
    job = run(api, messages=chat(), seed=2, tools=[call], tool_choice="required", parallel_tool_calls=False)
    parser = ToolCallParser()
    assert folded(parser.feed(job["text"]) + parser.finish()) in [("", [("f", f'{{"a":{x}}}')]) for x in VALUES]
    assert logprobs_of(service, job["id"]) == []

    said = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}
    turns = [{"role": "assistant", "tool_calls": [said]}, {"role": "tool", "tool_call_id": "c1", "content": "yes"}]
    job = run(api, messages=[*chat(), *turns], max_tokens=5, tools=[call])
    assert job["status"] == "succeeded"


def test_a_wrong_shape_is_refused_before_there_is_a_job(api: ApiServer) -> None:
    with api.client() as client:
        for field, value in (("response_format", {"type": "xml"}), ("logprobs", 21), ("tools", [{"type": "x"}])):
            response = client.post("/jobs", json={"messages": chat(), field: value})
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (422, "invalid_request")
            assert field in error["param"]


VALUES = [space + value for space, value in itertools.product(("", " "), ("true", "false"))]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"response_format": schema_params(type="strange").response_format}, "invalid_request"),
        ({"logit_bias": {"999999": 1}}, "invalid_request"),
    ],
)
def test_what_only_the_model_can_refuse_fails_the_job_with_the_cause(api: ApiServer, body: Any, code: str) -> None:
    job = run(api, messages=chat(), **body)

    assert (job["status"], job["error"]["code"]) == ("failed", code)
    assert "strange" in job["error"]["message"] or "999999" in job["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [{"response_format": DIGITS, "max_tokens": 1_000}, {"max_tokens": 600, "logit_bias": {str(EOS_ID): -100}}],
    ids=["grammar", "free"],
)
@pytest.mark.timeout(200)
def test_a_killed_model_process_changes_no_draw_and_keeps_the_logprobs(
    service: Service, fields: dict[str, Any]
) -> None:
    given = {"seed": 11, "temperature": 1.2, "repetition_penalty": 1.1, "logprobs": 2, **fields}
    alone = service.submit("go", **given)
    service.wait_for_end(alone, 100)
    job = service.submit("go", **given)
    service.wait_for_token(job, 40)
    child = service.list_workers()[0].child_pid
    assert child is not None
    psutil.Process(child).kill()

    view = service.wait_for_end(job, 100)

    assert view["status"] == "succeeded", view
    deaths, struck_at = service.client.hmget(keys.record(job), ["deaths", "struck_at"])
    assert (int(deaths or 0), 40 <= int(struck_at or 0) < len(ids_of(service, job))) == (1, True)
    assert ids_of(service, job) == ids_of(service, alone)
    for one, other in zip(logprobs_of(service, job), logprobs_of(service, alone), strict=True):
        assert one["id"] == other["id"]
        assert one["lp"] == pytest.approx(other["lp"], abs=1e-3)
    if "response_format" in fields:
        assert len(json.loads(view["text"])) == 300
