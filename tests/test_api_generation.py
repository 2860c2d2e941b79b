"""The endpoints that wait: what they ask for by default, how they answer each end, what a client that leaves does."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import httpx2
import pytest

from tasks import keys
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, tokens_of, until
from tests.scripted_owner import ScriptedOwner

OPENAI_NAMES = [
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias",
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/basic_generate": {"prompt": "x"},
    "/generate": {"prompts": ["x"]},
    "/generate_stream": {"prompt": "x"},
    "/generate_vllm": {"prompts": ["x"]},
    "/jobs": {"prompt": "x"},
}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def post(threads: ThreadPoolExecutor, client: httpx2.Client, path: str, **body: Any) -> Future[httpx2.Response]:
    return threads.submit(lambda: client.post(path, json={**BODIES[path], **body}))


def params_of(owner: ScriptedOwner, id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(owner.client.hget(keys.record(id), "params")))
    return found


def status_of(owner: ScriptedOwner, id: str) -> str:
    view = owner.ledger.run(owner.calls.view([id]))[0]
    assert view is not None
    return str(view["status"])


@pytest.mark.parametrize(
    ("path", "max_tokens", "temperature", "top_p"),
    [
        ("/basic_generate", 50, 0.0, 1.0),
        ("/generate", 50, 0.0, 1.0),
        ("/generate_stream", 20, 0.7, 1.0),
        ("/generate_vllm", 20, 0.7, 0.95),
        ("/jobs", 256, 1.0, 1.0),
    ],
)
def test_each_endpoint_has_its_own_defaults(
    threads: ThreadPoolExecutor,
    settings: Settings,
    client: httpx2.Client,
    path: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
) -> None:
    with ScriptedOwner(settings, engine="vllm") as owner:
        owner.heartbeat()
        answer = post(threads, client, path)
        id = owner.next_job()
        params = params_of(owner, id)
        owner.run([" a"], id)
        assert answer.result(10).status_code in (200, 202)
    assert (params["max_tokens"], params["temperature"], params["top_p"]) == (max_tokens, temperature, top_p)


def test_prompt_and_completion_come_back(
    threads: ThreadPoolExecutor, client: httpx2.Client, owner: ScriptedOwner
) -> None:
    answer = post(threads, client, "/basic_generate", prompt="Grüße 🚗")
    id = owner.run([" a", "\n"])
    response = answer.result(10)
    assert response.json() == {"generated_text": "Grüße 🚗 a\n"}
    assert response.headers["x-carpool-job-id"] == id
    assert response.headers["location"] == f"/jobs/{id}"


def test_a_list_of_prompts_is_answered_in_order_whatever_ends_first(
    threads: ThreadPoolExecutor, client: httpx2.Client, owner: ScriptedOwner
) -> None:
    answer = post(threads, client, "/generate", prompts=["a", "b", "c"])
    group = owner.next_job().rpartition(".")[0]
    for index in (2, 0, 1):
        owner.run([f" {index}"], f"{group}.{index}")
    response = answer.result(10)
    assert response.json() == {"generated_texts": ["a 0", "b 1", "c 2"]}
    assert response.headers["x-carpool-job-id"] == group
    job = client.get(f"/jobs/{group}").json()
    assert job["children"] == [f"{group}.{index}" for index in range(3)]
    assert job["texts"] == [" 0", " 1", " 2"]


def test_256_prompts_are_one_group(threads: ThreadPoolExecutor, client: httpx2.Client, owner: ScriptedOwner) -> None:
    answer = post(threads, client, "/generate", prompts=[str(number) for number in range(256)])
    for _ in range(256):
        owner.run([" x"])
    assert answer.result(10).json()["generated_texts"] == [f"{number} x" for number in range(256)]


def test_more_prompts_than_the_setting_allows_are_refused(redis_url: str) -> None:
    with running_api(Settings(redis_url=redis_url, engine="simulated", max_prompts=2)) as api, api.client() as client:
        response = client.post("/generate", json={"prompts": ["a"] * 3})
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "prompts"
    assert "at most 2" in response.json()["error"]["message"]


def test_vllm_answers_completions_alone(threads: ThreadPoolExecutor, settings: Settings, client: httpx2.Client) -> None:
    with ScriptedOwner(settings, engine="vllm") as owner:
        owner.heartbeat("loading")
        answer = post(threads, client, "/generate_vllm", prompts=["a", "b"])
        for _ in range(2):
            owner.run([" x"])
        assert answer.result(10).json() == {"generated_texts": [" x", " x"]}


def test_vllm_without_a_vllm_worker_is_503_with_advice(client: httpx2.Client, owner: ScriptedOwner) -> None:
    owner.heartbeat()
    response = client.post("/generate_vllm", json={"prompts": ["a"]})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_worker"
    assert "carpool worker --engine vllm" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "10"
    assert client.post("/generate_vllm", json={"prompts": []}).json() == {"generated_texts": []}


ERROR = {"message": "it broke", "type": "server_error", "param": None, "code": "engine_error"}
TOO_LONG = {"message": "9 and 8", "type": "invalid_request_error", "param": None, "code": "context_length_exceeded"}


@pytest.mark.parametrize(
    ("end", "error", "status", "code"),
    [
        ("failed", ERROR, 500, "engine_error"),
        ("failed", {**ERROR, "code": "worker_died"}, 500, "worker_died"),
        ("failed", {**ERROR, "code": "of_a_newer_release"}, 500, "internal_error"),
        ("failed", TOO_LONG, 400, "context_length_exceeded"),
        ("cancelled", None, 409, "cancelled"),
        ("expired", None, 504, "deadline_exceeded"),
    ],
)
@pytest.mark.parametrize("path", ["/basic_generate", "/generate"])
def test_each_end_has_its_status(
    threads: ThreadPoolExecutor,
    client: httpx2.Client,
    owner: ScriptedOwner,
    path: str,
    end: str,
    error: dict[str, Any] | None,
    status: int,
    code: str,
) -> None:
    answer = post(threads, client, path)
    ride = owner.claim()
    owner.finish(ride, end, "error", error=json.dumps(error) if error else "")
    response = answer.result(10)
    assert response.status_code == status
    found = response.json()["error"]
    assert found["code"] == code
    assert response.headers["x-carpool-job-id"] == ride.id.partition(".")[0]
    assert found["param"] == ("prompts[0]" if path == "/generate" else None)


def test_the_prompt_that_failed_is_named(
    threads: ThreadPoolExecutor, client: httpx2.Client, owner: ScriptedOwner
) -> None:
    answer = post(threads, client, "/generate", prompts=["a", "b", "c"])
    group = owner.next_job().rpartition(".")[0]
    owner.run([" x"], f"{group}.0")
    owner.finish(owner.claim(f"{group}.1"), "failed", "error", error=json.dumps(ERROR))
    owner.run([" x"], f"{group}.2")
    response = answer.result(10)
    assert response.json()["error"] == {**ERROR, "param": "prompts[1]"}


def test_a_wait_that_is_over_names_the_job_which_goes_on(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", sync_wait_s=0.2)
    with running_api(settings) as api, api.client() as client, ScriptedOwner(settings) as owner:
        response = client.post("/basic_generate", json={"prompt": "x"})
        assert response.status_code == 504
        id = response.headers["x-carpool-job-id"]
        assert response.json()["error"]["code"] == "wait_exceeded"
        assert f"/jobs/{id}" in response.json()["error"]["message"]
        owner.run([" a"], id)
        assert client.get(f"/jobs/{id}").json()["text"] == " a"


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_not_supported_is_refused_by_name(client: httpx2.Client, path: str) -> None:
    only_streams = ["logprobs"] if path not in ("/generate_stream", "/jobs") else []
    only_chats = ["tools", "tool_choice", "parallel_tool_calls"] if path != "/jobs" else []
    only_jobs = ["webhook_url"] if path != "/jobs" else []
    for field in ("n", "stream", "store", "nonsense", *only_jobs, *only_streams, *only_chats):
        response = client.post(path, json={**BODIES[path], field: 1})
        assert response.status_code == 422
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_field", field)
        assert field in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_every_sampling_parameter_is_checked_on_every_endpoint(client: httpx2.Client, path: str) -> None:
    for field in OPENAI_NAMES:
        response = client.post(path, json={**BODIES[path], field: {"no": []}})
        assert response.status_code == 422
        error = response.json()["error"]
        assert error["code"] == "invalid_request"
        assert str(error["param"]).startswith(field)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/basic_generate", {}, "prompt", "missing"),
        ("/basic_generate", {"prompt": ""}, "prompt", "''"),
        ("/basic_generate", {"prompt": 5}, "prompt", "5"),
        ("/basic_generate", {"prompt": "x", "temperature": 3}, "temperature", "3"),
        ("/basic_generate", {"prompt": "x", "max_tokens": 0}, "max_tokens", "0"),
        ("/basic_generate", {"prompt": "x", "max_tokens": 1.5}, "max_tokens", "1.5"),
        ("/basic_generate", {"prompt": "x", "stop": ["a"] * 5}, "stop", "at most 4"),
        ("/basic_generate", {"prompt": "x", "maxtokens": 5}, "maxtokens", "max_tokens"),
        ("/generate", {"prompts": []}, "prompts", "at least 1"),
        ("/generate", {"prompts": ["a", 7]}, "prompts[1]", "7"),
        ("/generate", {"prompts": ["a", ""]}, "prompts[1]", "''"),
        ("/generate", {"prompts": ["a"] * 257}, "prompts", "256"),
        ("/generate", {"prompts": "a"}, "prompts", "'a'"),
        ("/jobs", {}, None, "either prompt or messages"),
        ("/jobs", {"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, None, "either prompt or messages"),
        ("/jobs", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        ("/jobs", {"prompt": "x", "deadline_s": 8 * 86400}, "deadline_s", "691200"),
        ("/jobs", {"prompt": "x", "metadata": {"a": "x" * 17000}}, "metadata", "16384"),
        ("/jobs", {"prompt": "x", "user": "x" * 257}, "user", "256"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(
    client: httpx2.Client, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"prompt": "x",}', 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
        (b"", 422, "invalid_request"),
        (b"[]", 422, "invalid_request"),
        (b'"x"', 422, "invalid_request"),
        (b'{"prompt": "\\ud800"}', 422, "invalid_request"),
        (b'{"prompt": "x", "metadata": {"a": NaN}}', 422, "invalid_request"),
        (b'{"prompt": "x", "metadata": {"a": "\\ud800"}}', 422, "invalid_request"),
        (b'{"prompt": "x", "temperature": NaN}', 422, "invalid_request"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(client: httpx2.Client, content: bytes, status: int, code: str) -> None:
    response = client.post("/jobs", content=content, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_an_unknown_model_is_404_and_what_there_is_is_listed(client: httpx2.Client, owner: ScriptedOwner) -> None:
    response = client.post("/jobs", json={"prompt": "x", "model": "gpt-9"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "'gpt-9'" in response.json()["error"]["message"]
    assert "simulated" in response.json()["error"]["message"]
    assert client.post("/jobs", json={"prompt": "x", "model": "simulated"}).json()["model"] == "simulated"


def test_wrong_paths_and_methods_are_errors_of_the_same_shape(client: httpx2.Client) -> None:
    missing = client.get("/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = client.get("/basic_generate")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


class RawRequest:
    """A request on a socket of its own, which can be cut while nothing was answered."""

    def __init__(self, api: ApiServer, path: str, key: str = "") -> None:
        body = json.dumps(BODIES[path]).encode()
        headers = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        headers += f"Content-Length: {len(body)}\r\n" + (f"Idempotency-Key: {key}\r\n" if key else "")
        self._socket = socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), timeout=10)
        self._socket.sendall(headers.encode() + b"\r\n" + body)

    def cut(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()


@pytest.mark.parametrize("path", ["/basic_generate", "/generate", "/generate_stream"])
@pytest.mark.parametrize("riding", [False, True])
def test_a_client_that_leaves_cancels_its_job(api: ApiServer, owner: ScriptedOwner, path: str, riding: bool) -> None:
    with RawRequest(api, path) as request:
        id = owner.next_job()
        ride = owner.claim(id) if riding else None
        if ride is not None:
            owner.write(ride, " a")
        request.cut()
        if ride is not None:
            until(lambda: owner.look(ride) == "cancelled")
        else:
            until(lambda: status_of(owner, id) == "cancelled")


@pytest.mark.parametrize("path", ["/basic_generate", "/generate_stream"])
def test_with_an_idempotency_key_the_job_goes_on_for_who_comes_back(
    api: ApiServer, client: httpx2.Client, owner: ScriptedOwner, path: str
) -> None:
    with RawRequest(api, path, key="k") as request:
        ride = owner.claim()
        owner.write(ride, " a")
        request.cut()
    until(lambda: api.call(lambda: api.service.relay.num_channels) == 0)
    assert owner.look(ride) == ""
    owner.finish(ride)
    headers = {"Idempotency-Key": "k"}
    if path == "/basic_generate":
        again = client.post(path, json=BODIES[path], headers=headers)
        assert again.json() == {"generated_text": "x a"}
        assert again.headers["x-carpool-job-id"] == ride.id
    else:
        with client.stream("POST", path, json=BODIES[path], headers=headers) as response:
            assert response.headers["x-carpool-job-id"] == ride.id
            assert [event.id for event in tokens_of(response)] == ["1", "1.end"]


def test_a_job_that_somebody_else_follows_on_another_replica_goes_on(
    api: ApiServer, settings: Settings, owner: ScriptedOwner
) -> None:
    with running_api(settings) as other, other.client() as client, RawRequest(api, "/generate_stream") as request:
        ride = owner.claim()
        with client.stream("GET", f"/jobs/{ride.id}/stream") as response:
            request.cut()
            until(lambda: api.call(lambda: api.service.relay.num_channels) == 0)
            assert owner.look(ride) == ""
            owner.write(ride, " a")
            owner.finish(ride)
            assert [event.id for event in tokens_of(response)] == ["1", "1.end"]


def test_a_child_that_somebody_follows_keeps_its_group(
    api: ApiServer, client: httpx2.Client, owner: ScriptedOwner
) -> None:
    with RawRequest(api, "/generate") as request:
        ride = owner.claim()
        with client.stream("GET", f"/jobs/{ride.id}/stream") as response:
            request.cut()
            until(lambda: api.call(lambda: api.service.relay.num_channels) == 1)
            assert owner.look(ride) == ""
            owner.finish(ride)
            tokens_of(response)


def test_a_follower_that_leaves_cancels_nothing(api: ApiServer, client: httpx2.Client, owner: ScriptedOwner) -> None:
    id = client.post("/jobs", json={"prompt": "x"}).json()["id"]
    with client.stream("GET", f"/jobs/{id}/stream"):
        ride = owner.claim(id)
    until(lambda: api.call(lambda: api.service.relay.num_channels) == 0)
    until(lambda: not owner.client.exists(keys.attached(id)))
    assert owner.look(ride) == ""


@pytest.mark.parametrize("path", ["/basic_generate", "/generate_stream"])
def test_an_api_that_stops_cancels_nothing_and_tells_those_who_wait(
    settings: Settings, owner: ScriptedOwner, threads: ThreadPoolExecutor, path: str
) -> None:
    with running_api(settings) as api, api.client() as client:
        answer = post(threads, client, path)
        ride = owner.claim()
        owner.write(ride, " a")
        api.server.should_exit = True
        response = answer.result(5)
    if path == "/basic_generate":
        assert response.json()["error"]["code"] == "wait_exceeded"
        assert "stopping" in response.json()["error"]["message"]
    else:
        assert response.text.count("data: ") == 1
    assert response.headers["x-carpool-job-id"] == ride.id
    assert owner.look(ride) == ""
    with running_api(settings) as replica, replica.client() as client:
        owner.finish(ride)
        with client.stream("GET", f"/jobs/{ride.id}/stream", headers={"Last-Event-ID": "1"}) as response:
            assert [event.id for event in tokens_of(response)] == ["1.end"]
