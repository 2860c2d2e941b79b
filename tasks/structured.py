"""The shape of what constrains a text: `response_format`, `tools`, `tool_choice`, by their OpenAI names.

Only what can be said without a model is checked here, so that the API refuses it before a job is accepted. Whether a
schema can be enforced is the worker's to say (`worker/engines/grammar.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_TOOLS: Final = 128
#: Of one JSON Schema, as compact JSON; compiling one takes time that the whole batch waits for.
MAX_SCHEMA_BYTES: Final = 64 * 1024
MAX_TOOLS_BYTES: Final = 256 * 1024
#: A schema or a tool's parameters nested deeper than this is nobody's.
MAX_SCHEMA_DEPTH: Final = 64
#: An array's bounds are written out in a grammar: a million of them would hold up the whole batch for minutes.
MAX_SCHEMA_ITEMS: Final = 10_000

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES: Final = ("none", "auto", "required")


def check_response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format, or None where it is plain text.

    Raises:
        ValueError: it is none of the three forms; the message names the field.
    """
    if value is None:
        return None
    kind = value.get("type")
    match kind:
        case "text" | "json_object":
            _refuse_others(value, ("type",), f"a response_format of type {kind}")
            return None if kind == "text" else value
        case "json_schema":
            _refuse_others(value, ("type", "json_schema"), "a response_format of type json_schema")
            _check_json_schema(value.get("json_schema"))
            return value
    raise ValueError(f"a response_format of type {str(kind)[:80]!r}: give text, json_object or json_schema")


def check_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as they are.

    Raises:
        ValueError: one of them is no function tool of OpenAI's, or there are too many; the message names it.
    """
    if tools is None:
        return None
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise ValueError(f"{len(tools)} tools, 1 to {MAX_TOOLS} are possible: leave the field out where there are none")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        names.add(_check_tool(tool, f"tools[{index}]"))
        if len(names) <= index:
            raise ValueError(f"two tools have the name {tool['function']['name']!r}: give each a name of its own")
    size = json_size(tools)
    if size > MAX_TOOLS_BYTES:
        raise ValueError(f"tools of {size} bytes, at most {MAX_TOOLS_BYTES} are possible")
    return tools


def check_tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises ValueError where the choice is no choice among these tools."""
    if choice is None:
        return
    if not tools:
        raise ValueError("tool_choice without tools: give both or none")
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise ValueError(f"a tool_choice of {choice[:80]!r}: give {', '.join(_CHOICES)} or a function by its name")
        return
    name = chosen_tool(choice)
    if name is None:
        raise ValueError('a tool_choice that is no function: give {"type": "function", "function": {"name": …}}')
    if name not in tool_names(tools):
        raise ValueError(f"tool_choice names {name[:80]!r}, which is none of the tools {', '.join(tool_names(tools))}")


def chosen_tool(choice: str | Mapping[str, Any] | None) -> str | None:
    """The name in a choice of one function; None for every other choice."""
    if not isinstance(choice, Mapping) or set(choice) != {"type", "function"} or choice["type"] != "function":
        return None
    function = choice["function"]
    if not isinstance(function, Mapping) or set(function) != {"name"} or not isinstance(function["name"], str):
        return None
    return function["name"]


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def json_size(value: Any) -> int:
    """Bytes of a value as compact JSON. Raises ValueError for what JSON cannot say, such as NaN."""
    return len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())


def _check_json_schema(value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError("a response_format of type json_schema needs json_schema: {name, schema}")
    _refuse_others(value, ("name", "description", "schema", "strict"), "json_schema")
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"json_schema.name is {str(name)[:80]!r}: give 1 to 64 letters, digits, _ or -")
    _check_optional(value, "json_schema")
    _check_schema(value.get("schema"), "json_schema.schema")


def _check_tool(tool: Any, where: str) -> str:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ValueError(f"{where} is no function tool: only tools of type function are possible")
    _refuse_others(tool, ("type", "function"), where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ValueError(f"{where}.function is missing: give {{name, description, parameters}}")
    where += ".function"
    _refuse_others(function, ("name", "description", "parameters", "strict"), where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}.name is {str(name)[:80]!r}: give 1 to 64 letters, digits, _ or -")
    _check_optional(function, where)
    if function.get("parameters") is not None:
        _check_schema(function["parameters"], f"{where}.parameters")
    return name


def _check_optional(value: Mapping[str, Any], where: str) -> None:
    if not isinstance(value.get("description"), str | None):
        raise ValueError(f"{where}.description is no text")
    if not isinstance(value.get("strict"), bool | None):
        raise ValueError(f"{where}.strict is {str(value['strict'])[:80]!r}: give true or false")


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, dict):
        raise ValueError(f"{where} is no JSON Schema: give an object")
    _check_levels(schema, where)
    size = json_size(schema)
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"{where} has {size} bytes, at most {MAX_SCHEMA_BYTES} are possible")


def _check_levels(schema: dict[str, Any], where: str) -> None:
    """Depth and array bounds; level by level, since the recursion of a deep schema would not end well."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        for name in ("minItems", "maxItems"):
            found = [outer[name] for outer in level if isinstance(outer, dict) and name in outer]
            bounds = [bound for bound in found if isinstance(bound, int | float) and bound > MAX_SCHEMA_ITEMS]
            if bounds:
                raise ValueError(
                    f"{where} has a {name} of {str(bounds[0])[:40]}, at most {MAX_SCHEMA_ITEMS} is possible"
                )
        inner = [value for outer in level for value in (outer.values() if isinstance(outer, dict) else outer)]
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return
    raise ValueError(f"{where} is nested deeper than {MAX_SCHEMA_DEPTH} levels: use $defs and $ref")


def _refuse_others(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    others = [str(name)[:80] for name in value if name not in known]
    if others:
        raise ValueError(f"{where} has the field {others[0]!r}, which is not supported: leave it out")
