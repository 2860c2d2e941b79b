"""Does a model fit? Known before it is loaded: the files say how large the weights are, the configuration the KV cache.

A load that runs out of memory takes minutes to do so, and on a CPU the kernel may end other processes for it. So what
is known not to fit is refused with the numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedConfig

from worker.engines.base import EngineError
from worker.engines.gguf_header import GgufHeader
from worker.engines.host_memory import free_host_bytes

#: So many tokens each slot has to have room for, or the context length where that is less.
MIN_TOKENS: Final = 2048
#: A header of more bytes is none: safetensors' own bound.
_MAX_HEADER: Final = 100_000_000
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_BITS: Final = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
}
#: Of these, the first that is there is what transformers loads.
_INDICES: Final = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_OUTPUT_HEAD: Final = "lm_head.weight"


class _UnreadableError(Exception):
    """A file that is not what its name says."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model takes on its device, in bytes.

    Attributes:
        dtype: of the weights, once loaded.
        kv_bytes: of the KV cache of `num_slots` slots of `num_tokens` tokens; 0 where it is not known.
        prefix_bytes: most that is kept of prompts for others that begin the same way.
    """

    weights_bytes: int
    dtype: str
    kv_bytes: int
    num_slots: int
    num_tokens: int
    prefix_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.prefix_bytes

    def __str__(self) -> str:
        cache = (
            f", KV cache of {self.num_slots} slots of {self.num_tokens:,} tokens {_gib(self.kv_bytes)}"
            if self.kv_bytes
            else ""
        )
        prefixes = f", CARPOOL_PREFIX_CACHE_MB {_gib(self.prefix_bytes)}" if self.prefix_bytes else ""
        return f"{_gib(self.total_bytes)} (weights {_gib(self.weights_bytes)} in {self.dtype}{cache}{prefixes})"


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, in bytes; on the CPU within the limit of a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def require_memory(model: str, need: MemoryNeed, device: torch.device) -> None:
    """Refuse a model that does not fit on its device.

    Raises:
        EngineError: with what it needs and what there is.
    """
    free = free_bytes(device)
    if need.total_bytes <= free:
        return
    other = "" if device.type == "cpu" else ", free the device"
    raise EngineError(
        f"model {model!r} needs {need}, and {device} has {_gib(free)} free. Take a smaller model, lower "
        f"CARPOOL_MAX_BATCH_SIZE{other}, or take a device with more memory"
    )


def memory_need(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    num_slots: int,
    context_length: int,
    *,
    copies_output_head: bool = False,
    prefix_bytes: int = 0,
) -> MemoryNeed | None:
    """What the model in a folder takes once it is loaded; None where the size of its weights is not known.

    Args:
        dtype: its floating-point weights are loaded as.
        copies_output_head: the engine holds an output head that is tied to the embedding a second time.
        prefix_bytes: most that the engine keeps of prompts beside its slots.
    """
    text_config = config.get_text_config(decoder=True)
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    try:
        weights = _weights_bytes(folder, config, dtype, skip=_OUTPUT_HEAD if tied else "")
    except _UnreadableError:  # the load will say what is wrong
        return None
    if weights is None:
        return None
    if tied and copies_output_head:
        weights += int(text_config.vocab_size) * int(text_config.hidden_size) * dtype.itemsize
    num_tokens = min(MIN_TOKENS, context_length)
    kv = _kv_bytes_per_token(text_config, dtype) * num_slots * num_tokens
    return MemoryNeed(weights, _name(dtype), kv, num_slots, num_tokens, prefix_bytes)


def gguf_need(header: GgufHeader, dtype: torch.dtype, num_slots: int) -> MemoryNeed:
    """The same for a GGUF file, dequantised."""
    metadata = header.metadata
    num_heads = _most(metadata.get("attention.head_count"))
    kv_heads = _most(metadata.get("attention.head_count_kv")) or num_heads
    hidden = _most(metadata.get("embedding_length"))
    head_dim = _most(metadata.get("attention.key_length")) or (hidden // num_heads if num_heads else 0)
    per_token = 2 * _most(metadata.get("block_count")) * kv_heads * head_dim * dtype.itemsize
    num_tokens = min(MIN_TOKENS, _most(metadata.get("context_length")) or MIN_TOKENS)
    kv = per_token * num_slots * num_tokens
    return MemoryNeed(header.num_weights * dtype.itemsize, _name(dtype), kv, num_slots, num_tokens)


def cached_folder(hub_name: str, revision: str) -> Path | None:
    """Where the hub's client keeps this model, if it has its configuration already."""
    path = try_to_load_from_cache(hub_name, "config.json", revision=revision or "main")
    return Path(path).parent if isinstance(path, str) else None


def _weights_bytes(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, skip: str) -> int | None:
    for single, index in _INDICES:
        files = [folder / single] if (folder / single).is_file() else _shards(folder, index)
        if not files:
            continue
        if not all(file.is_file() for file in files):
            return None  # the rest has still to be fetched
        if single.endswith(".safetensors"):
            tensors = [tensor for file in files for tensor in _tensors(file)]
            return sum(_loaded_bytes(name, kind, shape, dtype, skip) for name, kind, shape in tensors)
        stored = getattr(config, "dtype", None) or torch.float32
        return sum(file.stat().st_size for file in files) * dtype.itemsize // stored.itemsize
    return None


def _shards(folder: Path, index: str) -> list[Path]:
    try:
        names = json.loads((folder / index).read_text())["weight_map"].values()
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _UnreadableError from error
    return [folder / name for name in sorted(set(names))]


def _tensors(file: Path) -> Iterable[tuple[str, str, Sequence[int]]]:
    """Name, kind and shape of each tensor, by the header of a safetensors file: nothing else is read."""
    try:
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if not 0 < length <= _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(content.read(length))
        return [(name, one["dtype"], one["shape"]) for name, one in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _UnreadableError from error


def _loaded_bytes(name: str, kind: str, shape: Sequence[int], dtype: torch.dtype, skip: str) -> int:
    if name == skip:
        return 0
    bits = dtype.itemsize * 8 if kind in _FLOATS else _BITS.get(kind, 8)
    return math.prod(shape) * bits // 8


def _kv_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not layers or not heads or not hidden:
        return 0
    kv_heads = _most(getattr(config, "num_key_value_heads", None)) or _most(heads)
    head_dim = _most(getattr(config, "head_dim", None)) or _most(hidden) // _most(heads)
    return 2 * int(layers) * kv_heads * head_dim * dtype.itemsize


def _most(value: Any) -> int:
    """A number, or the largest of one per layer; 0 where it is not said."""
    if isinstance(value, list | tuple):
        return max((int(one) for one in value), default=0)
    return int(value or 0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"
