"""Logprobs, grammars and tools on tiny real models: through the step loop, alone, in company and taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.chat import Message
from tasks.entries import TokenLogprob
from tasks.job_request import SamplingParams
from tasks.tool_calls import ToolCallParser
from tests.test_grammar import schema_params, tool
from tests.test_model_worker import Script, deltas
from tests.test_tool_calls import folded
from tests.tiny_engine import DRAWN, engine_of, prompt, run_alone, sequence
from tests.tiny_models import Reference, save_tiny_model
from worker.engines.base import Logprob
from worker.engines.transformers_engine import TransformersEngine
from worker.messages import Add, Command, Delta, Failed, Update
from worker.model_worker import StepLoop

#: A short one that still leaves a choice.
BRIEF = schema_params(
    type="object",
    properties={"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y", None]}},
    required=["a", "b"],
    additionalProperties=False,
).response_format
CALL = tool("f", a={"type": "integer", "minimum": 0, "maximum": 9})
CASES = {
    "free": SamplingParams(temperature=1.3),
    "json": SamplingParams(temperature=1.3, response_format=BRIEF),
    "tools": SamplingParams(temperature=1.3, tools=[CALL], tool_choice="required"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a context that has room for a description of tools."""
    folder = save_tiny_model(tmp_path_factory.mktemp("llama"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.max_position_embeddings = 1_500
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    return engine_of(folder, slots=4)


def add(id: str, params: SamplingParams, seed: int = 0, ids: tuple[int, ...] = ()) -> Add:
    given = params.model_copy(update={"max_tokens": params.max_tokens or 200})
    return Add(id, None, (Message(role="user", content="go"),), given, seed, ids)


def ride(engine: TransformersEngine, *adds: Add) -> dict[str, Delta]:
    """Let all ride to their ends; returns each one's deltas as one."""
    updates: list[Update] = []
    looks: list[list[Command]] = [list(adds), *[[] for _ in range(220)]]
    StepLoop(engine, Script(looks), updates.append, 1000).run()
    failed = [update for update in updates if isinstance(update, Failed)]
    assert not failed, failed
    return {one.id: joined(deltas(updates, one.id)) for one in adds}


def joined(parts: list[Delta]) -> Delta:
    return Delta(
        parts[0].id,
        ids=tuple(id for part in parts for id in part.ids),
        texts=tuple(text for part in parts for text in part.texts),
        finish=parts[-1].finish,
        tail=parts[-1].tail,
        lp=tuple(item for part in parts for item in part.lp),
    )


def text_of(delta: Delta) -> str:
    return "".join(delta.texts) + delta.tail


@pytest.mark.parametrize("seed", range(4))
def test_a_model_writes_what_the_schema_asks_for_and_stops_with_it(engine: TransformersEngine, seed: int) -> None:
    found = ride(engine, add("a", CASES["json"], seed))["a"]

    value = json.loads(text_of(found))
    assert found.finish == "stop"
    assert list(value) == ["a", "b"]
    assert 0 <= value["a"] <= 99


def test_a_whole_text_with_the_last_possible_token_is_a_stop_and_one_token_less_is_a_length(
    engine: TransformersEngine,
) -> None:
    whole = ride(engine, add("a", CASES["json"], 1))["a"]
    length = len(whole.ids)

    def limited(max_tokens: int) -> Delta:
        return ride(engine, add("a", CASES["json"].model_copy(update={"max_tokens": max_tokens}), 1))["a"]

    assert (limited(length).finish, limited(length).ids) == ("stop", whole.ids)
    assert (limited(length - 1).finish, limited(length - 1).ids) == ("length", whole.ids[:-1])


def test_a_stop_string_ends_a_text_within_its_grammar(engine: TransformersEngine) -> None:
    found = ride(engine, add("a", CASES["json"].model_copy(update={"stop": ['"b"']}), 1))["a"]

    assert found.finish == "stop"
    assert text_of(found).startswith('{"a":')
    assert '"b"' not in text_of(found)


@pytest.mark.parametrize("case", CASES)
def test_the_same_seed_draws_the_same_tokens_in_company_with_logprobs_and_after_another_worker_took_over(
    folder: Path, engine: TransformersEngine, case: str
) -> None:
    params = CASES[case].model_copy(update={"max_tokens": 40})
    alone = ride(engine, add("a", params, 5))["a"]

    company = ride(
        engine,
        add("free", CASES["free"].model_copy(update={"max_tokens": 30}), 1),
        add("a", params.model_copy(update={"logprobs": 3}), 5),
        add("json", CASES["json"], 2),
        add("greedy", SamplingParams(temperature=0, max_tokens=20, logprobs=0)),
    )["a"]
    assert (company.ids, company.texts, company.finish) == (alone.ids, alone.texts, alone.finish)

    other = engine_of(folder, slots=1)
    for cut in (1, 7, len(alone.ids) - 1):
        rest = ride(other, add("a", params.model_copy(update={"logprobs": 3}), 5, alone.ids[:cut]))["a"]
        assert alone.ids[:cut] + rest.ids == alone.ids
        assert alone.texts[:cut] + rest.texts == alone.texts
        assert (rest.finish, rest.tail) == (alone.finish, alone.tail)
        assert len(rest.lp) == len(rest.ids)


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_must_calls_its_tool_in_a_form_that_the_parser_reads(
    engine: TransformersEngine, seed: int
) -> None:
    found = ride(engine, add("a", CASES["tools"].model_copy(update={"parallel_tool_calls": False}), seed))["a"]

    parser = ToolCallParser()
    text, calls = folded([piece for text in found.texts for piece in parser.feed(text)] + parser.finish())
    assert (text, found.finish) == ("", "stop")
    assert [name for name, _ in calls] == ["f"]
    assert json.loads(calls[0][1]).keys() == {"a"}


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_logprobs_are_those_of_transformers_for_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, architecture)
    engine, reference = engine_of(folder), Reference(folder)
    ids = prompt(11)
    params = DRAWN.model_copy(update={"logprobs": 5, "logit_bias": {"9": 3}})
    engine.add(sequence("a", ids, params=params, seed=3))
    found: list[Logprob] = []
    while len(found) < 24:
        for emission in engine.step():
            found += emission.logprobs

    whole = torch.tensor([[*ids, *(one.id for one in found)]])
    with torch.no_grad():
        expected = reference.model(whole).logits[0, len(ids) - 1 : -1].double().log_softmax(-1)
    for one, row in zip(found, expected, strict=True):
        assert one.value == pytest.approx(float(row[one.id]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
        assert one.value <= one.top[0][1]


def test_a_free_sequence_has_no_logprobs_and_the_tokens_of_one_that_has(engine: TransformersEngine) -> None:
    with_logprobs = sequence("a", prompt(5), params=DRAWN.model_copy(update={"logprobs": 2}), seed=8)
    without = sequence("a", prompt(5), params=DRAWN, seed=8)

    assert run_alone(engine, with_logprobs, 20) == run_alone(engine, without, 20)
    engine.add(without)
    assert engine.step()[0].logprobs == ()
    engine.abort("a")


def test_logged_logprobs_have_the_bytes_of_their_tokens(engine: TransformersEngine) -> None:
    found = ride(engine, add("a", CASES["json"].model_copy(update={"logprobs": 2}), 1))["a"]

    assert [item["id"] for item in found.lp] == list(found.ids)
    assert bytes(byte for item in found.lp for byte in item["b"]).decode() == text_of(found)
    assert [len(item["top"]) for item in found.lp] == [2] * len(found.ids)
    likeliest: list[TokenLogprob] = [item["top"][0] for item in found.lp]
    assert all(top["lp"] >= item["lp"] for top, item in zip(likeliest, found.lp, strict=True))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (schema_params(type="strange"), "Invalid type: strange"),
        (SamplingParams(logit_bias={"9999": 1}), "names token 9999"),
    ],
)
def test_what_the_model_cannot_do_fails_its_sequence_alone(
    engine: TransformersEngine, params: SamplingParams, message: str
) -> None:
    updates: list[Update] = []
    looks: list[list[Command]] = [[add("bad", params), add("good", CASES["json"])], *[[] for _ in range(60)]]
    StepLoop(engine, Script(looks), updates.append, 1000).run()

    (failed,) = [update for update in updates if isinstance(update, Failed)]
    assert (failed.id, failed.code) == ("bad", "invalid_request")
    assert message in failed.message
    assert deltas(updates, "good")[-1].finish == "stop"
