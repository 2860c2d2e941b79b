"""Jinja as chat templates want it: in a sandbox, with what transformers gives them (`utils/chat_template_utils.py`).

A test compares what templates make of it with transformers' own rendering.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """The tag `generation` marks the assistant's words for training; a prompt passes it over."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, **variables: Any) -> str:
    """The template's text. Raises ValueError where it refuses, or trips over, what it is given."""
    try:
        return _compiled(template).render(documents=None, **variables)
    # A template is foreign code; one that trips over a turn must not take the process along.
    except (TemplateError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(str(error)) from error


def variables(template: str) -> set[str]:
    """Names that a template takes from outside; none of one that cannot be read."""
    try:
        return meta.find_undeclared_variables(_environment().parse(template))
    except TemplateError:
        return set()


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # jinja's own escapes what means something in HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)  # the day where the server stands, as in transformers
