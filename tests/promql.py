"""The names and labels in a PromQL expression: enough of its grammar to check them against a scrape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'')
_SELECTOR = re.compile(r"\b(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?P<labels>\{[^}]*\})?")
_MATCHER = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")


@dataclass(frozen=True)
class Selector:
    """A metric as an expression asks for it, by these labels."""

    name: str
    labels: frozenset[str]


def selectors(expression: str) -> Iterator[Selector]:
    """Every metric that is asked for. What is neither followed by `(` nor a keyword or a number is one."""
    bare = _RANGE.sub("", _GROUPING.sub("", _STRING.sub('""', expression)))
    position = 0
    while match := _SELECTOR.search(bare, position):
        position = match.end()
        is_call = bare[position:].lstrip().startswith("(") and not match["labels"]
        if is_call or match["name"] in _KEYWORDS:
            continue
        yield Selector(match["name"], frozenset(_MATCHER.findall(match["labels"] or "")))


def groupings(expression: str) -> set[str]:
    """Every label that results are put together by, or matched on."""
    bare = _STRING.sub('""', expression)
    return {label.strip() for found in _GROUPING.findall(bare) for label in found.split(",") if label.strip()}


_AGGREGATIONS = ("sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile", "stddev", "stdvar", "group")
_KEYWORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan", "by", "without", "on", *_AGGREGATIONS})
