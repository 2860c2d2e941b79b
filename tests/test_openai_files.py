"""`/v1/files` with OpenAI's own client, and with forms that it would never send."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import redis

from tasks import keys
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, until
from tests.openai_clients import async_client, openai_client

BOUNDARY = "a-boundary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture
def client(simulated_api: ApiServer) -> Iterator[openai.OpenAI]:
    with openai_client(simulated_api) as client:
        yield client


@pytest.fixture
def http(simulated_api: ApiServer) -> Iterator[httpx2.Client]:
    with simulated_api.client() as http:
        yield http


def part(name: str, value: str, filename: str = "") -> str:
    more = f'; filename="{filename}"' if filename else ""
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'


def form(*parts: str, end: str = f"--{BOUNDARY}--\r\n") -> bytes:
    return ("".join(parts) + end).encode()


PURPOSE = part("purpose", "batch")
FILE = part("file", "{}", "x.jsonl")


def total_bytes(client: redis.Redis) -> int:
    return int(str(client.hget(keys.FILES_BYTES, "total") or 0))


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, 700_001])
def test_a_file_comes_back_byte_for_byte(client: openai.OpenAI, size: int) -> None:
    data = random.Random(size).randbytes(size)
    file = client.files.create(file=("in \u00e9.jsonl", data), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", size, "in \u00e9.jsonl", "batch")
    assert file.status == "processed"
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 7 * 86400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as refusal:
            call(file.id)
        assert refusal.value.code == "file_not_found"


async def test_the_asynchronous_client_uploads_too(simulated_api: ApiServer) -> None:
    async with async_client(simulated_api) as client:
        file = await client.files.create(file=b"{}\n" * 100_000, purpose="batch")
        assert (await client.files.content(file.id)).read() == b"{}\n" * 100_000
        await client.files.delete(file.id)


def test_files_are_listed_page_by_page(redis_url: str) -> None:
    with running_api(Settings(redis_url=redis_url, engine="simulated")) as api, openai_client(api) as client:
        made = [client.files.create(file=b"x", purpose="batch").id for _ in range(5)]
        assert [file.id for file in client.files.list()] == made[::-1]
        assert [file.id for file in client.files.list(limit=2)] == made[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc").data] == made[:2]
        assert [file.id for file in client.files.list(after=made[1], order="asc")] == made[2:]
        assert list(client.files.list(purpose="batch_output")) == []
        client.files.delete(made[2])
        assert [file.id for file in client.files.list(order="asc")] == [*made[:2], *made[3:]]
        with pytest.raises(openai.NotFoundError):
            client.files.list(after="file-none")


def test_a_file_says_how_long_it_is_kept(simulated_api: ApiServer, client: openai.OpenAI) -> None:
    file = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600
    for seconds in (3599, 2592001):
        with pytest.raises(openai.BadRequestError) as refusal:
            client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds})
        assert refusal.value.param == "expires_after[seconds]"


def test_an_idempotency_key_makes_one_file(client: openai.OpenAI) -> None:
    def upload(data: bytes) -> str:
        return client.files.create(file=data, purpose="batch", extra_headers={"Idempotency-Key": "upload-1"}).id

    first = upload(b"one")
    assert upload(b"one") == first
    with pytest.raises(openai.ConflictError) as refusal:
        upload(b"two")
    assert refusal.value.code == "idempotency_conflict"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(part("purpose", "fine-tune"), FILE), "purpose"),
        (form(FILE), "purpose"),
        (form(PURPOSE), "file"),
        (form(PURPOSE, FILE, part("colour", "red")), "colour"),
        (form(PURPOSE, part("expires_after[seconds]", "3600"), FILE), "expires_after[anchor]"),
        (form(PURPOSE, FILE, FILE), None),
        (form(PURPOSE, PURPOSE, FILE), None),
        (form(PURPOSE, part("", "x"), FILE), None),
        (form(part("purpose", "x" * 2000), FILE), None),
        (form(PURPOSE, part("x" * 2000, "x"), FILE), None),
        (form(PURPOSE, FILE, end=""), None),
        (b"no form at all", None),
        (b"", None),
    ],
)
def test_a_form_that_does_not_fit_is_refused_and_leaves_nothing(
    simulated_api: ApiServer, http: httpx2.Client, body: bytes, param: str | None
) -> None:
    with redis.Redis.from_url(simulated_api.service.settings.redis_url, decode_responses=True) as client:
        before = total_bytes(client)
        response = http.post("/v1/files", content=body, headers=FORM)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        until(lambda: total_bytes(client) == before)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "text/plain", ""])
def test_an_upload_is_a_form(http: httpx2.Client, kind: str) -> None:
    response = http.post("/v1/files", content=b"{}", headers={"Content-Type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_forms_are_taken_for_uploads_alone(http: httpx2.Client) -> None:
    assert http.post("/v1/batches", content=form(PURPOSE, FILE), headers=FORM).status_code == 415


def test_a_page_of_another_site_uploads_nothing(simulated_api: ApiServer, http: httpx2.Client) -> None:
    def upload(origin: str) -> httpx2.Response:
        return http.post("/v1/files", content=form(PURPOSE, FILE), headers={**FORM, "Origin": origin})

    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        refused = upload(origin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert upload(simulated_api.url).status_code == 200
    settings = simulated_api.service.settings.model_copy(update={"cors_origins": "https://friend.example"})
    with running_api(settings) as api, api.client() as other:
        allowed = other.post(
            "/v1/files", content=form(PURPOSE, FILE), headers={**FORM, "Origin": "https://friend.example"}
        )
        assert allowed.status_code == 200


def test_a_file_and_all_files_together_have_their_bounds(redis_url: str, redis_client: redis.Redis) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", max_file_bytes=500_000, max_files_bytes=700_000)
    with running_api(settings) as api, openai_client(api) as client, api.client() as http:

        def endless() -> Iterator[bytes]:
            yield form(PURPOSE, part("file", "", "x")[:-2], end="")
            for _ in range(20):
                yield b"x" * 100_000

        chunked = http.post("/v1/files", content=endless(), headers=FORM)
        assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "file_too_large")
        until(lambda: total_bytes(redis_client) == 0)
        # while there is room: of a file that crosses both bounds, the way its bytes arrive decides which is told
        with pytest.raises(openai.APIStatusError) as refusal:
            client.files.create(file=b"x" * 500_001, purpose="batch")
        assert (refusal.value.status_code, refusal.value.code) == (413, "file_too_large")

        until(lambda: total_bytes(redis_client) == 0)
        largest = client.files.create(file=b"x" * 500_000, purpose="batch")
        with pytest.raises(openai.APIStatusError) as full:
            client.files.create(file=b"x" * 200_001, purpose="batch")
        assert (full.value.status_code, full.value.code) == (413, "files_full")
        until(lambda: total_bytes(redis_client) == 500_000)
        client.files.delete(largest.id)
        client.files.create(file=b"x" * 500_000, purpose="batch")


def test_an_upload_whose_client_leaves_leaves_nothing(
    redis_url: str, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_api(Settings(redis_url=redis_url, engine="simulated")) as api:
        host, port = api.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9000000\r\n"
            connection.sendall(f"{head}Content-Type: {FORM['Content-Type']}\r\n\r\n".encode())
            connection.sendall(form(PURPOSE, part("file", "x" * 600_000, "x")[:-2], end=""))
            until(lambda: total_bytes(redis_client) >= 512 * 1024)
        until(lambda: total_bytes(redis_client) == 0)
        assert list(redis_client.scan_iter(f"{keys.PREFIX}f:*")) == []
    assert "request_failed" not in capsys.readouterr().out


def test_the_cap_is_told_with_its_number_and_what_to_do(redis_url: str) -> None:
    settings: Any = Settings(redis_url=redis_url, engine="simulated", max_files_bytes=10)
    with running_api(settings) as api, api.client() as http:
        error = http.post("/v1/files", content=form(PURPOSE, part("file", "x" * 11, "x")), headers=FORM).json()["error"]
    assert "CARPOOL_MAX_FILES_BYTES" in error["message"]
    assert "DELETE /v1/files/{id}" in error["message"]
