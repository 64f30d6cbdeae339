"""Rows in bags: their order by bag, and the sum of every bag without atomics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bags(bag: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions by bag, in their own order within one, and where each bag begins."""
    ordered, order = torch.sort(bag, stable=True)
    return order, torch.searchsorted(ordered, torch.arange(count, device=bag.device))


def sum_bags(rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Sum ``rows[order]`` between consecutive starts, left to right, in fp32 (fp64 for fp64).

    embedding_bag accumulates wide, rounds once and uses no atomics in forward.
    """
    if not (starts.numel() and order.numel()):
        return rows.new_zeros(starts.numel(), rows.shape[1])
    return F.embedding_bag(order, rows, starts, mode="sum")
