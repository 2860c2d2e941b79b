"""A model's files as transformers reads them, whichever engine then serves the model."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from tasks.settings import Settings
from worker.engines.base import EngineError, Report
from worker.engines.gguf_conversion import convert, converted_folder
from worker.engines.gguf_header import read_header
from worker.engines.memory import cached_folder, gguf_need, memory_need, require_memory
from worker.engines.model_source import ModelSource, content_hash
from worker.engines.transformers_tokenizer import TransformersTokenizer


def files_of(
    source: ModelSource, settings: Settings, device: torch.device, dtype: torch.dtype, report: Report
) -> tuple[str | Path, float]:
    """A folder or hub name that can be loaded, and the fraction of the whole load that is done by then.

    A GGUF file is unpacked first.

    Raises:
        EngineError: it can't be unpacked, or its weights will not fit.
    """
    place = place_of(source, settings, device, dtype)
    if place is not None:
        return place, 0.0
    assert source.gguf_file is not None
    folder = converted_folder(settings.cache_dir, source.gguf_file, settings.pool, dtype)
    share = 0.9
    convert(
        source.gguf_file,
        folder,
        dtype,
        lambda phase, fraction: report(phase, None if fraction is None else share * fraction),
    )
    return folder, share


def place_of(source: ModelSource, settings: Settings, device: torch.device, dtype: torch.dtype) -> str | Path | None:
    """A folder or hub name that can be loaded; None for a GGUF file that has still to be unpacked.

    Raises:
        EngineError: its weights will not fit once they are unpacked.
    """
    if source.hub_name is not None:
        return source.hub_name
    if source.folder is not None:
        return source.folder
    assert source.gguf_file is not None
    folder = converted_folder(settings.cache_dir, source.gguf_file, settings.pool, dtype)
    if folder.exists():
        return folder
    header = read_header(source.gguf_file)
    if header is not None:
        need = gguf_need(header, dtype, settings.max_batch_size)
        require_memory(settings.model, need, device)
        # wherever it goes, it is converted in this machine's memory
        require_memory(settings.model, replace(need, kv_bytes=0), torch.device("cpu"))
    return None


def check_memory(
    folder: str | Path,
    config: PreTrainedConfig,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    context_length: int,
    *,
    copies_output_head: bool,
) -> None:
    """Refuse a model that will not fit. What has still to be fetched from the hub is not known, and passes.

    Raises:
        EngineError: with the numbers.
    """
    place = folder if isinstance(folder, Path) else cached_folder(folder, settings.revision)
    if place is None:
        return
    need = memory_need(
        place,
        config,
        dtype,
        settings.max_batch_size,
        context_length,
        copies_output_head=copies_output_head,
        prefix_bytes=settings.prefix_cache_mb * 2**20 if settings.engine == "transformers" else 0,
    )
    if need is not None:
        require_memory(settings.model, need, device)


def from_pretrained(auto_class: Any, folder: str | Path, settings: Settings, **options: Any) -> Any:
    """`from_pretrained` of an Auto class, with its many kinds of failure told as one.

    Raises:
        EngineError: the message names the model, the cause and a way out.
    """
    try:
        return auto_class.from_pretrained(
            folder,
            revision=settings.revision or "main",
            trust_remote_code=settings.trust_remote_code,
            **options,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        cause = str(error).strip().split("\n")[0].rstrip(".")
        if isinstance(folder, Path):
            advice = "Check the folder, or take another model"
        else:
            advice = (
                "Check the name, CARPOOL_REVISION, the network and HF_HUB_OFFLINE; a gated model needs HF_TOKEN. "
                "A folder or a GGUF file works without a network"
            )
        raise EngineError(f"model {settings.model!r} could not be loaded: {cause}. {advice}") from error


def load_tokenizer(folder: str | Path, settings: Settings) -> TransformersTokenizer:
    """The tokenizer of a model whose weights are not loaded by transformers.

    Raises:
        EngineError: it can't be had.
    """
    tokenizer = from_pretrained(AutoTokenizer, folder, settings)
    try:
        generation_config = GenerationConfig.from_pretrained(folder, revision=settings.revision or "main")
    except OSError:
        # Many models have none; then transformers, too, takes it from the model's configuration.
        generation_config = GenerationConfig.from_model_config(from_pretrained(AutoConfig, folder, settings))
    return TransformersTokenizer(tokenizer, generation_config)


def identity_of(source: ModelSource, settings: Settings) -> str:
    """What is the same for the same weights, wherever they lie."""
    if source.hub_name is None:
        return content_hash(source)
    # Where the hub's client has put the configuration: .../snapshots/<commit>/config.json
    path = try_to_load_from_cache(source.hub_name, "config.json", revision=settings.revision or "main")
    commit = Path(path).parent.name if isinstance(path, str) else settings.revision
    return f"{source.hub_name}@{commit}"


def fingerprint(identity: str, vocabulary: str, engine: str, dtype: str) -> str:
    """Hash of what makes a job's tokens: equal where a job can go on at its position."""
    parts = (identity, hashlib.sha256(vocabulary.encode()).hexdigest(), engine, dtype)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
