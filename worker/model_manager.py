"""The Model manager: finds a model, brings weights and tokenizer onto the device, and says what they are."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import transformers
from huggingface_hub.utils.tqdm import disable_progress_bars
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tasks.settings import Settings
from worker.engines import prepacked
from worker.engines.attention import ATTENTION_NAME, register
from worker.engines.base import EngineError, Report
from worker.engines.model_source import find_model
from worker.engines.pretrained import check_memory, files_of, fingerprint, from_pretrained, identity_of, place_of
from worker.engines.transformers_tokenizer import TransformersTokenizer
from worker.messages import ModelCard

ENGINE = "transformers"
#: Kinds of layers that keep keys and values per token, and nothing else.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
#: Names under which configurations keep the reach of local attention.
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
#: Rotary embeddings that change with the longest sequence of a batch, once it is longer than in training.
LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, in evaluation mode, with its tokenizer and its card."""

    model: PreTrainedModel
    tokenizer: TransformersTokenizer
    card: ModelCard


def examine_model(settings: Settings) -> str:
    """Look whether the model could be loaded, as far as that is known before; returns what it is, in words.

    Nothing is converted or moved to a device. Of a model on the hub its configuration is fetched, and nothing else.

    Raises:
        EngineError: as `load_model`.
    """
    be_quiet()
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    source = find_model(settings.model)
    place = place_of(source, settings, device, dtype)
    name = f"{settings.model} in {str(dtype).removeprefix('torch.')} on {device}"
    if place is None:
        return f"{name}, which has still to be converted"
    config: PreTrainedConfig = from_pretrained(AutoConfig, place, settings)
    if settings.engine == "vllm":  # which serves other models than we do, and shares out its memory itself
        return f"{name}; the rest is vLLM's to say"
    check_architecture(config, settings.model)
    context_length = find_context_length(config, settings.model)
    copies = prepacked.pays(device, dtype)
    check_memory(place, config, settings, device, dtype, context_length, copies_output_head=copies)
    return f"{name}, {context_length:,} tokens of context"


def be_quiet() -> None:
    """Progress and errors are reported by us, in our own words."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_default_handler()
    transformers.logging.enable_propagation()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    disable_progress_bars()


def load_model(settings: Settings, report: Report) -> LoadedModel:
    """Find and load the model that the settings name.

    Args:
        report: is given fractions from 0 to 1 of all that is done here.

    Raises:
        EngineError: it can't be had or can't be served; the message names the model, the cause and a way out.
    """
    be_quiet()
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    share_processors(settings.workers, device)
    source = find_model(settings.model)
    folder, done = files_of(source, settings, device, dtype, report)

    verb = "loading" if source.hub_name is None else "fetching and loading"
    report(f"{verb} the tokenizer", done)
    config: PreTrainedConfig = from_pretrained(AutoConfig, folder, settings)
    check_architecture(config, settings.model)
    context_length = find_context_length(config, settings.model)
    check_memory(
        folder, config, settings, device, dtype, context_length, copies_output_head=prepacked.pays(device, dtype)
    )
    pretrained_tokenizer = from_pretrained(AutoTokenizer, folder, settings)
    report(f"{verb} the weights", done + 0.2 * (1 - done))
    register()
    model = from_pretrained(AutoModelForCausalLM, folder, settings, dtype=dtype, attn_implementation=ATTENTION_NAME)
    if not model._supports_attention_backend:
        raise EngineError(
            f"model {settings.model!r} ({type(model).__name__}) has an attention of its own, which this engine can't "
            "batch. Take another model, or CARPOOL_ENGINE=vllm"
        )
    report(f"moving the weights to {device}", done + 0.9 * (1 - done))
    model = _on_device(model.eval(), device, settings.model)
    if prepacked.pays(model.device, model.dtype):
        prepacked.prepack(model)

    tokenizer = TransformersTokenizer(pretrained_tokenizer, model.generation_config)
    dtype_name = str(dtype).removeprefix("torch.")
    card = ModelCard(
        model=settings.pool,
        engine=ENGINE,
        device=str(device),
        dtype=dtype_name,
        fingerprint=fingerprint(identity_of(source, settings), tokenizer.vocabulary, ENGINE, dtype_name),
        context_length=context_length,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        memory_bytes=_memory_bytes(model),
    )
    report("loaded", 1.0)
    return LoadedModel(model, tokenizer, card)


def choose_device(name: str) -> torch.device:
    """The device that a setting names; auto is CUDA where there is one.

    Raises:
        EngineError: not a device that we serve on, or not there.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise EngineError(f"CARPOOL_DEVICE={name!r} is no device: set auto, cpu, cuda or cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise EngineError(
            f"CARPOOL_DEVICE={name!r}: torch {torch.__version__} sees {count} CUDA devices. "
            "Set CARPOOL_DEVICE=cpu, or check nvidia-smi and that torch is a CUDA build"
        )
    return torch.device("cuda", int(index or 0))


