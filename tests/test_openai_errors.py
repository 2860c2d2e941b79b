"""Errors under `/v1`: the class that OpenAI's client raises, when it tries again, and what a second try gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import openai
import pytest

from tasks.codes import CODES, CarpoolError
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, until
from tests.openai_clients import openai_client
from tests.scripted_owner import ScriptedOwner

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def error_json(code: str) -> str:
    return json.dumps(CarpoolError(code, "it went wrong").body())


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        ("failed", "worker_died", openai.InternalServerError),
        ("failed", "chat_template_missing", openai.BadRequestError),
        ("failed", "invalid_request", openai.BadRequestError),
        ("cancelled", "cancelled", openai.ConflictError),
        ("expired", "deadline_exceeded", openai.InternalServerError),
    ],
)
def test_each_end_of_a_job_is_its_exception_and_the_job_is_not_made_again(
    settings: Settings,
    owner: ScriptedOwner,
    threads: ThreadPoolExecutor,
    status: str,
    code: str,
    kind: type[openai.APIStatusError],
) -> None:
    with running_api(settings) as api, openai_client(api, max_retries=2) as client:
        answer = threads.submit(lambda: client.chat.completions.create(model="simulated", messages=HELLO))
        ride = owner.claim()
        owner.finish(ride, status, "error", error=error_json(code))
        with pytest.raises(openai.APIStatusError) as failure:
            answer.result(10)
        assert type(failure.value) is kind
        expected = 400 if CODES[code].status == 422 else CODES[code].status
        assert (failure.value.status_code, failure.value.code) == (expected, code)
        assert failure.value.response.headers["x-carpool-job-id"] == ride.id
        assert failure.value.response.headers["x-should-retry"] == "false"
        with api.client() as http:
            assert [job["id"] for job in http.get("/jobs").json()["data"]] == [ride.id]


@pytest.mark.parametrize("path", ["completions", "chat"])
def test_an_error_in_a_stream_makes_the_client_raise(
    settings: Settings, owner: ScriptedOwner, threads: ThreadPoolExecutor, path: str
) -> None:
    def read() -> None:
        if path == "chat":
            seen.extend(client.chat.completions.create(model="simulated", messages=HELLO, stream=True))
        else:
            seen.extend(client.completions.create(model="simulated", prompt="x", stream=True))

    seen: list[object] = []
    with running_api(settings) as api, openai_client(api) as client:
        reading = threads.submit(read)
        ride = owner.claim()
        owner.write(ride, " a")
        owner.finish(ride, "failed", "error", error=error_json("engine_error"))
        with pytest.raises(openai.APIError, match="it went wrong") as failure:
            reading.result(10)
    assert failure.value.code == "engine_error"
    assert len(seen) == (2 if path == "chat" else 1)


def test_a_stream_whose_record_is_gone_makes_the_client_raise(settings: Settings, owner: ScriptedOwner) -> None:
    with running_api(settings) as api, openai_client(api) as client:
        stream = client.completions.create(model="simulated", prompt="x", stream=True)
        id = owner.next_job()
        owner.client.delete(f"{{carpool}}:j:{id}", f"{{carpool}}:l:{id}")
        with pytest.raises(openai.APIError) as failure:
            list(stream)
    assert failure.value.code == "job_not_found"


def test_what_cannot_be_found_or_read_has_its_exception_too(simulated_api: ApiServer) -> None:
    with openai_client(simulated_api) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="gpt-9", messages=HELLO)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.get("/engines", cast_to=object)
    with simulated_api.client() as http:
        broken = http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"})
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
        form = http.post("/v1/completions", data={"prompt": "x"})
        assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
        large = http.post("/v1/completions", json={"prompt": "x" * (4 * 2**20)})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 5}),
    ],
)
def test_an_idempotency_key_makes_one_job_of_many_requests(
    simulated_api: ApiServer, path: str, body: dict[str, Any]
) -> None:
    headers = {"Idempotency-Key": f"k{path}"}
    with simulated_api.client() as http:
        first = http.post(path, json=body, headers=headers)
        again = http.post(path, json=body, headers=headers)
        assert first.status_code == 200
        assert again.json() == first.json()
        assert again.headers["x-carpool-job-id"] == first.json()["id"]
        other = http.post(path, json={**body, "seed": 2}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


class FlakyProxy:
    """Passes requests on; the answers to the first few are lost after they were made."""

    def __init__(self, url: str, losses: int) -> None:
        self.seen: list[str | None] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the name is the library's
                body = self.rfile.read(int(self.headers["content-length"]))
                wanted = {name: self.headers[name] for name in ("content-type", "idempotency-key")}
                answer = httpx2.post(f"{url}{self.path}", content=body, headers=wanted, timeout=20, trust_env=False)
                proxy.seen.append(answer.headers.get("x-carpool-job-id"))
                if len(proxy.seen) <= losses:
                    self.close_connection = True
                    return
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.send_header("content-length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: the test tells what went wrong."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_tries_again_with_its_key_gets_the_one_job(simulated_api: ApiServer, stream: bool) -> None:
    proxy = FlakyProxy(simulated_api.url, losses=2)
    with proxy as url, openai_client(simulated_api, base_url=f"{url}/v1", max_retries=3) as client:
        options: dict[str, Any] = {"model": "simulated", "messages": HELLO, "max_tokens": 5}
        options["extra_headers"] = {"Idempotency-Key": f"retry-{stream}"}
        if stream:
            chunks = list(client.chat.completions.create(**options, stream=True))
            id, text = chunks[0].id, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        else:
            answer = client.chat.completions.create(**options)
            id, text = answer.id, str(answer.choices[0].message.content)
    assert proxy.seen == [id] * 3
    with simulated_api.client() as http:
        assert http.get(f"/jobs/{id}").json()["text"] == text


def test_a_wait_that_is_over_is_gone_on_with_by_the_same_key(owner: ScriptedOwner, threads: ThreadPoolExecutor) -> None:
    settings = owner.settings.model_copy(update={"sync_wait_s": 0.2})
    with running_api(settings) as api, openai_client(api, max_retries=5) as client, api.client() as http:
        body = {"messages": HELLO}
        alone = http.post("/v1/chat/completions", json=body)
        assert (alone.status_code, alone.json()["error"]["code"]) == (504, "wait_exceeded")
        assert alone.headers["x-should-retry"] == "false"
        owner.finish(owner.claim(alone.headers["x-carpool-job-id"]))
        keyed = {"Idempotency-Key": "k"}
        refused = http.post("/v1/chat/completions", json=body, headers=keyed)
        assert refused.headers["x-should-retry"] == "true"
        ride = owner.claim(refused.headers["x-carpool-job-id"])
        answer = threads.submit(
            lambda: client.post("/chat/completions", body=body, cast_to=dict[str, Any], options={"headers": keyed})
        )
        until(lambda: api.call(lambda: api.service.relay.num_channels) > 0)
        owner.finish(ride)
        assert answer.result(15)["id"] == ride.id
