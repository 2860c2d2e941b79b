"""GGUF files, unpacked once into a folder that loads fast: safetensors, tokenizer, chat template, configuration.

Unpacking takes some 20 s for a small model and a gigabyte of memory; loading the result takes less than a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from worker.engines.base import EngineError, Report

#: Changes whenever what we write would.
FORMAT = "1"
#: Their versions decide what comes out.
LIBRARIES = ("gguf", "torch", "transformers")
#: Room beside the weights, for tokenizer and configuration.
OTHER_BYTES = 32 * 2**20


def converted_folder(cache_dir: Path, file: Path, name: str, dtype: torch.dtype) -> Path:
    """Where the file's conversion is or will be: a name that changes with file, number format and library versions."""
    stat = file.stat()
    versions = [f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES if _installed(library)]
    parts = [FORMAT, file.name, str(stat.st_size), str(stat.st_mtime_ns), str(dtype), *versions]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_dir / "models" / f"{name}-{digest}"


def convert(file: Path, folder: Path, dtype: torch.dtype, report: Report) -> None:
    """Unpack a GGUF file into `folder`, unless another worker has done so or does so now; then wait for that one.

    The folder appears whole or not at all. `report` is given fractions of this conversion.

    Raises:
        EngineError: not a GGUF file, an architecture that can't be read, no room on the disk, a library missing.
    """
    if folder.exists():
        return
    for library in ("gguf", "accelerate"):
        if not _installed(library):
            raise EngineError(f"{file} is a GGUF file, and reading it needs {library}: pip install {library}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            if not folder.exists():
                _remove_leftovers(folder)
                _convert(file, folder, dtype, report)
    except OSError as error:
        raise EngineError(
            f"{file.name} could not be converted into {folder}: {error}. "
            "Check the file, and that the disk has room, or set CARPOOL_CACHE_DIR to another one"
        ) from error


def _convert(file: Path, folder: Path, dtype: torch.dtype, report: Report) -> None:
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        report("converting the model: tokenizer", 0.0)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        report("converting the model: weights", 0.2)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        )
        report("converting the model: saving", 0.9)
        _check_room(folder.parent, sum(tensor.nbytes for tensor in model.state_dict().values()) + OTHER_BYTES)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            _sync(path)
        partial.rename(folder)
    except (ValueError, KeyError, NotImplementedError, SafetensorError) as error:
        raise EngineError(
            f"{file} could not be read as a GGUF model: {error}. Take a GGUF file of an architecture that transformers "
            "reads, or the model's folder with safetensors"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise EngineError(
            f"the converted model takes {num_bytes / 2**20:.0f} MiB, and {folder} has {free / 2**20:.0f} MiB free: "
            "make room, or set CARPOOL_CACHE_DIR to another disk"
        )


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove_leftovers(folder: Path) -> None:
    """What a worker that died in the middle has left; we hold the lock, so nobody writes there."""
    for path in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """Hold the folder's lock. Waiting ends with the other worker's conversion or with its death, whichever is first."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another worker that converts the model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
