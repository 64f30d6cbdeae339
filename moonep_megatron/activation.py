"""The activation between FC1 and FC2, times the router's probability.

Letters: N rows, F expert FFN width, F1 = 2F with a gated activation, else F.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


class Activation(Protocol):
    """Forward and backward of one activation; both round once to the dtype of the rows."""

    def forward(self, pre_NF1: Tensor, probs_N: Tensor) -> Tensor:
        """Activation times probability, [N, F]."""

    def backward(
        self, pre_NF1: Tensor, probs_N: Tensor, d_act_NF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The forward's result again, which nobody kept, and gradients of its two inputs."""


class Eager:
    """Any activation, elementwise along the rows, by torch's operators and autograd."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def forward(self, pre_NF1: Tensor, probs_N: Tensor) -> Tensor:
        """See `Activation`."""
        return (self.function(pre_NF1) * probs_N.unsqueeze(-1)).to(pre_NF1.dtype)

    def backward(
        self, pre_NF1: Tensor, probs_N: Tensor, d_act_NF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Activation`."""
        with torch.enable_grad():
            pre, probs = (x.detach().requires_grad_() for x in (pre_NF1, probs_N))
            act = self.forward(pre, probs)
        d_pre, d_probs = torch.autograd.grad(act, (pre, probs), d_act_NF)
        return act.detach(), d_pre, d_probs


class FusedSwiGLU:
    """SwiGLU compiled into one pass over the rows a direction, with fp32 in between."""

    def forward(self, pre_NF1: Tensor, probs_N: Tensor) -> Tensor:
        """See `Activation`."""
        return _swiglu(pre_NF1, probs_N)

    def backward(
        self, pre_NF1: Tensor, probs_N: Tensor, d_act_NF: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Activation`."""
        return _swiglu_backward(pre_NF1, probs_N, d_act_NF)


@torch.compile
def _swiglu(pre: Tensor, probs: Tensor) -> Tensor:
    gate, linear = pre.float().chunk(2, dim=-1)
    # As in the backward pass, so that its result is the same again.
    return (gate * torch.sigmoid(gate) * linear * probs.unsqueeze(-1)).to(pre.dtype)


@torch.compile
def _swiglu_backward(pre: Tensor, probs: Tensor, d_act: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gate, linear = pre.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    act, d = silu * linear, d_act.float()
    d_probs = (act * d).sum(-1).to(probs.dtype)
    weight = probs.unsqueeze(-1)
    d = d * weight
    d_gate = d * linear * (sigmoid * (1 + gate * (1 - sigmoid)))
    d_pre = torch.cat((d_gate, d * silu), dim=-1).to(pre.dtype)
    return (act * weight).to(pre.dtype), d_pre, d_probs


def activation(config: Any, *, fuse: bool) -> Activation:
    """The activation that a TransformerConfig names, as in Megatron's MLP.

    Args:
        fuse: allow the compiled one where ``bias_activation_fusion`` asks for such.
    """
    function: Function = config.activation_func
    if not config.gated_linear_unit:
        return Eager(function)
    clamp: float | None = config.activation_func_clamp_value
    offset: float = config.glu_linear_offset
    plain = function is F.silu and clamp is None and not offset
    wide = config.params_dtype == torch.float64  # the compiled one computes in fp32
    if fuse and plain and not wide and config.bias_activation_fusion:
        return FusedSwiGLU()

    def gated(pre: Tensor) -> Tensor:
        gate, linear = pre.chunk(2, dim=-1)
        if clamp is not None:
            gate, linear = gate.clamp(max=clamp), linear.clamp(min=-clamp, max=clamp)
        return function(gate) * (linear + offset)

    return Eager(gated)
