"""Prepacked linear layers: the same numbers, on the processors that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_loads import loaded
from tests.tiny_models import save_tiny_model
from worker.engines.prepacked import PrepackedLinear, pays, prepack
from worker.engines.self_check import relative_errors
from worker.model_manager import cpu_computes_bfloat16

bfloat16_only = pytest.mark.skipif(not cpu_computes_bfloat16(), reason="this processor does not compute bfloat16")


@bfloat16_only
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4, 33])
def test_a_prepacked_layer_gives_the_layers_own_results(bias: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(64, 96, bias=bias)
    for parameter in linear.parameters():
        parameter.data.uniform_(-0.125, 0.125, generator=generator)
    linear.to(torch.bfloat16)
    # the bias is added before the one rounding here and after it there: a unit in the last place of bfloat16
    rtol, atol = (2**-7, 0.01) if bias else (0.0, 0.0)
    states = torch.randn(1, 2 * num_tokens, 64, generator=generator).to(torch.bfloat16)

    with torch.inference_mode():
        packed = PrepackedLinear(linear)
        for given in (states[:, :num_tokens], states[:, ::2], states[:, -num_tokens:, :]):
            torch.testing.assert_close(packed(given), linear(given), rtol=rtol, atol=atol)
    assert packed.num_bytes == 64 * 96 * 2


@bfloat16_only
def test_a_bfloat16_model_on_the_cpu_is_prepacked_and_its_card_still_counts_every_weight(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    single, packed = loaded(folder), loaded(folder, dtype="bfloat16")

    assert any(isinstance(module, PrepackedLinear) for module in packed.model.modules())
    assert not any(type(module) is torch.nn.Linear for module in packed.model.modules())
    assert packed.card.memory_bytes == pytest.approx(single.card.memory_bytes / 2, rel=0.01)
    assert max(relative_errors(packed.model)) < 0.05


def test_a_float32_model_is_left_as_it_is(tmp_path: Path) -> None:
    model = loaded(save_tiny_model(tmp_path)).model

    assert not pays(model.device, model.dtype)
    assert not any(isinstance(module, PrepackedLinear) for module in model.modules())


@bfloat16_only
def test_a_layer_that_does_more_than_multiply_is_left_as_it_is(tmp_path: Path) -> None:
    class Scaled(torch.nn.Linear):
        pass

    model: Any = loaded(save_tiny_model(tmp_path)).model
    model.to(torch.bfloat16)
    model.lm_head = Scaled(4, 4)

    prepack(model)

    assert isinstance(model.lm_head, Scaled)
