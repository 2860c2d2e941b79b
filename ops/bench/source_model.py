"""The source design's Model worker: a process that computes the whole text again for every token.

As the source page describes it, without its faults that have nothing to do with speed: prompts are padded on the left,
and token ids stay ids, so nothing is tokenised twice. The model is called as transformers loads it, in the number
format of the side that it is compared with, and builds no cache that nobody would read.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from ops.bench.engine_loop import become_model_worker
from tasks.settings import Settings
from worker.engines.base import EngineError
from worker.engines.model_source import find_model
from worker.simulation import Draws, prompt_ids, token_text


@dataclass(frozen=True, slots=True)
class Encode:
    """Token ids of a prompt; answered by a list of int."""

    prompt: str


@dataclass(frozen=True, slots=True)
class Step:
    """One token more for each sequence, given by all its ids; answered by a list of (id, text)."""

    sequences: tuple[tuple[int, ...], ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Generate:
    """Prompt and completion of exactly `max_tokens`, greedy; answered by a str."""

    prompt: str
    max_tokens: int


class SourceModel(Protocol):
    def encode(self, prompt: str) -> list[int]: ...

    def step(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[tuple[int, str]]: ...

    def generate(self, prompt: str, max_tokens: int) -> str: ...


class TransformersSourceModel:
    """Plain transformers. The library and torch are loaded by name: they belong into this process alone."""

    def __init__(self, settings: Settings) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        manager: Any = importlib.import_module("worker.model_manager")
        device = manager.choose_device(settings.device)
        dtype = manager.choose_dtype(settings.dtype, device)
        folder = _folder(settings, dtype)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._device = device

    def encode(self, prompt: str) -> list[int]:
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    def step(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[tuple[int, str]]:
        torch = self._torch
        longest = max(map(len, sequences))
        padding = [longest - len(ids) for ids in sequences]
        input_ids = torch.tensor([[0] * pad + [*ids] for pad, ids in zip(padding, sequences, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        with torch.inference_mode():
            logits = self._model(
                input_ids=input_ids.to(self._device),
                attention_mask=mask.to(self._device),
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0).to(self._device),
                use_cache=False,
            ).logits[:, -1]
            probabilities = torch.softmax(logits.float() / temperature, dim=-1)
            drawn: list[int] = torch.multinomial(probabilities, 1)[:, 0].tolist()
        return [(token_id, self._tokenizer.decode([token_id], skip_special_tokens=True)) for token_id in drawn]

    def generate(self, prompt: str, max_tokens: int) -> str:
        inputs = self._tokenizer(prompt, return_tensors="pt").to(self._device)
        with self._torch.inference_mode():
            output = self._model.generate(
                **inputs, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
            )
        return str(self._tokenizer.decode(output[0], skip_special_tokens=True))


class SimulatedSourceModel:
    """No model, to see that the service works."""

    def encode(self, prompt: str) -> list[int]:
        return prompt_ids(prompt)

    def step(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[tuple[int, str]]:
        ids = [Draws(str(sequence), 0).token_id(len(sequence)) for sequence in sequences]
        return [(token_id, token_text(token_id)) for token_id in ids]

    def generate(self, prompt: str, max_tokens: int) -> str:
        draws = Draws(prompt, 0)
        return prompt + "".join(token_text(draws.token_id(position)) for position in range(1, max_tokens + 1))


def main(settings: dict[str, Any], connection: Connection[Any, Any]) -> None:
    """Body of the process: the first message is True, or why there is no model; then an answer to each call."""
    become_model_worker()
    used = Settings(**settings)
    try:
        model: SourceModel = SimulatedSourceModel() if used.engine == "simulated" else TransformersSourceModel(used)
    except EngineError as error:
        connection.send(str(error))
        return
    connection.send(True)
    try:
        while True:
            connection.send(_answer(model, connection.recv()))
    except EOFError:
        return  # the service is gone


def _answer(model: SourceModel, call: Encode | Step | Generate) -> object:
    match call:
        case Encode():
            return model.encode(call.prompt)
        case Step():
            return model.step(call.sequences, call.temperature)
        case Generate():
            return model.generate(call.prompt, call.max_tokens)


def _folder(settings: Settings, dtype: Any) -> str | Path:
    """The very weights that the product loads: a GGUF file as it was unpacked for it."""
    source = find_model(settings.model)
    if source.gguf_file is None:
        return source.hub_name or source.folder or settings.model
    conversion: Any = importlib.import_module("worker.engines.gguf_conversion")
    folder: Path = conversion.converted_folder(settings.cache_dir, source.gguf_file, settings.pool, dtype)
    conversion.convert(source.gguf_file, folder, dtype, lambda phase, fraction: None)
    return folder
