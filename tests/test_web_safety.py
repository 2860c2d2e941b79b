"""What a web page of a stranger, or a client that means no good, can and can't do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from api.safety import host_name, is_loopback
from api.server import check_host
from tasks.settings import Settings, SettingsError
from tests.api_server import ApiServer, running_api


@pytest.fixture
def settings(redis_url: str) -> Settings:
    return Settings(
        redis_url=redis_url, engine="simulated", max_body_bytes=1000, allowed_hosts="car.example, Two.example"
    )


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "localhost",
        "LOCALHOST:1",
        "[::1]:8000",
        "a.localhost",
        "car.example:9",
        "two.example.",
    ],
)
def test_this_machines_own_names_and_those_allowed_are_served(client: httpx2.Client, host: str) -> None:
    assert client.get("/health/live", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[2001:db8::1]", ""]
)
def test_other_names_are_refused_against_dns_rebinding(client: httpx2.Client, host: str) -> None:
    response = client.get("/health/live", headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "host_not_allowed"
    assert "CARPOOL_ALLOWED_HOSTS" in response.json()["error"]["message"]


def test_any_name_is_served_where_something_else_keeps_strangers_out(redis_url: str) -> None:
    with (
        running_api(Settings(redis_url=redis_url, engine="simulated", allow_no_keys=True)) as api,
        api.client() as client,
    ):
        assert client.get("/health/live", headers={"Host": "anything.example"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "example.com"])
def test_a_host_that_others_reach_is_not_served_without_keys(host: str) -> None:
    with pytest.raises(SettingsError, match=r"CARPOOL_HOST=.*CARPOOL_ALLOW_NO_KEYS=1"):
        check_host(Settings(host=host))
    check_host(Settings(host=host, allow_no_keys=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_loopback_host_needs_no_keys(host: str) -> None:
    check_host(Settings(host=host))


def test_host_headers_are_taken_apart_rightly() -> None:
    assert host_name("[::1]:80") == "::1"
    assert host_name("example.com:80") == "example.com"
    assert not is_loopback("localhost.example.com")
    assert not is_loopback("")


def test_a_body_over_the_limit_is_refused_before_it_is_read(client: httpx2.Client) -> None:
    response = client.post("/basic_generate", json={"prompt": "x" * 1000})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert "1000 bytes" in response.json()["error"]["message"]


def test_a_chunked_body_over_the_limit_is_refused_too(client: httpx2.Client) -> None:
    def body() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 100
        yield b'"}'

    response = client.post("/basic_generate", content=body(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_a_body_that_a_page_can_send_across_sites_is_refused(client: httpx2.Client, kind: str) -> None:
    response = client.post("/jobs", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"
    assert repr(kind) in response.json()["error"]["message"]


def test_json_by_another_name_and_with_a_charset_is_json(client: httpx2.Client) -> None:
    for kind in ("application/json; charset=utf-8", "application/vnd.x+json", "Application/JSON"):
        response = client.post("/jobs", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
        assert response.status_code == 202


def test_browsers_may_not_call_from_another_origin(client: httpx2.Client) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.options("/jobs", headers=headers).headers
    assert "access-control-allow-origin" not in client.get("/jobs", headers=headers).headers


def test_an_origin_that_the_settings_name_may_call_and_read_our_headers(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url, engine="simulated", cors_origins="https://page.example")
    with running_api(settings) as api, api.client() as client:
        ask = {
            "Origin": "https://page.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,idempotency-key,x-stainless-lang",
        }
        preflight = client.options("/jobs", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        answer = client.get("/jobs", headers={"Origin": "https://page.example"})
        assert "x-carpool-job-id" in answer.headers["access-control-expose-headers"]
        stranger = client.get("/jobs", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_a_request_id_goes_in_and_out(client: httpx2.Client) -> None:
    assert client.get("/health/live", headers={"x-request-id": "abc-1:2/3"}).headers["x-request-id"] == "abc-1:2/3"
    made = client.get("/health/live").headers["x-request-id"]
    assert len(made) == 32
    for bad in ("a b", "x" * 129, "<script>"):
        assert client.get("/nowhere", headers={"x-request-id": bad}).headers["x-request-id"] not in (bad, "")
    assert (
        client.get("/health/live", headers={"Host": "evil.example", "x-request-id": "r1"}).headers["x-request-id"]
        == "r1"
    )


def test_answers_do_not_name_the_server_program(client: httpx2.Client) -> None:
    assert "server" not in client.get("/health/live").headers


def test_a_request_that_is_no_http_ends_the_connection_and_nothing_else(api: ApiServer, client: httpx2.Client) -> None:
    port = urlsplit(api.url).port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(b"\x16\x03\x01 no http\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")
    assert client.get("/health/live").status_code == 200
