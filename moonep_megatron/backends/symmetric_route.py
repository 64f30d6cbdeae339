"""What one pass of the symmetric backend keeps, all of it on the device.

Letters as in `moonep_megatron.backends.base`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, override

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonep_megatron.backends.base import Bounds, Route
from moonep_megatron.backends.group_memory import Tables
from moonep_megatron.kernels.compact import compact
from moonep_megatron.kernels.layout import DevicePlan
from moonep_megatron.plan import Plan


@dataclass(frozen=True, kw_only=True)
class SymmetricRoute(Route):
    """A `Route` whose every part is on the device.

    Attributes:
        rank: this rank.
        tables: rows and probabilities by receive row and grouped row, after the first dispatch.
        rank_sK, row_sK: int32 [s, K], destination rank and grouped row of each entry, -1 for none.
        starts: int32 [4, P], the row boundaries of this rank's groups four times, each time one
            group further on, so that the boundaries from any group on start 16-byte aligned.
    """

    rank: int
    tables: Tables
    rank_sK: Tensor
    row_sK: Tensor
    starts: Tensor

    @override
    def bounds(self, first: int, count: int) -> Bounds:
        shift = first % 4
        return self.starts[shift, first - shift : first - shift + count + 1]

    @override
    def starts_G1(self) -> list[int]:
        return self._starts_on_host

    @cached_property
    def _starts_on_host(self) -> list[int]:
        return self.plan.group_start_RG1[self.rank].tolist()

    @cached_property
    def cap(self) -> Tensor:
        """int32 scalar, grouped rows of this rank."""
        return self.plan.cap_R[self.rank]


def plan_of(made: DevicePlan) -> Plan:
    """The plan as `moonep_megatron.plan` has it, over the same memory."""
    return Plan(
        rows_RE=made.rows_RE,
        cap_R=made.cap_R,
        foreign_expert_Rn=made.foreign_expert_Rn,
        group_expert_RG=made.group_expert_RG,
        group_start_RG1=made.group_start_RG1,
        rule_1=made.rule,
    )


def chosen_experts(
    routing_map: Tensor, probs: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`moonep_megatron.kernels.compact.compact`, differentiable in ``probs``."""
    return _Compact.apply(routing_map, probs, topk)


class _Compact(torch.autograd.Function):
    """Routing map to ids and probabilities in one kernel, which counts the ids as well."""

    @staticmethod
    def forward(
        ctx: Any, routing_map: Tensor, probs: Tensor, topk: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, chosen, places, counts = compact(routing_map, probs.contiguous(), topk)
        ctx.mark_non_differentiable(ids, places, counts)
        ctx.save_for_backward(ids)
        ctx.like = probs.shape, probs.dtype
        return ids, chosen, places, counts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _ids: Tensor, d_chosen: Tensor, _places: Tensor, _counts: Tensor
    ) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        (tokens, experts), dtype = ctx.like
        # Entries without an expert add 0 to column 0; a token has an expert only once.
        d_chosen = torch.where(ids >= 0, d_chosen, 0).to(dtype)
        d_probs = d_chosen.new_zeros(tokens, experts)
        return None, d_probs.scatter_add_(1, ids.clamp(min=0).long(), d_chosen), None