def share_processors(num_workers: int, device: torch.device) -> None:
    """Give this worker its share of the processors, where several start on this machine and the model is on the CPU.

    Threads of one matrix product wait for each other by spinning. Where two workers have a thread on every processor
    each, steps take ten times as long. OMP_NUM_THREADS wins.
    """
    if num_workers > 1 and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_workers))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that a setting names; auto is bfloat16 where the device computes in it, else float32."""
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_computes_bfloat16() else torch.float32


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware and torch has the kernels for it.

    That is AVX-512 BF16 or AMX on x86-64, and BF16 on arm64 except on macOS.
    """
    capabilities = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16") if sys.platform == "darwin" else ("avx512_bf16", "amx_bf16", "bf16")
    return any(capabilities.get(name) for name in names)


def check_architecture(config: PreTrainedConfig, model: str) -> None:
    """Refuse what no KV cache per token can serve.

    Raises:
        EngineError: an encoder-decoder, or a model with recurrent or other layers.
    """
    text_config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise EngineError(
            f"model {model!r} ({config.model_type}) is an encoder-decoder; this engine serves decoder-only models. "
            "Take another model"
        )
    others = sorted(set(getattr(text_config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if others or getattr(text_config, "alibi", False):
        what = f"{', '.join(others)} layers" if others else "ALiBi"
        raise EngineError(
            f"model {model!r} ({config.model_type}) has {what}, which this engine can't batch. "
            "Take another model, or CARPOOL_ENGINE=vllm"
        )


def find_context_length(config: PreTrainedConfig, model: str) -> int:
    """Most tokens of a sequence: the model's positions, or less where its attention does not reach that far.

    Our masks are plainly causal. Within a window, or within the length of training for embeddings that stretch beyond
    it, that is what the model does; past it would be something else.

    Raises:
        EngineError: the configuration names no length.
    """
    text_config = config.get_text_config(decoder=True)
    length = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise EngineError(
            f"model {model!r} ({config.model_type}) does not say how many positions it has "
            "(max_position_embeddings). Take another model, or CARPOOL_ENGINE=vllm"
        )
    limits = [length, *(getattr(text_config, name, None) for name in WINDOWS)]
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPES:
        limits += [
            rope.get("original_max_position_embeddings"),
            getattr(text_config, "original_max_position_embeddings", None),
        ]
    return min(limit for limit in limits if isinstance(limit, int) and limit > 0)


def _on_device(model: PreTrainedModel, device: torch.device, name: str) -> PreTrainedModel:
    try:
        moved: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        needed, free = _memory_bytes(model), torch.cuda.mem_get_info(device)[0]
        raise EngineError(
            f"model {name!r} takes {needed / 2**20:.0f} MiB, and {device} has {free / 2**20:.0f} MiB free. "
            "Free the device, take a smaller model, or set CARPOOL_DEVICE=cpu"
        ) from error
    return moved


def _memory_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights; those that are tied count once, unless a second copy is held."""
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    packed = [module.num_bytes for module in model.modules() if isinstance(module, prepacked.PrepackedLinear)]
    return sum(tensors.values()) + sum(packed)
