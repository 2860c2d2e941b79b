"""The Model manager: every kind of model that a setting can name, and every way in which that can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tests.tiny_loads import loaded
from tests.tiny_models import (
    CONTEXT_LENGTH,
    save_model,
    save_tiny_model,
)
from worker.engines.base import EngineError
from worker.engines.self_check import check_model
from worker.model_manager import choose_device, choose_dtype, cpu_computes_bfloat16, share_processors


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama") / "tiny")


def test_the_card_describes_the_model_that_was_loaded(llama: Path) -> None:
    model, tokenizer, card = (result := loaded(llama)).model, result.tokenizer, result.card

    assert (card.model, card.engine, card.device, card.dtype) == ("tiny", "transformers", "cpu", "float32")
    assert card.context_length == CONTEXT_LENGTH
    assert card.memory_bytes >= sum(parameter.nbytes for parameter in model.parameters()) > 0
    assert card.tokenizer_json is not None
    assert card.chat_template is not None
    text = "strangers share one car. Ünïcödé 🚗\n"
    assert Tokenizer.from_str(card.tokenizer_json).encode(text).ids == tokenizer.encode(text)
    assert not model.training


def test_the_fingerprint_is_the_same_wherever_the_model_lies_and_changes_with_what_decides_the_tokens(
    llama: Path, tmp_path: Path
) -> None:
    original = loaded(llama).card.fingerprint
    moved = shutil.copytree(llama, tmp_path / "tiny")
    assert loaded(moved).card.fingerprint == original
    assert loaded(moved, dtype="bfloat16").card.fingerprint != original

    model = AutoModelForCausalLM.from_pretrained(moved)
    with torch.no_grad():
        model.lm_head.weight[5, 5] += 1
    model.save_pretrained(moved)
    assert loaded(moved).card.fingerprint != original

    other_tokenizer = shutil.copytree(llama, tmp_path / "other")
    content = json.loads((other_tokenizer / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<other>"
    (other_tokenizer / "tokenizer.json").write_text(json.dumps(content))
    assert loaded(other_tokenizer).card.fingerprint != original


def test_attention_windows_and_stretched_embeddings_bound_the_context(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
    }
    windowed = MistralForCausalLM(MistralConfig(**shape, sliding_window=40))  # type: ignore[no-untyped-call]
    stretched = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(**shape, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    )

    assert loaded(save_model(tmp_path / "windowed", windowed)).card.context_length == 40
    assert loaded(save_model(tmp_path / "stretched", stretched)).card.context_length == 128


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/model.gguf", "there is no such file"),
        ("/nowhere/model", "no such folder, and no name on the Hugging Face hub"),
        ("./model", "no such folder"),
        ("a/b/c", "no such folder"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_the_setting(model: str, message: str) -> None:
    with pytest.raises(EngineError, match=f"CARPOOL_MODEL='{model}'.*{message}"):
        loaded(model)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no config\.json"):
        loaded(tmp_path)


def test_a_folder_with_broken_weights_is_refused_with_the_cause(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"\0" * 64)

    with pytest.raises(EngineError, match="could not be loaded"):
        loaded(folder)


_HUB_SCRIPT = """
import sys
from tasks.settings import Settings
from worker.engines.base import EngineError
from worker.model_manager import load_model
for model, revision in (("acme/tiny", ""), ("acme/tiny", "old"), ("acme/absent", "")):
    settings = Settings(model=model, revision=revision, dtype="float32", device="cpu")
    try:
        card = load_model(settings, lambda phase, fraction: None).card
        print(card.model, card.fingerprint)
    except EngineError as error:
        print("EngineError", error)
