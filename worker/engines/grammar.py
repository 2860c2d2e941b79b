"""Grammars that a sequence's text has to follow: JSON, JSON of a schema, calls of tools. By llguidance.

The grammar says which tokens may come next; the sampler keeps the others out (`worker/engines/sampler.py`). JSON is
written on one line, with at most one space behind a comma or colon: a model that may write white space without end
sometimes does.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tasks.job_request import SamplingParams
from tasks.tool_calls import CLOSE, OPEN
from worker.engines.base import SequenceError

#: Regular expressions of llguidance's JSON compiler.
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
#: oneOf is taken for anyOf: a grammar can't count, and the schemas of tagged unions say oneOf where they mean either.
_OPTIONS: Final = {**_COMPACT, "coerce_one_of": True}
#: A function without parameters takes an empty object.
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_NUM_KEPT: Final = 32
_END: Final = {
    "content": "<|end of a text that has no end|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


class Grammar:
    """The grammar of one sequence, at the sequence's position."""

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher = matcher
        self._field = field
        #: Why no token can come next; None while one can.
        self.failure: SequenceError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> bytes:
        """A bit for each token, the lowest bit of the first byte for token 0: whether it may come next.

        All bits are 0 where none may, and `failure` says why. An end-of-sequence token may come where the text could
        end here.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
            return bytes(len(mask))
        return mask

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Go on behind these tokens. Returns False, with `failure` set, where the grammar does not allow them."""
        if not self._matcher.consume_tokens(list(token_ids)):
            self._fail()
        return self.failure is None

    def _fail(self) -> None:
        reason = _first_line(self._matcher.get_error())
        cause = f"can't be enforced at this point of the text ({reason})"
        if "NoExtension" in reason:
            cause = "allows no further token at this point of the text, which is not whole"
        self.failure = SequenceError("invalid_request", f"{self._field} {cause}: give a simpler schema")


class GrammarCompiler:
    """Makes the grammars of one model's sequences.

    Args:
        tokenizer_json: gives the content of tokenizer.json, None where there is none; asked at first use, since to read
            a vocabulary takes up to a second.
        vocab_size: number of logits.
        eos_ids: tokens that end a text.
    """

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        #: By their text: n answers to one request, and a client's every request, have the same.
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def grammar_for(self, params: SamplingParams, output_ids: Sequence[int]) -> Grammar | None:
        """The grammar that the parameters ask for, behind the tokens that are there; None where they ask for none.

        Raises:
            SequenceError: "invalid_request" where a schema cannot be enforced; the message has llguidance's words.
        """
        text = grammar_text(params)
        if text is None:
            return None
        field = "tools" if params.offers_tools else "response_format"
        grammar = Grammar(self._matcher(text, field, params).deep_copy(), field)
        if output_ids and not grammar.advance(output_ids):
            raise SequenceError(
                "engine_error",
                f"the {len(output_ids)} tokens of an earlier ride do not fit {field}: submit the job again",
            )
        return grammar

    def _matcher(self, text: str, field: str, params: SamplingParams) -> LLMatcher:
        if text in self._compiled:
            self._compiled.move_to_end(text)
            return self._compiled[text]
        matcher = self._compile(text)
        if matcher.is_error():
            where, cause = _culprit(params, field, self._compile, _first_line(matcher.get_error()))
            raise SequenceError("invalid_request", f"{where} can't be enforced: {cause}. Leave out what it names")
        self._compiled[text] = matcher
        while len(self._compiled) > _NUM_KEPT:
            self._compiled.popitem(last=False)
        return matcher

    def _compile(self, text: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))

    def _read_tokenizer(self) -> LLTokenizer:
        tokenizer_json = self._tokenizer_json()
        if tokenizer_json is None:
            raise SequenceError(
                "unsupported_field",
                "this model has no tokenizer.json, so that response_format and tools can't be had: leave them out",
            )
        content = json.loads(tokenizer_json)
        size = _num_tokens(content)
        eos_ids = [token_id for token_id in self._eos_ids if token_id < size]
        if not eos_ids:
            # llguidance wants one: the first id that no text has.
            eos_ids = [size]
            content.setdefault("added_tokens", []).append({**_END, "id": size})
            size += 1
        _spell_added_tokens(content)
        try:
            return LLTokenizer(json.dumps(content), n_vocab=max(size, self._vocab_size), eos_token=eos_ids)
        except ValueError as error:
            raise SequenceError(
                "unsupported_field",
                f"this model's tokenizer is of a kind for which response_format and tools can't be had ({error}): "
                "leave them out",
            ) from error


