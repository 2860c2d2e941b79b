"""Grammars: whatever a model would rather say, what comes out fits; and what can't be enforced is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tasks.job_request import SamplingParams
from tasks.tool_calls import ToolCallParser, ToolCallStart
from tests.test_tool_calls import folded
from tests.tiny_models import EOS_ID, byte_level_tokenizer
from worker.engines.base import SequenceError
from worker.engines.grammar import Grammar, GrammarCompiler, grammar_text
from worker.engines.sampler import SequenceSampling, forbid, sample

TOKENIZER = byte_level_tokenizer()
#: Models have more logits than their tokenizers have tokens.
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 9
CPU = torch.device("cpu")
#: One value of each kind, short enough for a text of random tokens.
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["car", "bus", None]},
        "seats": {"type": "integer", "minimum": 1, "maximum": 60},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/stop"}]},
    },
    "required": ["kind", "seats", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"stop": {"type": "object", "properties": {"at": {"type": "boolean"}}, "additionalProperties": False}},
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "ride", "schema": SCHEMA, "strict": True}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties or {"a": {"$ref": "#/$defs/digit"}},
        "required": list(properties or "a"),
        "additionalProperties": False,
        "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema_params(**schema: Any) -> SamplingParams:
    return SamplingParams(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})


TOOLS = [tool("add"), tool("add-2", b={"type": "boolean"})]


def compiler(tokenizer: Tokenizer = TOKENIZER, vocab_size: int = VOCAB_SIZE) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str, vocab_size, {EOS_ID})


COMPILER = compiler()


def write(
    params: SamplingParams, seed: int, output_ids: Sequence[int] = (), lifted: Sequence[int] = (), most: int = 400
) -> list[int]:
    """The tokens of a model of random logits, from `output_ids` on, to the end of the grammar or of the sequence.

    Args:
        lifted: tokens that the model likes best.
    """
    grammar = COMPILER.grammar_for(params, output_ids)
    sampling = SequenceSampling(params, seed, (1,), output_ids, VOCAB_SIZE, CPU, grammar)
    ids = list(output_ids)
    while not sampling.is_complete and EOS_ID not in ids and len(ids) < most:
        logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1000 * seed + len(ids))) * 3
        logits[0, list(lifted)] += 20
        (token_id,) = sample(logits, [sampling], [len(ids) + 1])
        assert token_id is not None, sampling.failure
        ids.append(token_id)
        sampling.record(token_id)
    return ids


def id_of(piece: str, tokenizer: Tokenizer = TOKENIZER) -> int:
    token_id = tokenizer.token_to_id(piece)
    assert token_id is not None
    return token_id


def allows(grammar: Grammar | None, *token_ids: int) -> list[bool]:
    """Whether each of the tokens may come next."""
    assert grammar is not None
    mask = grammar.mask()
    return [bool(mask[token_id // 8] >> token_id % 8 & 1) for token_id in token_ids]


def text_of(ids: Sequence[int]) -> str:
    return TOKENIZER.decode([token_id for token_id in ids if token_id != EOS_ID], skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(12))
def test_a_text_of_random_tokens_fits_its_schema_and_ends_with_its_last_brace(seed: int) -> None:
    ids = write(SamplingParams(response_format=SCHEMA_FORMAT), seed)

    value = json.loads(text_of(ids))
    assert EOS_ID not in ids
    assert list(value) == ["kind", "seats", "tags", "next"]
    assert value["kind"] in ("car", "bus", None)
    assert 1 <= value["seats"] <= 60
    assert len(value["tags"]) <= 2
    assert value["next"] is None or set(value["next"]) <= {"at"}


def test_a_tagged_union_is_one_of_its_kinds() -> None:
    kinds = [
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"], "additionalProperties": False}
        for kind in ("car", "bus")
    ]

    found = {text_of(write(schema_params(oneOf=kinds), seed)) for seed in range(8)}

    assert {json.loads(text)["kind"] for text in found} == {"car", "bus"}


def test_any_object_is_json_and_white_space_never_runs_on() -> None:
    blanks = [id_of(piece) for piece in ("Ġ", "Ċ")]
    braces = [id_of(piece) for piece in ("}", '"', ":")]
    for seed in range(5):
        text = text_of(write(SamplingParams(response_format={"type": "json_object"}), seed, lifted=blanks + braces))
        assert isinstance(json.loads(text), dict)
        assert not re.search(r"\s\s", re.sub(r'"(\\.|[^"\\])*"', '""', text))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add-2"}}])
def test_calls_that_have_to_be_made_are_made_and_nothing_else_is_said(choice: Any, seed: int) -> None:
    params = SamplingParams(tools=TOOLS, tool_choice=choice)
    parser = ToolCallParser()

    text, calls = folded(parser.feed(text_of(write(params, seed))) + parser.finish())

    assert text == ""
    assert calls
    for name, arguments in calls:
        assert name in (["add", "add-2"] if choice == "required" else ["add-2"])
        assert json.loads(arguments).keys() == ({"a"} if name == "add" else {"b"})


def test_without_parallel_calls_the_first_call_is_the_end() -> None:
    for seed in range(6):
        ids = write(SamplingParams(tools=TOOLS, tool_choice="required", parallel_tool_calls=False), seed)
        assert text_of(ids).count("<tool_call>") == 1
        assert EOS_ID not in ids


def test_a_model_that_may_call_tools_says_what_it_likes_until_it_writes_the_tag() -> None:
    params = SamplingParams(tools=TOOLS)
    free = write(params, 1, most=30)
    assert "<tool_call>" not in text_of(free)
    begun = TOKENIZER.encode("I add <tool_call>").ids

    parser = ToolCallParser()
    text, calls = folded(parser.feed(text_of(write(params, 3, begun))) + parser.finish())

    assert text == "I add"
    assert {name for name, _ in calls} <= {"add", "add-2"}
    assert calls


def test_a_format_and_tools_together_are_the_format_or_calls() -> None:
    params = SamplingParams(tools=TOOLS, response_format=SCHEMA_FORMAT)
    may_come = allows(COMPILER.grammar_for(params, ()), *range(TOKENIZER.get_vocab_size()))
    first = [str(TOKENIZER.id_to_token(token_id)) for token_id, may in enumerate(may_come) if may]

    assert {piece[0] for piece in first} == {"<", "{"}


def test_a_tag_that_is_one_token_of_the_vocabulary_may_be_written_with_it() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<stop>", special=True)])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    tag, closing, special = (id_of(name, tokenizer) for name in ("<tool_call>", "</tool_call>", "<stop>"))
    params = SamplingParams(tools=[tool("add")], parallel_tool_calls=False)
    body = tokenizer.encode('{"name": "add", "arguments": {"a": 1}}').ids

    grammar = compiler(tokenizer).grammar_for(params, [*tokenizer.encode("so: ").ids, tag, *body])

    assert allows(grammar, closing, tag, special) == [True, False, False]
    assert grammar is not None
    assert grammar.advance([closing])
    assert grammar.is_complete
    assert allows(compiler(tokenizer).grammar_for(params, ()), tag, special) == [True, False]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(response_format=SCHEMA_FORMAT), SamplingParams(tools=TOOLS, tool_choice="required")],
    ids=["schema", "tools"],
)
def test_a_sequence_taken_up_again_at_any_token_goes_on_as_it_would_have(params: SamplingParams) -> None:
    whole = write(params, 4)

    for cut in range(1, len(whole), 5):
        assert write(params, 4, whole[:cut]) == whole


def test_tokens_that_do_not_fit_the_grammar_are_not_gone_on_from() -> None:
    with pytest.raises(SequenceError, match="1 tokens of an earlier ride do not fit response_format") as caught:
        COMPILER.grammar_for(SamplingParams(response_format=SCHEMA_FORMAT), TOKENIZER.encode("x").ids)
    assert caught.value.code == "engine_error"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (schema_params(type="strange"), "response_format can't be enforced: Invalid type: strange"),
        (schema_params(type="array", uniqueItems=True), "Unimplemented keys.*uniqueItems"),
        (schema_params(type="string", pattern="(?=a)b"), r"look-around.* is not supported"),
        (schema_params(**{"$ref": "http://example.org/schema"}), "http://example.org/schema"),
        (schema_params(enum=[]), "Unsatisfiable"),
        (SamplingParams(tools=[tool("good"), tool("bad", x={"type": "strange"})]), "the tool 'bad' can't be enforced"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_cause(params: SamplingParams, message: str) -> None:
    with pytest.raises(SequenceError, match=message) as caught:
        COMPILER.grammar_for(params, ())
    assert caught.value.code == "invalid_request"
    assert "\n" not in str(caught.value)


def test_what_cannot_be_enforced_of_a_tool_counts_only_where_it_is_strict() -> None:
    lax = tool("f", x={"type": "string", "format": "a-format-of-nobody"})
    strict = {"type": "function", "function": lax["function"] | {"strict": True}}

    assert COMPILER.grammar_for(SamplingParams(tools=[lax]), ()) is not None
    with pytest.raises(SequenceError, match=r"the tool 'f' can't be enforced.*a-format-of-nobody"):
        COMPILER.grammar_for(SamplingParams(tools=[strict]), ())


def test_a_schema_that_leads_nowhere_fails_its_sequence_when_it_gets_there() -> None:
    params = schema_params(**{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})
    grammar = COMPILER.grammar_for(params, ())
    assert grammar is not None
    sampling = SequenceSampling(params, 0, (1,), (), VOCAB_SIZE, CPU, grammar)

    assert sample(torch.zeros(1, VOCAB_SIZE), [sampling], [1]) == [None]
    assert sampling.failure is not None
    assert sampling.failure.code == "invalid_request"
    assert "allows no further token" in str(sampling.failure)


def test_parameters_that_ask_for_nothing_have_no_grammar_and_read_no_vocabulary() -> None:
    def never() -> str:
        raise AssertionError("the vocabulary was read")

    assert GrammarCompiler(never, VOCAB_SIZE, {EOS_ID}).grammar_for(SamplingParams(), ()) is None
    assert grammar_text(SamplingParams(tools=TOOLS, tool_choice="none")) is None


def test_a_tokenizer_that_the_grammar_cannot_read_is_refused_by_name() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    params = SamplingParams(response_format={"type": "json_object"})

    for tokenizer_json in (words.to_str, lambda: None):
        with pytest.raises(SequenceError, match="response_format and tools can't be had") as caught:
            GrammarCompiler(tokenizer_json, 3, {2}).grammar_for(params, ())
        assert caught.value.code == "unsupported_field"


def test_a_model_without_an_end_of_sequence_token_ends_with_its_grammar() -> None:
    params = SamplingParams(response_format={"type": "json_object"})
    grammar = GrammarCompiler(TOKENIZER.to_str, VOCAB_SIZE, ()).grammar_for(params, TOKENIZER.encode('{"a": 1').ids)

    assert allows(grammar, EOS_ID, id_of("}")) == [False, True]
    assert grammar is not None
    assert grammar.advance([id_of("}")])
    assert grammar.is_complete


def test_sentencepiece_vocabularies_have_grammars_too() -> None:
    pieces = {
        piece: id
        for id, piece in enumerate(["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "{", "}"])
    }
    tokenizer = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    params = SamplingParams(response_format={"type": "json_object"})
    grammar = GrammarCompiler(tokenizer.to_str, len(pieces), {1}).grammar_for(params, [pieces["{"]])
    allowed = dict(zip(pieces, allows(grammar, *pieces.values()), strict=True))

    assert [piece for piece, may in allowed.items() if may] == ["<0x22>", "<0x7D>", "}"]


def test_a_mask_forbids_tokens_of_its_row_alone_and_leaves_the_allowed_logits_as_they_are() -> None:
    masks = [bytes([0b10000010, 0b10, 0, 0]), bytes(4)]
    for rows in ([0, 2], [0, 1]):
        logits = torch.arange(30.0).view(3, 10)[: max(rows) + 1]
        expected = logits.clone()
        expected[rows[0], [0, 2, 3, 4, 5, 6, 8]] = -torch.inf
        expected[rows[1]] = -torch.inf

        forbid(logits, rows, masks)

        assert torch.equal(logits, expected)


def test_a_start_of_a_call_is_known_before_its_arguments() -> None:
    ids = write(SamplingParams(tools=TOOLS, tool_choice="required"), 2)
    parser = ToolCallParser()
    pieces = [piece for token_id in ids for piece in parser.feed(text_of([token_id]))]

    assert isinstance(pieces[0], ToolCallStart)
