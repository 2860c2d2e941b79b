"""What is served now: `/v1/models`, requests for models without a worker, and `/health/ready` of each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import openai
import pytest

from tasks.settings import Settings
from tests.api_server import ApiServer, running_api
from tests.batch_lines import ENDED, answers_of, chat_line, submit
from tests.openai_clients import openai_client
from tests.scripted_owner import ScriptedOwner
from tests.service import eventually

HELLO = [{"role": "user", "content": "Hello"}]
#: Every endpoint that makes jobs and takes a model, with a body that it takes.
ENDPOINTS: Mapping[str, Mapping[str, Any]] = {
    "/basic_generate": {"prompt": "x"},
    "/generate": {"prompts": ["x", "y"]},
    "/generate_stream": {"prompt": "x"},
    "/jobs": {"prompt": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "x"},
}


def settings_of(redis_url: str, alias: str = "", **more: Any) -> Settings:
    return Settings(redis_url=redis_url, engine="simulated", served_model_name=alias, **more)


@pytest.fixture
def alpha(redis_url: str) -> Iterator[ScriptedOwner]:
    with ScriptedOwner(settings_of(redis_url, "alpha"), name="worker-a") as owner:
        yield owner


@pytest.fixture
def beta(redis_url: str) -> Iterator[ScriptedOwner]:
    with ScriptedOwner(settings_of(redis_url, "beta"), name="worker-b") as owner:
        yield owner


@contextmanager
def api_of(redis_url: str, **more: Any) -> Iterator[tuple[ApiServer, httpx2.Client]]:
    """An API that has been told of no model."""
    with running_api(Settings(redis_url=redis_url, **more)) as api, api.client() as client:
        yield api, client


def listed(client: httpx2.Client) -> list[str]:
    return [model["id"] for model in client.get("/v1/models").json()["data"]]


def refusal(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# --- /v1/models ------------------------------------------------------------------------------------------------------


def test_what_a_living_worker_serves_or_loads_is_listed_with_its_aliases_and_nothing_else(
    redis_url: str, alpha: ScriptedOwner, beta: ScriptedOwner
) -> None:
    with api_of(redis_url, model_aliases="gpt-4o=alpha,gpt-4o-mini=beta,ghost=nobody") as (_, client):
        assert listed(client) == []
        alpha.heartbeat("loading")
        assert listed(client) == ["alpha", "gpt-4o"]
        beta.heartbeat("ready")
        assert listed(client) == ["alpha", "beta", "gpt-4o", "gpt-4o-mini"]
        alpha.heartbeat("draining")
        assert listed(client) == ["beta", "gpt-4o-mini"]
        alpha.heartbeat("restarting")
        assert listed(client) == ["alpha", "beta", "gpt-4o", "gpt-4o-mini"]


def test_a_model_whose_worker_is_gone_is_not_found_and_one_starts_it_so(
    redis_url: str, alpha: ScriptedOwner, beta: ScriptedOwner
) -> None:
    beta.heartbeat()
    with running_api(Settings(redis_url=redis_url, model_aliases="gpt-4o=alpha")) as api, openai_client(api) as client:
        for name in ("alpha", "gpt-4o"):
            with pytest.raises(openai.NotFoundError) as missing:
                client.models.retrieve(name)
            assert missing.value.code == "model_not_found"
            message = str(missing.value)
            assert f"no worker serves the model '{name}' now" in message
            assert "carpool worker --served-model-name alpha" in message
            assert "Served now: beta" in message
        with pytest.raises(openai.NotFoundError, match="no worker has ever served the model 'gamma'"):
            client.models.retrieve("gamma")
        alpha.heartbeat()
        assert client.models.retrieve("gpt-4o").to_dict()["root"] == "alpha"


def test_a_model_wins_over_an_alias_of_its_name_in_the_list_and_on_the_way(
    redis_url: str, alpha: ScriptedOwner, beta: ScriptedOwner
) -> None:
    alpha.heartbeat()
    beta.heartbeat()
    with api_of(redis_url, model_aliases="alpha=beta") as (_, client):
        assert client.get("/v1/models/alpha").json()["root"] == "alpha"
        assert client.post("/jobs", json={"prompt": "x", "model": "alpha"}).json()["model"] == "alpha"


# --- unknown models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["wait", "refuse"])
@pytest.mark.parametrize("path", [*ENDPOINTS, "/generate_vllm"])
def test_an_unknown_model_is_404_everywhere(redis_url: str, alpha: ScriptedOwner, path: str, policy: str) -> None:
    alpha.heartbeat()
    body = {**ENDPOINTS.get(path, {"prompts": ["x"]}), "model": "gamma"}
    with api_of(redis_url, without_worker=policy) as (_, client):
        response = client.post(path, json=body)
        assert refusal(response) == (404, "model_not_found")
        assert "'gamma'" in response.json()["error"]["message"]
        assert "There is: alpha" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "model"
        assert client.get("/jobs").json()["data"] == []


def test_the_model_of_settings_that_name_none_is_unknown_once_others_are_served(
    redis_url: str, alpha: ScriptedOwner
) -> None:
    with api_of(redis_url) as (_, client):
        body = {"prompt": "x", "model": "SmolLM2-135M-Instruct"}
        assert refusal(client.post("/jobs", json=body)) == (404, "model_not_found")
    with api_of(redis_url, default_model="SmolLM2-135M-Instruct") as (_, client):
        assert client.post("/jobs", json=body).status_code == 202, "somebody has named it, so a worker is to come"


def test_only_a_vllm_worker_s_model_is_there_for_generate_vllm_and_aliases_count(
    redis_url: str, alpha: ScriptedOwner
) -> None:
    alpha.heartbeat()
    with (
        api_of(redis_url, model_aliases="gpt-4o=fast") as (_, client),
        ScriptedOwner(settings_of(redis_url, "fast"), engine="vllm", name="worker-v") as fast,
    ):
        asking = {"prompts": ["x"], "model": "gpt-4o", "deadline_s": 0.3}
        assert refusal(client.post("/generate_vllm", json=asking)) == (503, "no_worker")
        fast.heartbeat()
        eventually("it is seen", lambda: client.post("/generate_vllm", json=asking).status_code != 503)
        response = client.post("/generate_vllm", json={**asking, "model": "alpha"})
        assert refusal(response) == (404, "model_not_found")


def test_a_model_that_comes_is_known_to_every_replica_at_once_and_to_one_that_starts_later(redis_url: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(api_of(redis_url))[1] for _ in range(2)]
        body = {"prompt": "x", "model": "alpha"}
        for client in clients:
            assert client.post("/jobs", json=body).status_code == 404
        with ScriptedOwner(settings_of(redis_url, "alpha")):
            for client in clients:
                assert client.post("/jobs", json=body).status_code == 202
    with api_of(redis_url) as (_, client):
        assert client.post("/jobs", json=body).status_code == 202, "it waits: nobody serves it now"
        assert len(client.get("/jobs").json()["data"]) == 3


# --- known models without a worker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_known_model_without_a_worker_waits_and_is_refused_where_the_settings_say_so(
    redis_url: str, alpha: ScriptedOwner, beta: ScriptedOwner, path: str
) -> None:
    alpha.heartbeat()
    body = {**ENDPOINTS[path], "model": "beta"}
    with api_of(redis_url, without_worker="refuse") as (_, client):
        response = client.post(path, json=body)
        assert refusal(response) == (503, "no_worker")
        assert response.headers["retry-after"] == "10"
        message = response.json()["error"]["message"]
        assert "no worker serves the model 'beta' now" in message
        assert "carpool worker --served-model-name beta" in message
        assert client.get("/jobs").json()["data"] == []
        assert client.post("/jobs", json={"prompt": "x", "model": "alpha"}).status_code == 202
    with api_of(redis_url, sync_wait_s=0.2) as (_, client):
        with client.stream("POST", path, json=body) as response:
            assert response.status_code in (200, 202, 504)
        jobs = client.get("/jobs").json()["data"]
        assert "beta" in {job["model"] for job in jobs}, "it was accepted, and waits"


@pytest.mark.parametrize("state", ["loading", "restarting", "ready"])
def test_a_worker_that_loads_is_a_worker(redis_url: str, alpha: ScriptedOwner, state: str) -> None:
    body = {"prompt": "x", "model": "alpha"}
    with api_of(redis_url, without_worker="refuse") as (_, client):
        assert client.post("/jobs", json=body).status_code == 503
        alpha.heartbeat(state)
        assert client.post("/jobs", json=body).status_code == 202, "also within the second of what is remembered"


def test_what_was_accepted_is_in_nobody_s_way_when_the_worker_goes(redis_url: str, alpha: ScriptedOwner) -> None:
    alpha.heartbeat()
    with api_of(redis_url, without_worker="refuse") as (_, client):
        key = {"Idempotency-Key": "order-17"}
        body = {"prompt": "x", "model": "alpha", "max_tokens": 2}
        accepted = client.post("/jobs", json=body, headers=key)
        assert accepted.status_code == 202
        alpha.heartbeat("draining")
        eventually("it refuses", lambda: client.post("/jobs", json=body).status_code == 503)
        again = client.post("/jobs", json=body, headers=key)
        assert (again.status_code, again.json()["id"]) == (202, accepted.json()["id"])
        other = client.post("/jobs", json={**body, "prompt": "y"}, headers=key)
        assert refusal(other) == (409, "idempotency_conflict")
        assert client.post("/jobs", json=body, headers={"Idempotency-Key": "order-18"}).status_code == 503
        alpha.run([" a", " b"], accepted.json()["id"])
        assert client.get(f"/jobs/{accepted.json()['id']}").json()["text"] == " a b"


def test_a_batch_is_taken_whoever_serves_its_models_and_a_line_of_an_unknown_one_is_an_error(
    redis_url: str, alpha: ScriptedOwner
) -> None:
    settings = Settings(redis_url=redis_url, without_worker="refuse", reaper_tick_s=0.1)
    with running_api(settings) as api, openai_client(api) as client:
        lines = [chat_line(1, model="alpha"), chat_line(2, model="gamma"), chat_line(3, model="alpha")]
        batch = submit(client, lines)
        alpha.run([" a"])
        alpha.run([" b"])
        ended = eventually("it ends", lambda: (found := client.batches.retrieve(batch.id)).status in ENDED and found)
        assert (ended.request_counts.completed, ended.request_counts.failed) == (2, 1)
        (error,) = answers_of(client, ended.error_file_id)
        assert (error["custom_id"], error["response"]["status_code"]) == ("line-2", 404)
        assert error["response"]["body"]["error"]["code"] == "model_not_found"


# --- no model in the request -----------------------------------------------------------------------------------------


def test_a_request_without_a_model_goes_where_somebody_serves(
    redis_url: str, alpha: ScriptedOwner, beta: ScriptedOwner
) -> None:
    def model_of_a_job(client: httpx2.Client) -> Any:
        return client.post("/jobs", json={"prompt": "x"}).json()["model"]

    alpha.heartbeat()
    with api_of(redis_url) as (_, client):
        assert model_of_a_job(client) == "alpha", "beta was registered last, and nobody serves it"
        beta.heartbeat()
        eventually("it is seen", lambda: model_of_a_job(client) == "beta")
    with api_of(redis_url, default_model="alpha") as (_, client):
        alpha.heartbeat("draining")
        assert model_of_a_job(client) == "alpha", "a default that somebody has named stays"


# --- /health/ready ---------------------------------------------------------------------------------------------------


def ready(client: httpx2.Client, holds: Callable[[httpx2.Response], bool], **query: str) -> httpx2.Response:
    """The answer, once it is as wanted: it may be a second old."""
    found = eventually(
        "ready says so", lambda: (answer := client.get("/health/ready", params=query)) and holds(answer) and [answer]
    )
    answer = found[0]
    assert isinstance(answer, httpx2.Response)
    return answer


def test_ready_names_every_model_with_its_state_and_queue(
    redis_url: str, alpha: ScriptedOwner, beta: ScriptedOwner
) -> None:
    with api_of(redis_url) as (_, client):
        alpha.heartbeat("loading", phase="loading the weights", progress=0.5)
        beta.heartbeat("loading", phase="starting")
        waiting = ready(client, lambda answer: len(answer.json()["models"]) == 2)
        assert waiting.status_code == 503
        expected = "worker-a (alpha) loading the weights 50 %; worker-b (beta) starting"
        assert waiting.json()["waiting_for"] == expected
        beta.heartbeat("ready")
        client.post("/jobs", json={"prompt": "x", "model": "alpha"})
        body = ready(client, lambda answer: answer.status_code == 200 and answer.json()["models"][0]["waiting"] == 1)
        assert body.json() == {
            "status": "ready",
            "models": [
                {"model": "alpha", "state": "loading", "workers": 1, "slots": 4, "free": 0, "waiting": 1},
                {"model": "beta", "state": "ready", "workers": 1, "slots": 4, "free": 4, "waiting": 0},
            ],
        }


def test_ready_can_be_asked_of_one_model(redis_url: str, alpha: ScriptedOwner, beta: ScriptedOwner) -> None:
    beta.heartbeat()
    with api_of(redis_url, model_aliases="gpt-4o=beta") as (_, client):
        assert ready(client, lambda answer: answer.status_code == 200, model="gpt-4o").json()["models"][0]["free"] == 4
        missing = client.get("/health/ready", params={"model": "alpha"})
        assert refusal(missing) == (503, "no_worker")
        assert "carpool worker --served-model-name alpha" in missing.json()["error"]["message"]
        assert refusal(client.get("/health/ready", params={"model": "gamma"})) == (404, "model_not_found")


def test_a_model_with_jobs_and_without_a_worker_is_shown(redis_url: str, alpha: ScriptedOwner) -> None:
    with api_of(redis_url) as (_, client):
        client.post("/jobs", json={"prompt": "x", "model": "alpha"})
        shown = ready(client, lambda answer: bool(answer.json().get("models")))
        assert shown.status_code == 503
        state = {"model": "alpha", "state": "no worker", "workers": 0, "slots": 0, "free": 0, "waiting": 1}
        assert shown.json()["models"] == [state]
