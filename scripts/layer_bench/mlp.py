"""Experts of the products that moonep uses, without moonep: rows in place, no duplicates.

Alone on balanced rows they are the ideal. Under Megatron's dispatchers they show which part of a
difference is the GEMM library's.

Letters: n experts, N rows grouped by expert, H row width, F expert FFN width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from moonep_megatron import gemm
from moonep_megatron.activation import Activation

Bounds = Sequence[int] | Tensor


class GroupedMLP(nn.Module):
    """n SwiGLU experts; called as Megatron calls its experts modules.

    The weights and their fp32 gradients are plain tensors: [n, 2F, H] and [n, H, F]. Backward adds
    to the gradients, as ``gradient_accumulation_fusion`` does.

    Attributes:
        fixed: boundaries of the groups that every call has; none where counts are given.
    """

    def __init__(
        self, count: int, width: int, ffn: int, activation: Activation, device: torch.device
    ) -> None:
        super().__init__()
        self.activation = activation
        self.fixed: Bounds | None = None
        shapes = ((count, 2 * ffn, width), (count, width, ffn))
        self.weights = [torch.empty(s, dtype=torch.bfloat16, device=device) for s in shapes]
        self.grads = [torch.zeros(s, dtype=torch.float32, device=device) for s in shapes]

    def forward(self, rows_NH: Tensor, counts_n: Tensor, probs_N: Tensor) -> tuple[Tensor, None]:
        bounds = row_bounds(counts_n, rows_NH.device) if self.fixed is None else self.fixed
        return _GroupedMLP.apply(self, bounds, rows_NH, probs_N), None

    def set_layer_number(self, layer_number: int) -> None:
        pass


def row_bounds(counts_n: Tensor, device: torch.device) -> Bounds:
    """The n + 1 boundaries of the groups, where the products want them: on the GPU or the host."""
    if device.type == "cuda":
        counts = counts_n.to(device, torch.int32, non_blocking=True)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    return [0, *accumulate(counts_n.tolist())]


class _GroupedMLP(torch.autograd.Function):
    """Keeps rows, probabilities and what FC1 gave, as moonep does."""

    @staticmethod
    def forward(
        ctx: Any, mlp: GroupedMLP, bounds: Bounds, rows_NH: Tensor, probs_N: Tensor
    ) -> Tensor:
        fc1, fc2 = mlp.weights
        pre = rows_NH.new_empty(rows_NH.shape[0], fc1.shape[1])
        gemm.rows_times_weights(rows_NH, fc1, pre, bounds, None)
        act = mlp.activation.forward(pre, probs_N)
        out = torch.empty_like(rows_NH)
        gemm.rows_times_weights(act, fc2, out, bounds, None)
        ctx.mlp, ctx.bounds = mlp, bounds
        ctx.save_for_backward(rows_NH, probs_N, pre)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, probs, pre = ctx.saved_tensors
        (fc1, fc2), (grad1, grad2) = ctx.mlp.weights, ctx.mlp.grads
        bounds, d_out = ctx.bounds, d_out.contiguous()
        d_act = d_out.new_empty(d_out.shape[0], fc2.shape[2])
        gemm.rows_times_weights(d_out, fc2.mT, d_act, bounds, None)
        act, d_pre, d_probs = ctx.mlp.activation.backward(pre, probs, d_act)
        gemm.add_weight_gradients(d_out, act, grad2, bounds, accumulate=True)
        d_rows = torch.empty_like(rows)
        gemm.rows_times_weights(d_pre, fc1.mT, d_rows, bounds, None)
        gemm.add_weight_gradients(d_pre, rows, grad1, bounds, accumulate=True)
        return None, None, d_rows, d_probs
