"""Memory that does not suffice is refused before anything is loaded, with the numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from ops.errors import ExitCode
from tasks.settings import BUNDLED_MODEL
from tests.instance import carpool
from tests.service import eventually
from tests.tiny_loads import loaded, phases_of_load, settings_of
from tests.tiny_models import (
    CONTEXT_LENGTH,
    save_model,
    save_tiny_model,
    write_hole,
    write_safetensors,
    write_tiny_gguf,
)
from worker.engines import host_memory, memory
from worker.engines.base import EngineError
from worker.engines.gguf_header import read_header
from worker.engines.kv_cache import SlotCache
from worker.engines.memory import MemoryNeed, gguf_need, memory_need, require_memory
from worker.engines.model_source import find_model
from worker.engines.transformers_engine import load
from worker.messages import Phase, Ready
from worker.model_executor import ChildSaid, ModelExecutor

GIB = 2**30
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
#: Keys and values of two layers with one head of 32 numbers each.
KV_NUMBERS_PER_TOKEN = 2 * 2 * 1 * 32


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama") / "tiny")


def config_of(folder: Path) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    return config


def need_of(folder: Path, dtype: torch.dtype = FLOAT32, num_slots: int = 4, **more: Any) -> MemoryNeed:
    need = memory_need(folder, config_of(folder), dtype, num_slots, CONTEXT_LENGTH, **more)
    assert need is not None
    return need


def num_parameters(folder: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def pretend(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory, "free_host_bytes", lambda: num_bytes)


# --- what a model needs -----------------------------------------------------------------------------------------------


def test_weights_are_counted_as_they_will_be_loaded(llama: Path) -> None:
    number = num_parameters(llama)
    assert need_of(llama).weights_bytes == number * 4
    assert need_of(llama, BFLOAT16).weights_bytes == number * 2
    assert need_of(llama).weights_bytes == loaded(llama).card.memory_bytes - _buffers(llama)


def _buffers(folder: Path) -> int:
    return sum(buffer.nbytes for buffer in AutoModelForCausalLM.from_pretrained(folder).buffers())


def test_the_kv_cache_is_what_the_engine_allocates(llama: Path) -> None:
    need = need_of(llama, num_slots=4)
    assert need.kv_bytes == KV_NUMBERS_PER_TOKEN * 4 * CONTEXT_LENGTH * 4
    engine = load(settings_of(llama, max_batch_size=4), lambda phase, fraction: None)
    cache: SlotCache = engine.cache
    cache.reserve(4, CONTEXT_LENGTH)
    states = torch.zeros(1, 1, 1, 32)
    cache.place(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    for layer in range(2):
        cache.update(states, states, layer)
    assert cache.memory_bytes == need.kv_bytes


def test_shards_are_added_up_and_one_that_is_missing_makes_the_size_unknown(llama: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert need_of(tmp_path).weights_bytes == need_of(llama).weights_bytes
    shards[1].unlink()
    assert memory_need(tmp_path, config_of(llama), FLOAT32, 4, CONTEXT_LENGTH) is None


def test_weights_of_torch_s_own_format_are_known_by_the_size_of_their_file(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "bin"))
    torch.save(AutoModelForCausalLM.from_pretrained(llama).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    exact = need_of(llama).weights_bytes
    assert exact <= need_of(folder).weights_bytes < 1.2 * exact
    assert need_of(folder, BFLOAT16).weights_bytes == pytest.approx(need_of(folder).weights_bytes / 2, abs=1)


def test_a_tied_output_head_counts_once_and_twice_where_the_engine_copies_it(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
    )
    folder = save_model(tmp_path / "tied", LlamaForCausalLM(config))  # type: ignore[no-untyped-call]
    once = need_of(folder).weights_bytes
    assert once == num_parameters(folder) * 4
    assert need_of(folder, copies_output_head=True).weights_bytes == once + 400 * 32 * 4
    # some files hold both, of which one is loaded
    _add_tensor(folder / "model.safetensors", "lm_head.weight", [400, 32])
    assert need_of(folder).weights_bytes == once


def test_quantised_weights_keep_their_size(tmp_path: Path, llama: Path) -> None:
    header = {
        "a.qweight": {"dtype": "I32", "shape": [10, 10], "data_offsets": [0, 400]},
        "a.scales": {"dtype": "F16", "shape": [10], "data_offsets": [400, 420]},
        "a.zeros": {"dtype": "U8", "shape": [3], "data_offsets": [420, 423]},
    }
    write_safetensors(tmp_path / "model.safetensors", header)
    need = memory_need(tmp_path, config_of(llama), FLOAT32, 4, CONTEXT_LENGTH)
    assert need is not None
    assert need.weights_bytes == 400 + 40 + 3


def test_a_gguf_file_is_counted_dequantised(llama: Path, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    header = read_header(file)
    assert header is not None
    need = gguf_need(header, BFLOAT16, 4)
    model = loaded(file, cache_dir=str(tmp_path / "cache")).model
    assert need.weights_bytes == sum(parameter.numel() for parameter in model.parameters()) * 2
    text_config = model.config.get_text_config(decoder=True)
    head_dim = text_config.hidden_size // text_config.num_attention_heads
    per_token = 2 * text_config.num_hidden_layers * text_config.num_key_value_heads * head_dim * 2
    assert need.kv_bytes == per_token * 4 * min(2048, text_config.max_position_embeddings)


def test_the_bundled_model_s_file_is_read_by_its_header_alone() -> None:
    file = find_model(BUNDLED_MODEL).gguf_file
    assert file is not None
    header = read_header(file)
    assert header is not None
    assert header.num_weights == 134_515_008
    assert header.metadata["general.architecture"] == "llama"
    wanted = {"block_count": 30, "attention.head_count_kv": 3, "embedding_length": 576, "context_length": 8192}
    assert {name: header.metadata[name] for name in wanted} == wanted
    # 30 layers, keys and values, 3 heads of 64 numbers of 2 bytes, in 4 slots of 2,048 tokens
    assert gguf_need(header, BFLOAT16, 4).kv_bytes == 30 * 2 * 3 * 64 * 2 * 4 * 2048


@pytest.mark.parametrize("length", [0, 3, 4, 20, 100, 5000])
def test_a_gguf_file_that_is_cut_off_has_no_header(tmp_path: Path, length: int) -> None:
    file = write_tiny_gguf(tmp_path / "whole.gguf")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:length])
    assert read_header(tmp_path / "cut.gguf") is None


def test_a_file_that_is_none_is_left_to_its_conversion_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    assert read_header(tmp_path / "no.gguf") is None


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 16, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_a_file_without_a_header_is_left_to_the_load_to_refuse(llama: Path, tmp_path: Path, content: bytes) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "broken"))
    (folder / "model.safetensors").write_bytes(content)
    assert memory_need(folder, config_of(folder), FLOAT32, 4, CONTEXT_LENGTH) is None
    with pytest.raises(EngineError, match="could not be loaded"):
        loaded(folder)


# --- what there is ----------------------------------------------------------------------------------------------------


def test_a_model_that_does_not_fit_is_refused_with_the_numbers_before_it_is_loaded(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = need_of(llama)
    pretend(monkeypatch, need.total_bytes)
    assert "loading the weights" in phases_of_load(llama)
    pretend(monkeypatch, need.total_bytes - 1)
    seen: list[str] = []
    with pytest.raises(EngineError) as refused:
        load(settings_of(llama), lambda phase, fraction: seen.append(phase))
    assert "loading the weights" not in seen
    message = str(refused.value)
    assert re.match(
        rf"model '{llama}' needs [\d.]+ MiB \(weights [\d.]+ MiB in float32, KV cache of 4 slots of 96 tokens "
        r"[\d.]+ MiB\), and cpu has [\d.]+ MiB free\. Take a smaller model, lower CARPOOL_MAX_BATCH_SIZE",
        message,
    )


def test_what_is_kept_of_prompts_counts_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, need_of(llama).total_bytes + 3 * 2**20)
    loaded(llama, prefix_cache_mb=3)
    with pytest.raises(EngineError, match=r"CARPOOL_PREFIX_CACHE_MB 4\.0 MiB\), and cpu has"):
        loaded(llama, prefix_cache_mb=4)


def test_more_slots_need_more(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, need_of(llama, num_slots=8).total_bytes)
    loaded(llama, max_batch_size=8)
    with pytest.raises(EngineError, match="KV cache of 9 slots"):
        loaded(llama, max_batch_size=9)


def test_a_gguf_file_is_refused_before_it_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    header = read_header(file)
    assert header is not None
    need = gguf_need(header, FLOAT32, 4)
    pretend(monkeypatch, need.total_bytes - 1)
    with pytest.raises(EngineError, match="KV cache of 4 slots"):
        loaded(file, cache_dir=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_for_a_gpu_is_converted_in_the_machine_s_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    pretend(monkeypatch, 1000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    with pytest.raises(EngineError, match=r"\(weights [0-9.]+ MiB in float32\), and cpu has 0\.0 MiB free"):
        loaded(file, cache_dir=str(tmp_path / "cache"), device="cuda:0")


def test_the_memory_of_a_gpu_counts_for_a_model_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(7.9 * GIB), 80 * GIB))
    need = MemoryNeed(int(12.6 * GIB), "bfloat16", int(0.6 * GIB), 4, 2048)
    with pytest.raises(EngineError) as refused:
        require_memory("big", need, torch.device("cuda", 1))
    assert str(refused.value).startswith(
        "model 'big' needs 13.2 GiB (weights 12.6 GiB in bfloat16, KV cache of 4 slots of 2,048 tokens 0.6 GiB), "
        "and cuda:1 has 7.9 GiB free. Take a smaller model"
    )
    require_memory("big", MemoryNeed(7 * GIB, "bfloat16", 0, 4, 2048), torch.device("cuda", 1))


# --- control groups ---------------------------------------------------------------------------------------------------


def write_group(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content + "\n")


def left(own: str, root: Path) -> list[int]:
    file = root.parent / "own"
    file.write_text(own + "\n")
    return list(host_memory._left_in_cgroups(file, root))


def test_the_limit_of_a_container_counts_without_the_cache_that_can_be_dropped(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    limits = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 400\ninactive_file 300"}
    write_group(root / "a", limits)
    write_group(root / "a/b", {**limits, "memory.max": "max"})
    assert left("0::/a/b", root) == [600]
    write_group(root / "a/b", {**limits, "memory.max": "500"})
    assert left("0::/a/b", root) == [100, 600]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write_group(root, {"memory.max": "1000", "memory.current": "2000", "memory.stat": "inactive_file 0"})
    assert left("0::/system.slice/docker-abc.scope", root) == [0]


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files = {
        "memory.limit_in_bytes": "1000",
        "memory.usage_in_bytes": "600",
        "memory.stat": "total_inactive_file 100",
    }
    write_group(root / "memory/docker/abc", files)
    assert left("5:devices:/docker/abc\n4:memory:/docker/abc\n0::/", root) == [500]


def test_without_control_groups_the_machine_s_memory_counts(tmp_path: Path) -> None:
    assert list(host_memory._left_in_cgroups(tmp_path / "none", tmp_path)) == []
    assert 0 < host_memory.free_host_bytes() <= psutil.virtual_memory().total


# --- in a real child --------------------------------------------------------------------------------------------------


def test_a_model_of_a_hundred_gigabytes_is_refused_by_the_worker_with_exit_code_3(
    redis_url: str, llama: Path, tmp_path: Path
) -> None:
    """Its weights are a hole with a real header: who looked beyond the header would read for minutes."""
    folder = Path(shutil.copytree(llama, tmp_path / "huge"))
    write_hole(folder / "model.safetensors")
    settings = {"CARPOOL_REDIS_URL": redis_url, "CARPOOL_CACHE_DIR": str(tmp_path / "cache")}
    done = carpool("worker", "--model", str(folder), "--dtype", "float32", "--device", "cpu", settings=settings)
    assert done.returncode == ExitCode.PRECONDITION
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"Error: model '{folder}' needs 97.1 GiB (weights 96.9 GiB in float32, KV cache of 4 slots")
    assert re.search(r"and cpu has [\d.]+ GiB free\. Take a smaller model", line)


@pytest.mark.parametrize("engine", ["transformers", "simulated"])
def test_the_first_slot_is_given_after_the_warm_up(llama: Path, engine: str) -> None:
    said: list[Any] = []
    executor = ModelExecutor(settings_of(llama, engine=engine), said.append)
    executor.start()
    try:
        until_ready(said)
    finally:
        executor.close(5)
    updates = [event.update for event in said if isinstance(event, ChildSaid)]
    phases = [update.name for update in updates if isinstance(update, Phase)]
    assert isinstance(updates[-1], Ready)
    assert sum(isinstance(update, Ready) for update in updates) == 1
    last = {"transformers": "warmed up", "simulated": "starting the simulated engine"}
    assert phases[-1] == last[engine]
    assert ("warming up" in phases) is (engine == "transformers")


def until_ready(said: list[Any]) -> None:
    eventually("it is ready", lambda: any(isinstance(getattr(event, "update", None), Ready) for event in said))


# --- files ------------------------------------------------------------------------------------------------------------


def _add_tensor(file: Path, name: str, shape: list[int]) -> None:
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    write_safetensors(file, header)
