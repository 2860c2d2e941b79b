"""Writes docs/http.md from the OpenAPI description: `python -m ops.http_doc`. A test holds the two together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from api import error_docs
from api.app import create_app
from tasks.code_help import HELP
from tasks.codes import CODES
from tasks.job_request import JobOptions
from tasks.settings import Settings

DOCUMENT: Final = Path(__file__).parent.parent / "docs" / "http.md"
_HEAD: Final = """# HTTP reference

Every endpoint, with its parameters, fields and answers, as `/openapi.json` describes them: this page is made from that
(`python -m ops.http_doc`). [api.md](api.md) explains jobs, streams and models; [openai.md](openai.md) what is behind
`/v1`.

Bodies are JSON, and a field that is not listed is refused by name. Where there are [API keys](security.md), every
request carries one: `Authorization: Bearer …` or `X-API-Key: …`. Every answer has `x-request-id`; every answer to a
request that made a job has `x-carpool-job-id` and `Location`.

A star marks what a request has to have. "or null" is left out where it means the same as not giving the field.
"""
_TAGS: Final = {
    "generate": "Generate and wait",
    "jobs": "Jobs",
    "openai": "OpenAI's endpoints",
    "health": "Health",
}
_OTHER: Final = "Others"
_METHODS: Final = ("post", "get", "delete", "put", "patch")
_GROUPS: Final = {
    "any request": error_docs.ANY,
    "a body": error_docs.BODY,
    "accepting": error_docs.ACCEPT,
    "a job's end": error_docs.END,
}
#: From here on a float does not hold every whole number.
_INEXACT: Final = 2**53
_REF: Final = "#/components/schemas/"

Schema = Mapping[str, Any]


def render() -> str:
    """The whole page."""
    described = create_app(Settings(engine="simulated")).openapi()
    schemas: Mapping[str, Schema] = described["components"]["schemas"]
    options: Schema = schemas["SubmitJob"]["properties"]
    operations = list(_operations(described["paths"]))
    titles = [title for title in [*_TAGS.values(), _OTHER] if any(found == title for found, *_ in operations)]
    parts = [_HEAD, _contents(titles, operations)]
    for title in titles:
        parts.append(f"## {title}\n")
        parts += [_operation(m, path, one, schemas, options) for found, m, path, one in operations if found == title]
    parts += [_options(options), _objects(schemas, operations), _errors()]
    return "\n".join(parts)


def _operations(paths: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Schema]]:
    """Title, method, path and description of each, shortest path first within a family."""
    found = [(path, method, paths[path][method]) for path in paths for method in _METHODS if method in paths[path]]
    # what is first in a family stays first: the order in which the application has them
    family = {path: index for index, path in reversed(list(enumerate(_root(path) for path in paths)))}
    for path, method, one in sorted(found, key=lambda it: (family[_root(it[0])], it[0].count("/"), it[0])):
        yield _TAGS.get((one.get("tags") or [""])[0], _OTHER), method.upper(), path, one


def _root(path: str) -> str:
    return "/".join(path.split("/")[: 3 if path.startswith("/v1/") else 2])


def _contents(titles: list[str], operations: list[tuple[str, str, str, Schema]]) -> str:
    lines = []
    for title in titles:
        lines += [f"**{title}**", "", "| endpoint | what |", "|---|---|"]
        lines += [
            f"| [`{method} {path}`](#{_anchor(method, path)}) | {_first_sentence(one)} |"
            for found, method, path, one in operations
            if found == title
        ]
        lines.append("")
    return "\n".join([*lines, "[Options](#options) · [Objects](#objects) · [Error codes](#error-codes)", ""])


def _anchor(method: str, path: str) -> str:
    """As GitHub makes it of a heading: lower case, blanks as hyphens, no other punctuation."""
    heading = f"{method} {path}".lower()
    return "".join("-" if char == " " else char for char in heading if char.isalnum() or char in " -_")


def _first_sentence(operation: Schema) -> str:
    text = _plain(operation.get("description", ""))
    end = text.find(". ")
    return text if end < 0 else text[: end + 1]


def _operation(method: str, path: str, one: Schema, schemas: Mapping[str, Schema], options: Schema) -> str:
    parts = [f"### `{method} {path}`", "", one.get("description", "").strip(), ""]
    parameters = one.get("parameters", [])
    if parameters:
        parts += ["| parameter | in | type | default | what |", "|---|---|---|---|---|"]
        for parameter in parameters:
            star = " *" if parameter.get("required") else ""
            schema = parameter["schema"]
            parts.append(
                f"| `{parameter['name']}`{star} | {parameter['in']} | {_type(schema)} | {_default(schema)} | "
                f"{_cell(parameter.get('description') or _of_path(parameter['name']))} |"
            )
        parts.append("")
    for kind, content in one.get("requestBody", {}).get("content", {}).items():
        schema = _resolved(content["schema"], schemas)
        parts += [f"Body, `{kind}`:", "", *_fields(schema, options), ""]
    parts += [_answers(one), ""]
    return "\n".join(parts)


def _of_path(name: str) -> str:
    return "As the answer to the request that made it told." if name == "id" else "Name or alias."


def _fields(schema: Schema, options: Schema) -> list[str]:
    """A table of the fields: those that have to be there first; those that are as everywhere are named below it."""
    required = set(schema.get("required", ()))
    properties: Schema = schema.get("properties", {})
    same = [name for name in properties if name in JobOptions.model_fields and properties[name] == options.get(name)]
    lines = ["| field | type | default | what |", "|---|---|---|---|"]
    for name in sorted((name for name in properties if name not in same), key=lambda name: name not in required):
        field = properties[name]
        star = " *" if name in required else ""
        default = "" if name in required else _default(field)
        lines.append(f"| `{name}`{star} | {_type(field)} | {default} | {_cell(_description(field))} |")
    if same:
        lines += ["", f"And, as [everywhere](#options): {', '.join(f'`{name}`' for name in same)}."]
    return lines


def _options(options: Schema) -> str:
    rows = _fields({"properties": {name: options[name] for name in JobOptions.model_fields}}, {})
    return "\n".join(["## Options", "", "What most bodies take, with the defaults of `POST /jobs`.", "", *rows, ""])


def _description(field: Schema) -> str:
    if "description" in field:
        return str(field["description"])
    return next((str(option["description"]) for option in field.get("anyOf", ()) if "description" in option), "")


def _resolved(schema: Schema, schemas: Mapping[str, Schema]) -> Schema:
    reference = schema.get("$ref")
    return schemas[str(reference).removeprefix(_REF)] if reference else schema


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_REF)
        return f"[{name}](#{name.lower()})"
    options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if options:
        return " or ".join(dict.fromkeys(_type(option) for option in options if option.get("type") != "null"))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        items = schema.get("items")
        size = _size(schema, "Items", " items")
        return f"list of {_type(items)}{size}" if items else f"list{size}"
    if kind == "string" and schema.get("minLength") == 1 and "maxLength" not in schema:
        return "string, not empty"
    if kind == "string":
        return f"{'file' if schema.get('format') == 'binary' else 'string'}{_size(schema, 'Length', ' characters')}"
    if kind in ("integer", "number"):
        return kind + _bounds(schema)
    return kind


def _size(schema: Schema, what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if least is not None and most is not None:
        return f", {least} to {most}{unit}"
    if most is not None:
        return f", at most {most}{unit}"
    return f", at least {least}{unit}" if least is not None else ""


def _bounds(schema: Schema) -> str:
    parts = []
    if "minimum" in schema:
        parts.append(f"from {_number(schema['minimum'])}")
    if "exclusiveMinimum" in schema:
        parts.append(f"above {_number(schema['exclusiveMinimum'])}")
    if "maximum" in schema:
        most = schema["maximum"]
        parts.append(f"{'to' if most < _INEXACT else 'below'} {_number(most)}")
    return f", {' '.join(parts)}" if parts else ""


def _number(value: float) -> str:
    """A bound; JSON has the large ones as floats, which are the powers of two next to them."""
    if abs(value) >= _INEXACT:
        return f"{'-' if value < 0 else ''}2^{round(abs(value)).bit_length() - 1}"
    return str(int(value)) if value == int(value) else f"{value:g}"


def _default(schema: Schema) -> str:
    if schema.get("default") is None:
        return ""
    return f"`{json.dumps(schema['default'], ensure_ascii=False)}`"


def _answers(one: Schema) -> str:
    good, lines = [], []
    for status, response in one["responses"].items():
        if int(status) < 400:
            kinds = response.get("content", {})
            shown = [
                _type(content["schema"]) if content.get("schema") else f"`{kind}`" for kind, content in kinds.items()
            ]
            what = " or ".join(shown) or response.get("description", "")
            good.append(f"{status} {what}".rstrip())
    lines.append(f"Answers: {'; '.join(good)}.")
    codes = one.get(error_docs.EXTENSION)
    if codes is None:
        lines.append(f"Errors: {', '.join(status for status in one['responses'] if int(status) >= 400)}.")
        return "\n".join(lines)
    groups = [name for name, group in _GROUPS.items() if set(group) <= set(codes)]
    own = [code for code in codes if not any(code in _GROUPS[name] for name in groups)]
    named = [f"those of [{name}](#error-codes)" for name in groups]
    lines.append(f"Errors: {', '.join([*named, *(f'`{code}`' for code in own)])}.")
    return "\n".join(lines)


def _objects(schemas: Mapping[str, Schema], operations: list[tuple[str, str, str, Schema]]) -> str:
    bodies = {
        str(content["schema"].get("$ref", "")).removeprefix(_REF)
        for *_, one in operations
        for content in one.get("requestBody", {}).get("content", {}).values()
    }
    parts = ["## Objects", ""]
    for name in sorted(schemas, key=str.lower):
        if name in bodies:
            continue
        schema = schemas[name]
        parts += [f"### {name}", "", _cell(schema.get("description", "")).strip(), "", *_object_fields(schema), ""]
    return "\n".join(parts)


def _object_fields(schema: Schema) -> list[str]:
    lines = ["| field | type | what |", "|---|---|---|"]
    for name, field in schema.get("properties", {}).items():
        lines.append(f"| `{name}` | {_type(field)}{_or_null(field)} | {_cell(_description(field))} |")
    return lines


def _or_null(field: Schema) -> str:
    return " or null" if any(option.get("type") == "null" for option in field.get("anyOf", ())) else ""


def _errors() -> str:
    lines = [
        "## Error codes",
        "",
        'Every error is `{"error": {"message", "type", "param", "code"}}`, in JSON and in streams. Under `/v1`, 422 is',
        "400. Endpoints name what they may answer in these groups:",
        "",
        *(f"- **{name}**: {', '.join(f'`{code}`' for code in codes)}" for name, codes in _GROUPS.items()),
        "",
        "| code | status | type | when | what to do |",
        "|---|---|---|---|---|",
    ]
    for code in CODES.values():
        found = HELP[code.name]
        lines.append(f"| `{code.name}` | {code.status} | `{code.type}` | {found.meaning} | {found.advice} |")
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(render())
