"""What one API key has made is not there for another: no endpoint gives it away, or tells whether it exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from tasks import keys
from tests.api_keys import Holder, make_key, revoke
from tests.api_server import ApiServer, running_api, until
from tests.batch_lines import COMPLETIONS, line
from tests.scripted_owner import ScriptedOwner
from tests.service import Service, simulated_text


def completion_line(custom_id: str, prompt: str, **more: Any) -> str:
    return line(custom_id, COMPLETIONS, {"prompt": prompt, **more})


@pytest.fixture
def service(redis_url: str, tmp_path: Path) -> Iterator[Service]:
    with Service(redis_url, tmp_path) as service:
        yield service


@pytest.fixture
def ours(redis_client: redis.Redis, service: Service) -> Holder:
    return make_key(redis_client, "ours")


@pytest.fixture
def theirs(redis_client: redis.Redis, service: Service) -> Holder:
    return make_key(redis_client, "theirs")


@pytest.fixture
def api(service: Service, ours: Holder, theirs: Holder) -> Iterator[ApiServer]:
    with running_api(service.settings) as api:
        yield api


@pytest.fixture
def us(api: ApiServer, ours: Holder) -> Iterator[httpx2.Client]:
    with api.client(headers=ours.headers) as client:
        yield client


@pytest.fixture
def them(api: ApiServer, theirs: Holder) -> Iterator[httpx2.Client]:
    with api.client(headers=theirs.headers) as client:
        yield client


def as_if_it_never_was(us: httpx2.Client, method: str, path: str, id: str, **more: Any) -> None:
    """The answer is the same as for an id that nobody has ever had."""
    answer = us.request(method, path.format(id=id), **more)
    unknown = us.request(method, path.format(id="never-was"), **more)
    assert answer.status_code == unknown.status_code == 404, f"{method} {path}: {answer.text}"
    assert answer.text.replace(id, "never-was") == unknown.text
    assert set(answer.headers) == set(unknown.headers)


JOB_PATHS = [
    ("GET", "/jobs/{id}"),
    ("GET", "/jobs/{id}?wait=1"),
    ("GET", "/jobs/{id}/stream"),
    ("POST", "/jobs/{id}/cancel"),
    ("DELETE", "/jobs/{id}"),
    ("GET", "/v1/responses/{id}"),
    ("GET", "/v1/responses/{id}?stream=true"),
    ("POST", "/v1/responses/{id}/cancel"),
    ("DELETE", "/v1/responses/{id}"),
]


@pytest.mark.parametrize("stage", ["queued", "riding", "ended"])
def test_a_job_is_there_for_its_own_key_alone(
    us: httpx2.Client, them: httpx2.Client, service: Service, stage: str
) -> None:
    with ScriptedOwner(service.settings) as owner:
        job = them.post("/jobs", json={"prompt": "theirs"}).json()["id"]
        response = them.post("/v1/responses", json={"input": "theirs", "background": True}).json()["id"]
        rides = [owner.claim(id) for id in (job, response)] if stage != "queued" else []
        if stage == "ended":
            for ride in rides:
                owner.finish(ride)
        for id in (job, response):
            for method, path in JOB_PATHS:
                as_if_it_never_was(us, method, path, id)
        for id in (job, response):
            status = {"queued": "queued", "riding": "running", "ended": "succeeded"}[stage]
            assert them.get(f"/jobs/{id}").json()["status"] == status
            assert them.get(f"/jobs/{id}").json()["cancel_requested"] is False
        assert us.get("/jobs").json()["data"] == []
        assert {one["id"] for one in them.get("/jobs").json()["data"]} == {job, response}


def test_the_children_of_a_group_belong_to_whom_the_group_does(
    us: httpx2.Client, them: httpx2.Client, service: Service
) -> None:
    service.worker()
    answer = them.post("/generate", json={"prompts": ["a", "b"], "max_tokens": 2})
    group = answer.headers["x-carpool-job-id"]
    for id in (group, f"{group}.0", f"{group}.1"):
        for method, path in JOB_PATHS[:5]:
            as_if_it_never_was(us, method, path, id)
        assert them.get(f"/jobs/{id}").status_code == 200
        assert them.get(f"/jobs/{id}/stream").status_code == 200


def test_a_conversation_goes_on_for_its_own_key_alone(us: httpx2.Client, them: httpx2.Client, service: Service) -> None:
    service.worker()
    body = {"input": "Tell me of the sea.", "max_output_tokens": 3}
    first = them.post("/v1/responses", json=body).json()["id"]
    stolen = us.post("/v1/responses", json={**body, "previous_response_id": first})
    assert (stolen.status_code, stolen.json()["error"]["param"]) == (404, "previous_response_id")
    assert them.post("/v1/responses", json={**body, "previous_response_id": first}).status_code == 200


def test_the_same_idempotency_key_of_two_callers_is_two_keys(
    us: httpx2.Client, them: httpx2.Client, service: Service
) -> None:
    headers = {"Idempotency-Key": "order-17"}
    jobs = [client.post("/jobs", json={"prompt": "x"}, headers=headers).json()["id"] for client in (us, them, us, them)]
    assert jobs[0] == jobs[2]
    assert jobs[1] == jobs[3]
    assert jobs[0] != jobs[1]
    # another body is a conflict for its own caller alone
    assert us.post("/jobs", json={"prompt": "y"}, headers=headers).status_code == 409
    upload: dict[str, Any] = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}, "headers": headers}
    assert len({client.post("/v1/files", **upload).json()["id"] for client in (us, them, us)}) == 2


def upload(client: httpx2.Client, *lines: str) -> str:
    file = ("in.jsonl", "\n".join(lines).encode())
    answer = client.post("/v1/files", files={"file": file}, data={"purpose": "batch"})
    return str(answer.raise_for_status().json()["id"])


def create_batch(client: httpx2.Client, file: str) -> httpx2.Response:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return client.post("/v1/batches", json=body)


def finished(client: httpx2.Client, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(client.get(f"/v1/batches/{batch}").json())
        return found["status"] not in ("validating", "in_progress", "finalizing", "cancelling")

    until(has_ended, 30)
    return found


def test_files_and_batches_are_there_for_their_own_key_alone(
    us: httpx2.Client, them: httpx2.Client, service: Service, theirs: Holder
) -> None:
    service.worker()
    file = upload(them, completion_line("a", "one", max_tokens=3), completion_line("b", "two", max_tokens=3))
    refused = create_batch(us, file)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_not_found")
    batch = create_batch(them, file).raise_for_status().json()["id"]
    for method, path in (("GET", "/v1/batches/{id}"), ("POST", "/v1/batches/{id}/cancel")):
        as_if_it_never_was(us, method, path, batch)
    ended = finished(them, batch)
    assert ended["status"] == "completed"
    output = ended["output_file_id"]
    for id in (file, output):
        for method, path in (
            ("GET", "/v1/files/{id}"),
            ("GET", "/v1/files/{id}/content"),
            ("DELETE", "/v1/files/{id}"),
        ):
            as_if_it_never_was(us, method, path, id)
    answers = [json.loads(line) for line in them.get(f"/v1/files/{output}/content").text.splitlines()]
    assert len(answers) == 2
    for answer in answers:
        job = answer["response"]["request_id"]
        as_if_it_never_was(us, "GET", "/jobs/{id}", job)
        assert them.get(f"/jobs/{job}").json()["status"] == "succeeded"
        assert service.client.hget(keys.record(job), "key") == theirs.id
    assert us.get("/v1/files").json()["data"] == us.get("/v1/batches").json()["data"] == []
    assert us.get(f"/v1/files?after={file}").status_code == 404
    assert us.get(f"/v1/batches?after={batch}").status_code == 404
    assert {one["id"] for one in them.get("/v1/files").json()["data"]} == {file, output}
    assert [one["id"] for one in them.get("/v1/batches").json()["data"]] == [batch]
    assert them.delete(f"/v1/files/{output}").status_code == 200
    assert {one["id"] for one in them.get("/v1/files").json()["data"]} == {file}
    assert not service.keys_without_ttl()


def test_a_batch_runs_with_what_its_owner_s_key_may(
    api: ApiServer, service: Service, redis_client: redis.Redis
) -> None:
    service.worker()
    holder = make_key(
        redis_client, "narrow", models="simulated", priority_ceiling="normal", rpm="2", max_concurrent="1"
    )
    with api.client(headers=holder.headers) as client:
        until(lambda: client.get("/jobs").status_code == 200)
        file = upload(
            client,
            completion_line("fine", "one", max_tokens=3, seed=7),
            completion_line("fine too", "two", max_tokens=3, priority="normal", model="simulated"),
            completion_line("too high", "three", priority="high"),
            completion_line("another model", "four", model="other"),
        )
        ended = finished(client, create_batch(client, file).json()["id"])
        assert ended["request_counts"] == {"total": 4, "completed": 2, "failed": 2}
        errors = [
            json.loads(line) for line in client.get(f"/v1/files/{ended['error_file_id']}/content").text.splitlines()
        ]
        codes = {one["custom_id"]: one["response"]["body"]["error"]["code"] for one in errors}
        assert codes == {"too high": "priority_not_allowed", "another model": "model_not_found"}
        output = client.get(f"/v1/files/{ended['output_file_id']}/content").text.splitlines()
        texts = {json.loads(line)["custom_id"]: json.loads(line)["response"]["body"] for line in output}
        assert texts["fine"]["choices"][0]["text"] == simulated_text("one", 7, 3)
        # both of its requests are used up: the upload and the batch
        assert client.post("/jobs", json={"prompt": "x"}).status_code == 429


def test_a_batch_goes_on_when_its_key_is_revoked(
    api: ApiServer, service: Service, redis_client: redis.Redis, theirs: Holder, them: httpx2.Client
) -> None:
    file = upload(them, *(completion_line(f"l{i}", f"line {i}", max_tokens=2) for i in range(5)))
    batch = create_batch(them, file).json()["id"]
    revoke(redis_client, theirs)
    until(lambda: them.get("/jobs").status_code == 401)
    service.worker()
    until(lambda: redis_client.hget(keys.batch(batch), "status") == "completed", 30)
    assert redis_client.hget(keys.batch(batch), "completed") == "5"
