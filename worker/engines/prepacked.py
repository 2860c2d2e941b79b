"""Linear layers whose weights lie as the CPU's matrix kernels want them, put in order once instead of at each call.

torch.compile does the same when it freezes a model (torch/_inductor/fx_passes/mkldnn_fusion.py), by the same two
operators; here it costs no compilation. Results are the same to the last bit; with a bias they are rounded once less.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

#: Rows that the order of a weight is chosen for; more or fewer work as well.
TYPICAL_NUM_TOKENS = 4


class PrepackedLinear(torch.nn.Module):
    """Stands in for a torch.nn.Linear in inference. Weight and bias can't be trained, moved or saved.

    Attributes:
        weight: shape [out_features, in_features], in oneDNN's own layout.
        num_bytes: size of the weight.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.num_bytes = linear.weight.nbytes
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), TYPICAL_NUM_TOKENS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden_states, self.weight, self.bias, "none", [], "")
        return output


def pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether prepacking makes a model faster: bfloat16 on a CPU. In float32 it was no gain."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def prepack(model: PreTrainedModel) -> None:
    """Replace every plain linear layer. A weight that is tied to an embedding stays there, and is held twice."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            # Subclasses may do more than multiply.
            if type(child) is torch.nn.Linear:
                setattr(module, name, PrepackedLinear(child))
