"""The teaching design that Carpool grew out of had 21 faults. Each is gone, and a test says so: here is which.

A row names the fault and the tests that fail where it comes back. That they exist is checked here; they run with the
rest of the suite.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.tiny_engine import engine_of, prompt, sequence
from tests.tiny_models import save_tiny_model

TESTS = Path(__file__).parent

FAULTS: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "a handler without an await: one request blocks the whole server",
        (
            "test_api_jobs.py::test_a_hundred_long_polls_hold_no_connections",
            "test_sse.py::test_three_hundred_open_streams_take_no_connection_each",
        ),
    ),
    2: (
        "the port opens before the model is ready, and nobody can ask whether it is",
        ("test_api_health.py::test_ready_names_what_it_waits_for_until_a_worker_rides",),
    ),
    3: (
        "unbounded queues",
        (
            "test_model_worker.py::test_the_loop_runs_ahead_of_the_ledger_by_exactly_the_bound",
            "test_relay.py::test_a_feed_that_overflows_keeps_nothing_and_asks_for_the_log",
            "test_worker.py::test_never_more_ride_than_there_are_slots_and_all_get_through",
        ),
    ),
    4: (
        "three ways to shut down, none of which works; processes stay behind",
        (
            "test_up.py::test_a_first_signal_drains_in_order_and_leaves_no_process",
            "test_up.py::test_a_killed_supervisor_leaves_no_process_and_the_next_one_starts",
            "test_worker.py::test_sigterm_lets_riders_finish_and_takes_no_new_job",
        ),
    ),
    5: (
        "type hints that lie about what comes back",
        ("test_api_health.py::test_a_job_is_as_the_documentation_says",),
    ),
    6: (
        "no KV cache when streaming: each step is slower than the one before",
        (
            "test_transformers_engine.py::test_a_prefill_goes_chunk_by_chunk_while_the_others_get_a_token_each_step",
            "test_source_faults.py::test_a_decoding_step_computes_one_position_a_sequence",
        ),
    ),
    7: (
        "two inference stacks loaded at once",
        ("test_import_boundaries.py::test_the_import_contracts_hold",),
    ),
    8: (
        "vLLM imported at the top: without it nothing starts",
        ("test_import_boundaries.py::test_a_part_other_than_the_model_worker_starts_where_torch_cannot_be_imported",),
    ),
    9: (
        "the end of a sequence is never seen",
        (
            "test_transformers_tokenizer.py::"
            "test_a_list_of_ends_in_the_generation_config_ends_sequences_and_so_does_a_single_one",
            "test_model_worker.py::test_an_end_of_sequence_token_counts_and_has_no_text",
        ),
    ),
    10: (
        "an error is printed and swallowed, its clients wait for ever; a dead worker is not noticed",
        (
            "test_sse.py::test_a_failure_reaches_the_stream_at_once",
            "test_worker.py::test_an_error_in_one_sequence_ends_only_that_one",
            "test_worker.py::test_a_killed_worker_s_jobs_go_on_at_their_position_elsewhere",
        ),
    ),
    11: (
        "a client that leaves keeps its sequence riding",
        (
            "test_api_end_to_end.py::test_a_stream_whose_client_goes_away_frees_its_slot",
            "test_api_end_to_end.py::test_a_synchronous_request_whose_client_goes_away_frees_its_slot",
        ),
    ),
    12: (
        "tokens decoded one by one: characters of several tokens break",
        ("test_detokenizer.py::test_text_cut_anywhere_into_byte_tokens_comes_out_whole",),
    ),
    13: (
        "idle polling; a batch only when the loop happens to look",
        (
            "test_worker.py::test_a_late_sequence_joins_the_running_batch_and_a_short_one_leaves_it",
            "test_worker.py::test_five_jobs_on_two_workers_of_four_slots_all_ride_at_once",
        ),
    ),
    14: (
        "right padding; wrong positions for the shorter prompts",
        (
            "test_transformers_engine.py::"
            "test_prompts_that_join_and_leave_at_any_step_get_what_generate_gives_each_alone",
        ),
    ),
    15: (
        "results come back on one queue without an id",
        ("test_api_end_to_end.py::test_requests_that_are_cut_in_the_middle_never_get_anothers_answer",),
    ),
    16: (
        "prompts are cut without a word",
        (
            "test_transformers_tokenizer.py::test_a_prompt_is_never_cut_though_the_tokenizers_file_asks_for_it",
            "test_api_end_to_end.py::test_a_prompt_that_the_worker_finds_too_long_is_400_with_the_numbers",
        ),
    ),
    17: (
        "21 tokens where 20 were meant",
        ("test_worker.py::test_a_job_gets_the_text_of_its_prompt_and_seed",),
    ),
    18: (
        "sampling that nobody can seed or repeat",
        ("test_transformers_engine.py::test_drawn_tokens_are_the_same_alone_and_in_company",),
    ),
    19: (
        "the inputs go to the GPU, the model never does",
        ("test_transformers_engine_limits.py::test_every_weight_and_every_computation_is_on_the_chosen_device",),
    ),
    20: (
        "a request that goes round the Workload manager",
        ("test_api_generation.py::test_each_endpoint_has_its_own_defaults",),
    ),
    21: (
        "pins that no newer GPU can run; prompts in the log",
        (
            "test_packaging.py::test_no_pinned_version_is_a_local_build",
            "test_worker.py::test_celery_s_events_tell_each_job_s_life",
        ),
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_test_holds_each_fault_away(fault: int) -> None:
    _, tests = FAULTS[fault]
    for test in tests:
        file, name = test.split("::")
        tree = ast.parse((TESTS / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"fault {fault}: {file} has no {name}"


def test_a_decoding_step_computes_one_position_a_sequence(tmp_path: Path) -> None:
    engine = engine_of(save_tiny_model(tmp_path, "llama"))
    engine.add(sequence("one", prompt(30)))
    engine.add(sequence("two", prompt(20)))
    while sum(len(emission.ids) for emission in engine.step()) < 2:
        pass
    computed: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            computed.append(inputs[0].numel())

    with register_module_forward_pre_hook(note):
        for _ in range(5):
            engine.step()
    assert computed == [2] * 5
