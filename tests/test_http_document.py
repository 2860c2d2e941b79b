"""The HTTP reference is what the application describes, and the description says of every error what it means."""

from __future__ import annotations

from typing import Any

import pytest

from api import error_docs
from api.app import create_app
from ops import http_doc
from tasks.code_help import HELP
from tasks.codes import CODES
from tasks.settings import Settings

#: Of tasks that are sent with plain Celery; and of paths and methods that no endpoint has.
ELSEWHERE = {"eta_unsupported", "not_found", "method_not_allowed"}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return create_app(Settings(engine="simulated")).openapi()


@pytest.fixture(scope="module")
def page() -> str:
    return http_doc.DOCUMENT.read_text()


def test_the_page_is_what_the_application_describes(page: str) -> None:
    assert page == http_doc.render(), "stale: run python -m ops.http_doc"


def test_every_endpoint_and_every_field_of_a_body_is_on_the_page(page: str, described: dict[str, Any]) -> None:
    sections = {part.partition("\n")[0].strip("`"): part for part in page.split("\n### ")}
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            section = sections[f"{method.upper()} {path}"]
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                name = schema.get("$ref", "").removeprefix("#/components/schemas/")
                properties = (described["components"]["schemas"][name] if name else schema)["properties"]
                assert all(f"`{field}`" in section for field in properties)
            for parameter in operation.get("parameters", []):
                assert f"`{parameter['name']}`" in section


def test_every_field_of_a_body_and_every_parameter_is_described(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"]
    for path, operations in described["paths"].items():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                found = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
                for name, field in found["properties"].items():
                    options = [field, *field.get("anyOf", ())]
                    assert any(option.get("description") for option in options), f"{path}: {name}"
            for parameter in operation.get("parameters", []):
                assert parameter["in"] == "path" or parameter.get("description"), f"{path}: {parameter['name']}"


def test_every_code_has_a_meaning_and_an_advice(page: str) -> None:
    assert HELP.keys() == CODES.keys()
    for code in CODES.values():
        assert f"| `{code.name}` | {code.status} | `{code.type}` | {HELP[code.name].meaning} | " in page


def test_every_code_is_one_of_some_endpoint(described: dict[str, Any]) -> None:
    named = {
        code
        for operations in described["paths"].values()
        for operation in operations.values()
        for code in operation.get(error_docs.EXTENSION, ())
    }
    assert named | ELSEWHERE == CODES.keys()


def test_an_endpoint_has_the_statuses_of_its_codes(described: dict[str, Any]) -> None:
    operation = described["paths"]["/jobs/{id}"]["delete"]
    assert {"job_not_found", "job_not_ended", "invalid_api_key"} <= set(operation[error_docs.EXTENSION])
    assert "429" not in operation["responses"]
    assert operation["responses"]["404"]["description"] == "`job_not_found`"
    assert "422" not in described["paths"]["/v1/completions"]["post"]["responses"]
    assert "`unsupported_field`" in described["paths"]["/v1/completions"]["post"]["responses"]["400"]["description"]
    assert "`unsupported_field`" in described["paths"]["/jobs"]["post"]["responses"]["422"]["description"]


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 20}, "integer, from 1 to 20"),
        ({"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0}, "number, above 0 to 1"),
        (
            {"type": "integer", "minimum": -9.223372036854776e18, "maximum": 1.8446744073709552e19},
            "integer, from -2^63 below 2^64",
        ),
        ({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}, "string, not empty"),
        (
            {"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "minItems": 1},
            "list of [Message](#message), at least 1 items",
        ),
        ({"enum": ["a", "b"], "type": "string"}, "`a`, `b`"),
        ({"const": "24h", "type": "string"}, '`"24h"`'),
    ],
)
def test_a_type_is_written_in_words(schema: dict[str, Any], shown: str) -> None:
    assert http_doc._type(schema) == shown