"""


def test_a_hub_name_is_taken_from_the_hubs_cache_at_its_revision_and_an_absent_one_is_named(
    llama: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "hub" / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("old", "b" * 40)):
        (repository / "refs" / name).write_text(commit)
        shutil.copytree(llama, repository / "snapshots" / commit)

    output = subprocess.run(
        [sys.executable, "-c", _HUB_SCRIPT],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout.splitlines()

    (name, newest), (_, old) = (line.split() for line in output[:2])
    assert name == "tiny"
    assert newest != old
    assert output[2].startswith("EngineError model 'acme/absent' could not be loaded: ")
    for part in ("HF_HUB_OFFLINE", "HF_TOKEN", "CARPOOL_REVISION"):
        assert part in output[2]


def _bart() -> PreTrainedModel:
    config = BartConfig(
        vocab_size=400, d_model=16, decoder_layers=1, decoder_attention_heads=2, encoder_layers=1, decoder_ffn_dim=16
    )
    model = BartForCausalLM(config)  # type: ignore[no-untyped-call]
    model.config.is_encoder_decoder = True
    return model


def _bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=400, hidden_size=16, n_layer=1, n_head=2))


def _mamba() -> PreTrainedModel:
    return MambaForCausalLM(  # type: ignore[no-untyped-call]
        MambaConfig(vocab_size=400, hidden_size=16, num_hidden_layers=1, state_size=4)
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [(_bart, "encoder-decoder"), (_bloom, "CARPOOL_ENGINE=vllm"), (_mamba, "CARPOOL_ENGINE=vllm")],
    ids=["bart", "bloom", "mamba"],
)
def test_a_model_that_cannot_ride_in_a_batch_is_refused_at_load(tmp_path: Path, model: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        loaded(save_model(tmp_path, model()))


def test_a_model_whose_attention_does_more_than_ours_is_found_out_by_the_check(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attn_logit_softcapping=5.0,
        max_position_embeddings=64,
    )
    result = loaded(save_model(tmp_path, Gemma2ForCausalLM(config)))  # type: ignore[no-untyped-call]

    with pytest.raises(EngineError, match=r"'gemma' \(Gemma2ForCausalLM\) can't be run in a batch.*softcap"):
        check_model(result.model, "gemma")


def test_a_model_that_gives_other_results_in_a_batch_is_found_out_by_the_check(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(llama).model
    check_model(model, "llama")
    embedding = model.model.rotary_emb
    forward = type(embedding).forward
    # As a model would that does not look at position_ids.
    monkeypatch.setattr(
        embedding,
        "forward",
        lambda hidden, position_ids: forward(
            embedding, hidden, torch.arange(hidden.shape[1], device=hidden.device)[None]
        ),
    )

    with pytest.raises(EngineError, match="gives other results in a batch"):
        check_model(model, "llama")


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:1", "cuda:99", ""])
def test_a_device_that_is_not_there_is_refused_with_the_setting(device: str) -> None:
    with pytest.raises(EngineError, match=f"CARPOOL_DEVICE='{device}'"):
        choose_device(device)


def test_the_device_is_cuda_where_there_is_one_and_else_the_cpu() -> None:
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


def test_the_number_format_is_bfloat16_where_the_processor_computes_it_and_else_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("float16", cpu) == torch.float16
    for capabilities, expected in (
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"avx2": True}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda capabilities=capabilities: capabilities)
        assert choose_dtype("auto", cpu) == expected
        assert cpu_computes_bfloat16() == (expected == torch.bfloat16)


def test_workers_on_one_machine_share_its_processors_unless_omp_num_threads_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        for num_threads, num_workers, device, expected in (
            (8, 1, "cpu", 8),
            (8, 3, "cpu", 2),
            (2, 4, "cpu", 1),
            (8, 2, "cuda", 8),
        ):
            torch.set_num_threads(num_threads)
            share_processors(num_workers, torch.device(device))
            assert torch.get_num_threads() == expected

        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        torch.set_num_threads(8)
        share_processors(4, torch.device("cpu"))
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)


def test_two_loads_of_one_model_have_one_card(llama: Path) -> None:
    first = loaded(llama).card
    assert loaded(llama, served_model_name="alias").card == replace(first, model="alias")
