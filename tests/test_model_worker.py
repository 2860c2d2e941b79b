"""The step loop and what it does to one token, with engines that say what a test tells them to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.chat import Message
from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker import model_worker, simulation
from worker.engines import simulated
from worker.engines.base import Emission, EngineError, EngineSequence, SequenceError
from worker.messages import (
    Abort,
    Aborted,
    Accepted,
    Add,
    Close,
    Command,
    Delta,
    Failed,
    ModelCard,
    Stepped,
    Update,
)
from worker.model_worker import StepLoop
from worker.sequence import TextSequence

EOS = 9
#: Byte tokens: a car and a character cut in pieces, words, what stop strings are made of, and end-of-sequence.
PIECES = [b"\xf0\x9f", b"\x9a\x97", b" word", b"\n", b"\xe4\xb8", b"\x96", b"EN", b"D", b"\xff", b""]


class ByteTokenizer:
    eos_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return [2] * len(text.split())

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        raise SequenceError("chat_template_missing", "this model has no chat template: use a prompt")

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(PIECES[id] for id in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


class ScriptedEngine:
    """Gives each sequence the ids of its script, one a step; what is no id is raised or emitted as an error."""

    def __init__(self, scripts: dict[str, list[int | Exception | None]], context_length: int = 100) -> None:
        self.card = ModelCard("m", "scripted", "cpu", "none", "f", context_length)
        self.tokenizer = ByteTokenizer()
        self.scripts = scripts
        self.riding: dict[str, EngineSequence] = {}
        self.num_steps = 0
        self.slots_at_step: list[list[str]] = []

    def add(self, sequence: EngineSequence) -> None:
        if sequence.id == "refused":
            raise SequenceError("engine_error", "no slot")
        self.riding[sequence.id] = sequence

    def abort(self, id: str) -> None:
        self.riding.pop(id, None)

    def step(self) -> list[Emission]:
        self.num_steps += 1
        self.slots_at_step.append(list(self.riding))
        emissions = []
        for id in self.riding:
            said = self.scripts[id].pop(0)
            if isinstance(said, SequenceError):
                emissions.append(Emission(id, error=said))
            elif isinstance(said, Exception):
                raise said
            else:
                emissions.append(Emission(id, () if said is None else (said,)))
        return emissions

    def close(self) -> None:
        self.riding.clear()


class Script:
    """Commands for each look that the loop takes; Close when there are none left."""

    def __init__(self, looks: Iterable[list[Command]]) -> None:
        self._looks = list(looks)
        self.blocked: list[bool] = []

    def take(self, block: bool) -> Iterator[Command]:
        self.blocked.append(block)
        yield from (self._looks.pop(0) if self._looks else [Close()])


def add(
    id: str = "a",
    prompt: str = "a prompt",
    *,
    max_tokens: int = 10,
    ids: tuple[int, ...] = (),
    stop: Sequence[str] = (),
) -> Add:
    return Add(id, prompt, None, SamplingParams(max_tokens=max_tokens, stop=list(stop)), seed=0, ids=ids)


def run(engine: ScriptedEngine, *looks: list[Command], run_ahead_steps: int = 64) -> list[Update]:
    updates: list[Update] = []
    StepLoop(engine, Script(looks), updates.append, run_ahead_steps).run()
    return updates


def deltas(updates: list[Update], id: str = "a") -> list[Delta]:
    return [delta for update in updates if isinstance(update, Stepped) for delta in update.deltas if delta.id == id]


def pipeline(stops: list[str], max_tokens: int = 1000) -> TextSequence:
    return TextSequence("a", [2, 2], ByteTokenizer(), stops, max_tokens)


# --- one sequence ---------------------------------------------------------------------------------------------------


@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    stops=st.lists(st.sampled_from(["END", "\n\n", "世", "🚗 w", "\ufffd", "D\n"]), max_size=4, unique=True),
    max_tokens=st.integers(1, 35),
)
def test_a_replay_up_to_any_token_goes_on_exactly_as_the_uninterrupted_ride(
    ids: list[int], stops: list[str], max_tokens: int
) -> None:
    whole = pipeline(stops, max_tokens)
    ride = [whole.feed([id]) for id in ids]
    taken = [id for delta in ride for id in delta.ids]
    texts = [text for delta in ride for text in delta.texts]
    held = whole.end()

    for cut in range(len(taken) + 1):
        second = pipeline(stops, max_tokens)
        second.replay(taken[:cut])
        rest = second.feed(ids[cut:])

        assert list(rest.ids) == taken[cut:]
        assert list(rest.texts) == texts[cut:]
        assert (rest.finish, rest.tail) == (ride[-1].finish, ride[-1].tail)
        assert second.end() == held


def test_an_end_of_sequence_token_counts_and_has_no_text() -> None:
    sequence = pipeline([])

    assert sequence.feed([2, EOS, 2]) == Delta("a", (2, EOS), (" word", ""), "stop", "", prompt_tokens=2)
    assert sequence.num_tokens == 2


def test_max_tokens_are_exactly_as_many() -> None:
    sequence = pipeline([], max_tokens=2)

    assert sequence.feed([2]).finish is None
    assert sequence.feed([2, 2]) == Delta("a", (2,), (" word",), "length")


def test_text_before_a_stop_string_belongs_to_the_token_that_completes_it() -> None:
    assert pipeline(["D"]).feed([2, 6, 7]) == Delta("a", (2, 6, 7), (" word", "EN", ""), "stop", "", 2)
    assert pipeline(["ND"]).feed([2, 6, 7]) == Delta("a", (2, 6, 7), (" word", "E", ""), "stop", "", 2)


def test_a_stop_string_with_the_last_token_is_a_stop() -> None:
    assert pipeline(["END"], max_tokens=2).feed([6, 7]).finish == "stop"


def test_text_that_is_held_at_the_end_is_the_tail() -> None:
    held_by_both = pipeline(["END"], max_tokens=2).feed([6, 0])

    assert held_by_both == Delta("a", (6, 0), ("", ""), "length", "EN\ufffd", 2)
    assert pipeline(["END"]).feed([6, EOS]).tail == "EN"


def test_a_sequence_that_is_ended_from_outside_gives_back_what_it_held() -> None:
    sequence = pipeline(["END"])
    sequence.feed([2, 6])

    assert sequence.end() == "EN"


# --- the step loop --------------------------------------------------------------------------------------------------


def test_the_first_delta_tells_the_prompt_tokens_also_while_the_prefill_goes_on() -> None:
    updates = run(ScriptedEngine({"a": [None, None, 2, EOS]}), [add()], [], [], [])

    assert [update.deltas for update in updates if isinstance(update, Stepped)] == [
        (Delta("a", prompt_tokens=2),),
        (),
        (Delta("a", (2,), (" word",)),),
        (Delta("a", (EOS,), ("",), "stop"),),
    ]


def test_a_sequence_that_ends_has_left_the_engine_before_the_next_step() -> None:
    engine = ScriptedEngine({"a": [2, EOS], "b": [2] * 9})
    run(engine, [add("a"), add("b")], [], [], [])

    assert engine.slots_at_step == [["a", "b"], ["a", "b"], ["b"], ["b"]]


def test_the_loop_waits_for_a_command_when_nothing_rides() -> None:
    script = Script([[add()], []])
    StepLoop(ScriptedEngine({"a": [EOS]}), script, lambda update: None, 2).run()

    assert script.blocked[:2] == [True, True]


@pytest.mark.parametrize("run_ahead_steps", [1, 2, 5])
def test_the_loop_runs_ahead_of_the_ledger_by_exactly_the_bound(run_ahead_steps: int) -> None:
    engine = ScriptedEngine({"a": [2] * 50})
    looks: list[list[Command]] = [[add(max_tokens=50)], *[[] for _ in range(9)], [Accepted(1)], [], [Accepted(2)], []]
    script = Script(looks)
    updates: list[Update] = []
    StepLoop(engine, script, updates.append, run_ahead_steps).run()

    assert engine.num_steps == run_ahead_steps + 2
    assert [update.step for update in updates if isinstance(update, Stepped)] == [*range(1, run_ahead_steps + 3)]


def test_an_acceptance_of_steps_that_were_never_done_does_not_widen_the_bound() -> None:
    engine = ScriptedEngine({"a": [2] * 50})
    run(engine, [add(), Accepted(40)], [], [], [], run_ahead_steps=2)

    assert engine.num_steps == 2


@pytest.mark.parametrize(
    ("ids", "finish", "tail"), [((2, EOS), "stop", ""), ((6, 7), "stop", ""), ((2, 6), "length", "EN")]
)
def test_a_sequence_that_its_earlier_ride_ended_ends_without_a_step(
    ids: tuple[int, ...], finish: str, tail: str
) -> None:
    engine = ScriptedEngine({})
    updates = run(engine, [add(ids=ids, max_tokens=2, stop=["END"])])

    assert deltas(updates) == [Delta("a", finish=finish, tail=tail, prompt_tokens=2)]
    assert engine.num_steps == 0


def test_a_sequence_that_goes_on_shows_only_new_text_and_its_old_tokens_count() -> None:
    engine = ScriptedEngine({"a": [1, 2]})
    updates = run(engine, [add(ids=(2, 0), max_tokens=4)], [])

    assert engine.num_steps == 2
    assert deltas(updates) == [Delta("a", (1,), ("🚗",), prompt_tokens=2), Delta("a", (2,), (" word",), "length")]


def test_a_default_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    engine = ScriptedEngine({"a": [2] * 9}, context_length=5)
    command = Add("a", "a prompt", None, SamplingParams(max_tokens=256), seed=0, max_tokens_is_default=True)
    updates = run(engine, [command], [], [], [])

    assert engine.num_steps == 3
    assert deltas(updates)[-1].finish == "length"


def test_max_tokens_that_do_not_fit_are_refused_with_both_numbers() -> None:
    updates = run(ScriptedEngine({}, context_length=11), [add(max_tokens=10)])

    assert updates == [
        Failed(
            "a",
            "context_length_exceeded",
            "the prompt's 2 tokens and max_tokens 10 make 12, the model's context length is 11. "
            "Shorten the prompt, or set max_tokens to at most 9",
            step=0,
        )
    ]


def test_max_tokens_that_fit_exactly_are_taken() -> None:
    updates = run(ScriptedEngine({"a": [2] * 10}, context_length=12), [add(max_tokens=10)], *[[] for _ in range(9)])

    assert deltas(updates)[-1].finish == "length"


def test_a_prompt_that_fills_the_context_is_refused_also_with_a_default_max_tokens() -> None:
    command = Add("a", "a prompt", None, SamplingParams(max_tokens=256), seed=0, max_tokens_is_default=True)
    (failed,) = run(ScriptedEngine({}, context_length=2), [command])

    assert isinstance(failed, Failed)
    assert failed.code == "context_length_exceeded"
    assert "2 tokens" in failed.message


def test_a_sequence_that_cannot_board_fails_alone() -> None:
    chat = Add("chat", None, (Message(role="user", content="hi"),), SamplingParams(max_tokens=5), seed=0)
    updates = run(ScriptedEngine({"a": [EOS]}), [add("refused"), chat, add("empty", " "), add()])

    assert [(u.id, u.code) for u in updates if isinstance(u, Failed)] == [
        ("refused", "engine_error"),
        ("chat", "chat_template_missing"),
        ("empty", "invalid_request"),
    ]
    assert deltas(updates)[-1].finish == "stop"


def test_an_error_of_one_sequence_ends_it_alone_and_comes_behind_the_step_of_the_others() -> None:
    engine = ScriptedEngine({"a": [6, SequenceError("engine_error", "broken")], "b": [2, 2, 2]})
    updates = run(engine, [add("a", stop=["END"]), add("b")], [], [])

    assert [type(update) for update in updates] == [Stepped, Stepped, Failed, Stepped]
    assert updates[2] == Failed("a", "engine_error", "broken", step=2, tail="EN")
    assert engine.slots_at_step[2] == ["b"]
    assert len(deltas(updates, "b")) == 3


def test_an_error_of_the_engine_itself_ends_the_process_and_is_not_told_as_a_step() -> None:
    updates: list[Update] = []
    loop = StepLoop(ScriptedEngine({"a": [2, RuntimeError("device lost")]}), Script([[add()], []]), updates.append, 2)

    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()

    assert len(updates) == 1


def test_an_abort_gives_back_the_held_text_and_frees_the_slot() -> None:
    engine = ScriptedEngine({"a": [2, 6, 2], "b": [2] * 9})
    updates = run(engine, [add("a", stop=["END"]), add("b")], [], [Abort("a")])

    assert Aborted("a", "EN", step=2) in updates
    assert engine.slots_at_step == [["a", "b"], ["a", "b"], ["b"]]


def test_an_abort_of_a_sequence_that_is_not_here_is_confirmed_all_the_same() -> None:
    assert run(ScriptedEngine({}), [Abort("nobody")]) == [Aborted("nobody", "", step=0)]


def test_an_abort_before_the_first_step_leaves_nothing_to_do() -> None:
    engine = ScriptedEngine({"a": [2]})

    assert run(engine, [add(), Abort("a")]) == [Aborted("a", "", step=0)]
    assert run(engine, [add(ids=(2, EOS)), Abort("a")]) == [Aborted("a", "", step=0)]
    assert engine.num_steps == 0


def test_a_sequence_that_is_added_again_starts_where_the_second_word_says() -> None:
    engine = ScriptedEngine({"a": [2, 2, 2]})
    run(engine, [add()], [add(ids=(2, 2))])

    assert engine.riding["a"].output_ids == (2, 2)


def test_the_simulated_engine_says_through_the_loop_what_its_function_says() -> None:
    settings = Settings(engine="simulated", simulated_step_ms=0)
    engine = simulated.load(settings, lambda name, fraction: None)
    updates: list[Update] = []
    prompts = {"a": "Hello, I am", "b": "stop here [[end]]@7"}
    looks: list[list[Command]] = [[add(id, prompt, max_tokens=12) for id, prompt in prompts.items()]]
    StepLoop(engine, Script(looks + [[] for _ in range(11)]), updates.append, 64).run()

    for id, prompt in prompts.items():
        assert "".join(text for delta in deltas(updates, id) for text in delta.texts) == (
            simulation.completion(prompt, 0, 12)
        )
    assert deltas(updates, "a")[-1].finish == "length"
    assert deltas(updates, "b")[-1].finish == "stop"


def test_an_engine_that_this_release_lacks_is_named_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_worker.ENGINE_MODULES, "vllm", "worker.engines.not_there")

    with pytest.raises(EngineError, match=r"no engine 'vllm'.*CARPOOL_ENGINE"):
        model_worker.engine_module("vllm")


def test_a_package_that_an_engine_lacks_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "engine_of_this_test.py").write_text("import package_of_nobody\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(model_worker.ENGINE_MODULES, "vllm", "engine_of_this_test")

    with pytest.raises(EngineError, match=r"needs the package 'package_of_nobody'.*carpool\[vllm\]"):
        model_worker.engine_module("vllm")
