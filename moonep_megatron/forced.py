"""For benchmarks: bias a router's logits until one expert is as hot as asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ROUNDS = 32


def forced_gating(
    gating: Callable[[Tensor], Tensor], maxvio: float, topk: int, hot_expert: Callable[[], int]
) -> Callable[[Tensor], Tensor]:
    """Wrap a router's ``gating`` so that its top-k choices have about the given maxvio.

    The bias is found anew from every batch's own logits, so a recomputed batch is routed alike.

    Args:
        gating: [..., H] -> logits [..., E].
        maxvio: X, the hot expert gets (1 + X) times the mean rows, the others share the rest.
        topk: K.
        hot_expert: gives its index, asked at every call.

    Returns:
        The wrapped function. Scores that are not monotonic in the logits (expert bias, group
        limits) shift the result.
    """

    def biased(hidden: Tensor) -> Tensor:
        logits = gating(hidden)
        flat = logits.detach().reshape(-1, logits.shape[-1]).float()
        return logits + _bias(flat, maxvio, topk, hot_expert()).to(logits.dtype)

    return biased


def _bias(logits_sE: Tensor, maxvio: float, topk: int, hot_expert: int) -> Tensor:
    """A bias [E] under which the top-k loads approach the target, by steps in log load."""
    tokens, experts = logits_sE.shape
    target_E = logits_sE.new_full((experts,), (experts - 1 - maxvio) / max(experts - 1, 1))
    target_E[hot_expert] = 1 + maxvio
    bias_E = logits_sE.new_zeros(experts)
    spread = logits_sE.std() if tokens > 1 else logits_sE.new_ones(())
    for i in range(_ROUNDS):
        chosen = (logits_sE + bias_E).topk(topk, dim=1).indices.reshape(-1)
        load_E = logits_sE.new_zeros(experts)
        load_E.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=load_E.dtype))
        # Half a row keeps empty experts finite; the step shrinks, so the loads settle.
        ratio = (target_E * tokens * topk / experts + 0.5) / (load_E + 0.5)
        bias_E = bias_E + spread * ratio.log() / (1 + i / 4)
    return bias_E