def grammar_text(params: SamplingParams) -> str | None:
    """The grammar of a text that fits response_format, tools and tool_choice, in llguidance's form of Lark."""
    schema = _schema_of_format(params)
    if not params.offers_tools:
        return None if schema is None else f"%llguidance {{}}\nstart: {_json(schema)}\n"
    rules = [_call_rule(index, tool) for index, tool in enumerate(params.callable_tools)]
    calls = " | ".join(f"call_{index}" for index in range(len(rules)))
    more = "" if params.parallel_tool_calls is False else f' (WS? "{OPEN}" rest)*'
    start = f'"{OPEN}" rest{more}'
    if not params.must_call_tools:
        if schema is None:
            # The lazy rule wins over the text as soon as the text holds the tag.
            start = f"text | text_and_tag rest{more}"
            rules += ["text: TEXT", f'text_and_tag[lazy]: TEXT "{OPEN}"', r"TEXT: /(.|\n)*/"]
        else:
            start = f"json | {start}"
            rules.append(f"json: {_json(schema)}")
    lines = ["%llguidance {}", f"start: {start}", f'rest: WS? ({calls}) WS? "{CLOSE}"', *rules, r"WS: /[ \n]{1,2}/"]
    return "\n".join(lines) + "\n"


def _schema_of_format(params: SamplingParams) -> dict[str, Any] | None:
    if params.response_format is None:
        return None
    if params.response_format["type"] == "json_object":
        return {"type": "object"}
    schema: dict[str, Any] = params.response_format["json_schema"]["schema"]
    return schema


def _call_rule(index: int, tool: Mapping[str, Any]) -> str:
    """One call: the parameters' schema stands alone, so that its references find their definitions."""
    function = tool["function"]
    return f'call_{index}: /\\{{"name":[ ]?"{function["name"]}",[ ]?"arguments":[ ]?/ {_parameters(function)} "}}"'


def _parameters(function: Mapping[str, Any]) -> str:
    """As OpenAI's: what can't be enforced counts only where `strict` asks for it."""
    schema = {"type": "object", **(function.get("parameters") or _NO_PARAMETERS)}
    return _json(schema, lenient=function.get("strict") is not True)


def _json(schema: Mapping[str, Any], lenient: bool = False) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {**_OPTIONS, "lenient": lenient}})


def _culprit(params: SamplingParams, field: str, compile: Callable[[str], LLMatcher], cause: str) -> tuple[str, str]:
    """Which of several schemas llguidance refuses, and its words for that one alone."""
    schema = _schema_of_format(params)
    parts = {} if schema is None else {"response_format": _json(schema)}
    for tool in params.callable_tools:
        parts[f"the tool {tool['function']['name']!r}"] = _parameters(tool["function"])
    for where, part in parts.items():
        matcher = compile(f"%llguidance {{}}\nstart: {part}\n")
        if matcher.is_error():
            return where, _first_line(matcher.get_error())
    return field, cause


def _first_line(error: str) -> str:
    """The first line of an error that says something: llguidance writes the place first and quotes the grammar."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    first = (lines or ["no reason given"])[0]
    _, _, words = first.rpartition("failed to compile JSON schema: ")
    # A regular expression's error names the expression, and its cause in the last line.
    causes = [line for line in lines if line.startswith("error: ")]
    return f"{words.rstrip(':')}: {causes[-1].removeprefix('error: ')}" if causes else words


def _num_tokens(tokenizer: dict[str, Any]) -> int:
    """How many tokens there are in the content of tokenizer.json."""
    vocabulary = tokenizer["model"].get("vocab") or {}
    ids = [token["id"] for token in tokenizer.get("added_tokens") or ()]
    ids += vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    return max(ids, default=-1) + 1


def _spell_added_tokens(tokenizer: dict[str, Any]) -> None:
    """Make text of the added tokens that are text, in the content of tokenizer.json.

    llguidance takes every added token of the form <…> for a special one, which no text can hold. But `<tool_call>` is
    such a token of many models, and is text: it is made an ordinary one of the vocabulary.
    """
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    if model.get("type") != "BPE":
        return
    for token in added:
        model["vocab"].setdefault(token["content"], token["id"])
    tokenizer["added_tokens"] = [token for token in added if token["special"] or not _is_spelled(token["content"])]


def _is_spelled(content: str) -> bool:
    """Whether it is written with characters that stand for themselves in every vocabulary."""
    return content.isascii() and content.isprintable() and " " not in content
