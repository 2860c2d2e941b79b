"""Calls of tools as text: whatever the borders of the pieces, the same calls come out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tool_calls import (
    CLOSE,
    OPEN,
    Piece,
    TextPiece,
    ToolCallArguments,
    ToolCallParser,
    ToolCallStart,
    describe_tools,
    render_call,
)

Call = tuple[str, str]
#: What a parser may take for the end of the arguments.
HARD_TEXTS = ('"', "\\", "{", "}}", CLOSE)

json_objects = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=8)
        | st.sampled_from(['"', "\\", "{", "}}", CLOSE]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
calls = st.tuples(
    st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True),
    st.builds(lambda value, ascii: json.dumps(value, ensure_ascii=ascii), json_objects, st.booleans()),
)


def parse(pieces: Sequence[str]) -> list[Piece]:
    parser = ToolCallParser()
    return [found for piece in pieces for found in parser.feed(piece)] + parser.finish()


def folded(pieces: Sequence[Piece]) -> tuple[str, list[Call]]:
    """The text, and each call with its arguments put together."""
    text = ""
    found: list[Call] = []
    for piece in pieces:
        match piece:
            case TextPiece():
                text += piece.text
            case ToolCallStart():
                assert piece.index == len(found)
                found.append((piece.name, ""))
            case ToolCallArguments():
                name, arguments = found[piece.index]
                assert piece.index == len(found) - 1
                found[piece.index] = (name, arguments + piece.fragment)
    return text, found


def cut(text: str, borders: Sequence[int]) -> list[str]:
    places = sorted({border % (len(text) + 1) for border in borders} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


@given(
    text=st.text(alphabet="ab <{}\n", max_size=12),
    made=st.lists(calls, min_size=1, max_size=3),
    borders=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_calls_behind_a_text_come_out_whole_wherever_the_text_is_cut(
    text: str, made: list[Call], borders: list[int]
) -> None:
    whole = text + "\n".join(render_call(*call) for call in made)

    for pieces in ([whole], list(whole), cut(whole, borders)):
        assert folded(parse(pieces)) == (text.rstrip(), made)


@given(st.text(alphabet='abc <tol_c>/{}"\n', max_size=40), st.lists(st.integers(0, 10_000), max_size=10))
def test_a_text_without_a_call_comes_out_as_it_is(text: str, borders: list[int]) -> None:
    assert folded(parse(cut(text, borders))) == (text, [])


def test_text_and_arguments_come_as_soon_as_they_are_certain() -> None:
    parser = ToolCallParser()

    assert parser.feed("It is 1 < 2 ") == [TextPiece("It is 1 < 2")]
    assert parser.feed("<tool") == []
    assert parser.feed("box> so") == [TextPiece(" <toolbox> so")]
    assert parser.feed('\n<tool_call>{"name": "f", "argu') == []
    assert parser.feed('ments": {"a": "x') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a": "x')]
    assert parser.feed("}\\") == [ToolCallArguments(0, "}\\")]
    assert parser.feed('"y"') == [ToolCallArguments(0, '"y"')]
    assert parser.feed("}}</tool_c") == [ToolCallArguments(0, "}")]
    assert parser.feed("all>") == []
    assert parser.finish() == []


def test_white_space_within_and_between_calls_is_nobodys() -> None:
    one = f'\n{OPEN}\n{{ "name" : "f" ,\n "arguments" : {{ }} }}\n{CLOSE}\n'
    text = f'{one}\n{OPEN}{{"name":"g","arguments":{{}}}}{CLOSE}\n'

    assert folded(parse([text])) == ("", [("f", "{ }"), ("g", "{}")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', ("", [("f", '{"a": 1}')])),
        ('hi <tool_call>{"name": "f', ("hi" + '<tool_call>{"name": "f', [])),
        ("hi <tool_c", ("hi <tool_c", [])),
    ],
)
def test_a_text_that_ends_within_a_call_gives_what_there_is(text: str, expected: tuple[str, list[Call]]) -> None:
    assert folded(parse(list(text))) == expected


@pytest.mark.parametrize("inner", ["nothing", '{"arguments": {}}', '{"name": 7, "arguments": {}}', '{"name": "f"}'])
def test_what_only_looks_like_a_call_is_text(inner: str) -> None:
    text = f"a{OPEN}{inner}{CLOSE}b"

    assert folded(parse(list(text))) == (text, [])


def test_a_model_is_told_of_each_tool_and_how_to_call_it() -> None:
    tools = [{"type": "function", "function": {"name": "süß", "parameters": {"type": "object"}}}]

    told = describe_tools(tools)

    assert json.loads(told.partition("<tools>\n")[2].partition("\n")[0]) == tools[0]
    assert '<tool_call>{"name": "<function-name>"' in told
