"""A vLLM worker under `carpool up`, as a user has it: asked, killed, told its arguments."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.instance import Instance, ended, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
READY_S = 300.0
SETTINGS = {"CARPOOL_DTYPE": "float32", "CARPOOL_LEASE_S": "3", "CARPOOL_RENEW_S": "1"}
DRAWN = {"temperature": 0.9, "seed": 7, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    from tests.tiny_models import save_tiny_model

    folder = tmp_path_factory.mktemp("vllm")
    options = ["--engine", "vllm", "--model", str(save_tiny_model(folder / "tiny")), "--device", "cpu"]
    options += ["--engine-arg", "enforce_eager=true", "--engine-arg", "max-model-len=80"]
    with Instance(folder, *options, settings=SETTINGS) as instance:
        instance.ready(READY_S)
        yield instance
        instance.interrupt()
        assert instance.process.wait(60) == 0
        until(lambda: not instance.left(), "no process is left")


@pytest.fixture
def client(instance: Instance) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=instance.api_url(), timeout=120) as client:
        yield client


def test_completions_alone_come_back_in_order(client: httpx2.Client) -> None:
    prompts = ["one car", "one batch and one car", "strangers"]
    body = {"temperature": 0, "max_tokens": 6}
    answer = client.post("/generate_vllm", json={"prompts": prompts, **body}).json()["generated_texts"]
    alone = [client.post("/generate_vllm", json={"prompts": [prompt], **body}).json() for prompt in prompts]

    assert answer == [one["generated_texts"][0] for one in alone]
    assert client.post("/generate_vllm", json={"prompts": []}).json() == {"generated_texts": []}
    whole = client.post("/basic_generate", json={"prompt": prompts[0], "max_tokens": 6}).json()["generated_text"]
    assert whole == prompts[0] + answer[0]


def test_the_worker_is_shown_with_its_engine_and_its_arguments_count(client: httpx2.Client, instance: Instance) -> None:
    (worker,) = [process for process in instance.status() if process["role"] == "worker"]
    (model,) = client.get("/v1/models").json()["data"]

    assert worker["state"] == "ready"
    assert model["max_model_len"] == 80
    refused = client.post("/jobs", json={"prompt": "car", "max_tokens": 81})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("role", ["model-worker", "worker"])
def test_a_stream_outlives_a_killed_process_with_the_tokens_it_would_have_had(
    client: httpx2.Client, instance: Instance, role: str
) -> None:
    body = {"prompt": "strangers share one car", "max_tokens": 50, **DRAWN}
    expected = wait_for(client, client.post("/jobs", json=body).json()["id"])["text"]

    with client.stream("POST", "/generate_stream", json=body) as stream:
        text, last = "", {}
        for line in stream.iter_lines():
            if not line.startswith("data: "):
                continue
            last = json.loads(line[6:])
            text += last["token"]
            if last["n"] == 3:
                os.kill(instance.pid(role), signal.SIGKILL)

    assert last["finish_reason"] == "length", last
    assert text == expected
    until(lambda: client.get("/health/ready").status_code == 200, "the worker is back", READY_S)


def test_a_cancelled_job_keeps_a_prefix_and_frees_its_slot(client: httpx2.Client) -> None:
    body = {"prompt": "strangers share one car", "max_tokens": 60, **DRAWN}
    expected = wait_for(client, client.post("/jobs", json=body).json()["id"])["text"]
    id = client.post("/jobs", json=body).json()["id"]
    client.post(f"/jobs/{id}/cancel")
    job = wait_for(client, id)

    assert job["status"] in ("cancelled", "succeeded")
    assert expected.startswith(job["text"])


def test_many_more_jobs_than_slots_each_get_what_they_get_alone(client: httpx2.Client) -> None:
    bodies = [{"prompt": f"car {n}", "max_tokens": 5 + n % 7, "temperature": 0.8, "seed": n} for n in range(20)]
    alone = [wait_for(client, client.post("/jobs", json=body).json()["id"])["text"] for body in bodies[:8]]
    ids = [client.post("/jobs", json=body).json()["id"] for body in bodies]
    jobs = [wait_for(client, id) for id in ids]

    assert [job["status"] for job in jobs] == ["succeeded"] * 20
    assert [job["text"] for job in jobs[:8]] == alone


def test_with_tensor_parallelism_a_killed_process_is_replaced_and_none_of_its_workers_is_left(tmp_path: Path) -> None:
    from tests.tiny_models import save_tiny_model

    options = ["--engine", "vllm", "--model", str(save_tiny_model(tmp_path / "tiny")), "--device", "cpu"]
    options += ["--engine-arg", "enforce_eager=true", "--engine-arg", "tensor_parallel_size=2"]
    # On a CPU vLLM wants to know which processors each of the two is to have.
    settings = {**SETTINGS, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    body = {"prompt": "strangers share one car", "max_tokens": 30, **DRAWN}
    with Instance(tmp_path, *options, settings=settings) as instance:
        instance.ready(READY_S)
        with httpx2.Client(base_url=instance.api_url(), timeout=READY_S) as client:
            text = wait_for(client, client.post("/jobs", json=body).json()["id"])["text"]
            killed = psutil.Process(instance.pid("model-worker"))
            workers = [child for child in killed.children() if "resource_tracker" not in " ".join(child.cmdline())]
            killed.kill()
            again = wait_for(client, client.post("/jobs", json=body).json()["id"])

        until(lambda: all(ended(worker.pid) for worker in workers), "vLLM's workers end with the Model worker")
        assert len(workers) >= 2
        assert (again["status"], again["text"]) == ("succeeded", text)
        pids = instance.all_pids()
        instance.interrupt()
        assert instance.process.wait(60) == 0
        until(lambda: all(map(ended, pids)), "no process is left")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("max_num_sequences=8", "no argument 'max_num_sequences'"),
        ("max_num_seqs=8", "CARPOOL_MAX_BATCH_SIZE"),
        ("logits_processors=x", "Carpool decides it"),
    ],
)
def test_an_argument_that_cannot_be_given_is_refused_by_name(tmp_path: Path, argument: str, words: str) -> None:
    from tests.tiny_models import save_tiny_model

    model = str(save_tiny_model(tmp_path / "tiny"))
    with Instance(tmp_path, "--engine", "vllm", "--model", model, "--engine-arg", argument) as instance:
        assert instance.process.wait(READY_S) == 1
        assert words in instance.output


def wait_for(client: httpx2.Client, id: str) -> dict[str, Any]:
    """The job once it has ended; a new process takes its time to load."""
    while True:
        job: dict[str, Any] = client.get(f"/jobs/{id}", params={"wait": 60}).json()
        if job["status"] not in ("queued", "running"):
            return job
