"""Bodies that nobody sends by accident: each gets a clear refusal or a right answer, never a fault of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.api_server import ApiServer
from tests.service import simulated_text

#: Each endpoint with a body, as text, where %s is the prompt as JSON.
BODIES = {
    "/jobs": '{"prompt": %s, "max_tokens": 3, "seed": 1}',
    "/v1/completions": '{"prompt": %s, "max_tokens": 3, "seed": 1}',
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": %s}], "max_tokens": 3, "seed": 1}',
    "/v1/responses": '{"input": %s, "max_output_tokens": 3, "seed": 1}',
}
DEEP = 900


@pytest.fixture(scope="module")
def http(simulated_api: ApiServer) -> Iterator[httpx2.Client]:
    with simulated_api.client(headers={"Content-Type": "application/json"}) as http:
        yield http


def nested(depth: int, opening: str = '{"a": ', closing: str = "}") -> str:
    return opening * depth + "1" + closing * depth


def post(http: httpx2.Client, path: str, field: str = "", value: str = "", prompt: str = '"x"', key: str = "") -> Any:
    body = BODIES[path] % prompt
    if field:
        body = f'{body[:-1]}, "{field}": {value}}}'
    headers = {"Idempotency-Key": key} if key else {}
    return http.post(path, content=body.encode("utf-8", "surrogatepass"), headers=headers)


def assert_refused(response: httpx2.Response, path: str, *codes: str) -> None:
    assert 400 <= response.status_code < 500, response.text
    if path.startswith("/v1/"):
        assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] in (codes or ("invalid_request",)), error
    assert error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "1e400"),
        ("temperature", "-1e308"),
        ("top_p", "-Infinity"),
        ("top_k", "1e30"),
        ("seed", "1" + "0" * 400),
        ("seed", "1e30"),
        ("seed", str(2**64)),
        ("logit_bias", '{"1": NaN}'),
        ("logit_bias", '{"' + "9" * 5000 + '": 1}'),
        ("metadata", '{"a": NaN}'),
        ("metadata", '{"a": "\\ud800"}'),
        ("metadata", '{"\\udfff": "a"}'),
        ("metadata", nested(DEEP)),
        ("user", '"\\ud800"'),
        ("stop", '["\\udc00"]'),
        ("deadline_s", "1e300"),
        ("deadline_s", "0"),
    ],
)
def test_values_that_cannot_be_are_refused_with_the_field(
    http: httpx2.Client, path: str, field: str, value: str
) -> None:
    response = post(http, path, field, value)
    assert_refused(response, path, "invalid_request", "invalid_json")
    if response.json()["error"]["code"] == "invalid_request":
        assert str(response.json()["error"]["param"]).startswith(field)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "prompt", ['"\\ud800"', '"a\\udfffb"', '"\ud800"', '""', "null", "NaN", "5", "{}", "[[]]", "[5]"]
)
def test_prompts_that_are_no_text_are_refused(http: httpx2.Client, path: str, prompt: str) -> None:
    response = post(http, path, prompt=prompt)
    if path == "/v1/chat/completions" and prompt == '""':
        # an empty turn is a turn: its template has text around it
        assert response.status_code == 200
    else:
        assert_refused(response, path, "invalid_request", "invalid_json")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [*range(DEEP, 1001, 4), 5000, 100_000])
def test_a_body_that_is_nested_too_deeply_is_refused(http: httpx2.Client, path: str, depth: int) -> None:
    # around the recursion limit, each depth may break another part that reads the body
    for field in ("metadata", "stop", "nonsense"):
        value = nested(depth) if field == "metadata" else nested(depth, "[", "]")
        response = post(http, path, field, value, key=f"deep-{depth}-{field}-{path}")
        assert_refused(response, path, "invalid_request", "invalid_json", "unsupported_field")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [f"[{'1,' * 1_500_000}1]", f"[{'[1],' * 60_000}1]"])
def test_a_body_of_very_many_values_is_refused_as_a_whole(http: httpx2.Client, path: str, value: str) -> None:
    # an error for each would take many seconds and gigabytes, in which nobody else is served
    response = post(http, path, "stop", value)
    assert_refused(response, path)
    assert "more than 100000 values" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_schema_that_is_nested_too_deeply_is_refused(http: httpx2.Client, path: str) -> None:
    schema = nested(DEEP, '{"properties": ', "}")
    if path == "/v1/responses":
        inner = f'{{"format": {{"type": "json_schema", "name": "s", "schema": {schema}}}}}'
        response = post(http, path, "text", inner)
    else:
        inner = f'{{"type": "json_schema", "json_schema": {{"name": "s", "schema": {schema}}}}}'
        response = post(http, path, "response_format", inner)
    assert_refused(response, path, "invalid_request", "invalid_json")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("text", ["\x00", "\x00\x01\x1b[31m\x7f", " ", "\n\t\r", "\u2028\u2029\ufeff\ufffe", "🚗" * 50])
def test_strange_text_is_text(http: httpx2.Client, path: str, text: str) -> None:
    response = post(http, path, prompt=json.dumps(text))
    assert response.status_code in (200, 202), response.text
    job = http.get(f"/jobs/{response.headers['x-carpool-job-id']}", params={"wait": 20}).json()
    assert job["status"] == "succeeded"
    prompts = {"/jobs": text, "/v1/completions": text}
    assert job["text"] == simulated_text(prompts.get(path, f"user: {text}\nassistant:"), 1, 3)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b'"x"', b"5", b"true", b"\xff\xfe", b"{", b"\x00", b'{"a": 1}' * 2]
)
def test_a_body_that_is_no_object_is_refused(http: httpx2.Client, path: str, content: bytes) -> None:
    assert_refused(http.post(path, content=content), path, "invalid_request", "invalid_json")


@pytest.mark.parametrize("path", BODIES)
def test_a_body_over_the_bound_is_413_however_it_comes(http: httpx2.Client, path: str) -> None:
    large = BODIES[path] % json.dumps("x" * (4 * 2**20))
    whole = http.post(path, content=large)
    chunked = http.post(path, content=iter([large.encode()]))
    for response in (whole, chunked):
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("id", ["%00", "..%2f..%2fetc", "a b", "{carpool}", "x" * 300, "%ff", "resp_%0a", "resp_*"])
def test_ids_that_are_none_are_not_found(http: httpx2.Client, id: str) -> None:
    for path in (f"/jobs/{id}", f"/v1/responses/{id}", f"/v1/models/{id}"):
        response = http.get(path)
        assert response.status_code == 404, (path, response.text)
        assert response.json()["error"]["code"] in ("job_not_found", "model_not_found", "not_found")
