"""A check at every load: does our batched attention compute what the model's own does? It warms the model up, too.

Models differ in more ways than a configuration tells (biases, caps, windows, positions). So two short sequences go
through the model as a batch would take them, in chunks and beside each other, and their logits are compared with the
model's own forward pass, without a cache and with its own attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from worker.engines.attention import ATTENTION_NAME, UnsupportedAttentionError
from worker.engines.base import EngineError
from worker.engines.forward import Chunk, ForwardPass, num_embeddings
from worker.engines.kv_cache import SlotCache

NUM_TOKENS = (10, 5)
CHUNK = 4
#: Largest relative error that rounding explains, by number format.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}


def check_model(model: PreTrainedModel, name: str) -> None:
    """Compare batched logits with the model's own.

    Raises:
        EngineError: they differ by more than rounding, or the model can't be run in this way.
    """
    advice = "Take another model, or CARPOOL_ENGINE=vllm"
    try:
        errors = relative_errors(model)
    except (UnsupportedAttentionError, TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        raise EngineError(
            f"model {name!r} ({type(model).__name__}) can't be run in a batch of this engine: {error}. {advice}"
        ) from error
    tolerance = TOLERANCES[model.dtype]
    # Written so that a NaN is refused.
    if not all(error <= tolerance for error in errors):
        raise EngineError(
            f"model {name!r} ({type(model).__name__}) gives other results in a batch of this engine than alone "
            f"(relative error {max(errors):.2g}, rounding explains {tolerance:g}). {advice}"
        )


@torch.inference_mode()
def relative_errors(model: PreTrainedModel) -> list[float]:
    """Distance of batched logits from the model's own, relative to their spread, for two sequences."""
    vocab_size = num_embeddings(model)
    longer, shorter = ([(11 + 7919 * i * (row + 1)) % vocab_size for i in range(n)] for row, n in enumerate(NUM_TOKENS))
    references = [_own_logits(model, longer), _own_logits(model, shorter)]
    batched = _batched_logits(model, longer, shorter)
    return [
        float((one - other).norm() / (other - other.mean()).norm())
        for one, other in zip(batched.float(), references, strict=True)
    ]


def _own_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    try:
        output = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    logits: torch.Tensor = output.logits[0, -1].float()
    return logits


def _batched_logits(model: PreTrainedModel, longer: Sequence[int], shorter: Sequence[int]) -> torch.Tensor:
    forward = ForwardPass(model, SlotCache(max_rows=2, max_length=max(NUM_TOKENS)))
    last, half = len(longer) - 1, len(shorter) // 2
    forward.run([], [], [Chunk(row=0, start=0, token_ids=longer[:CHUNK], ends_prompt=False)])
    packed = [
        Chunk(row=0, start=CHUNK, token_ids=longer[CHUNK : last - 1], ends_prompt=True),
        Chunk(row=1, start=0, token_ids=shorter[:half], ends_prompt=False),
    ]
    forward.run([], [], packed)
    rest = Chunk(row=1, start=half, token_ids=shorter[half:-1], ends_prompt=True)
    forward.run([longer[last - 1]], [last - 1], [rest])
    return forward.run([longer[last], shorter[-1]], [last, len(shorter) - 1])
