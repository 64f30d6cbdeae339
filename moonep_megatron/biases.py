"""Biases of experts, which do not travel with their duplicates.

All biases of a layer are smaller than the weights of one expert, so every rank takes all of them in
every pass and adds those of its own row groups; gradients are summed over the ranks and cut.

A bias is a weight for one more input: 1 for FC1, and for FC2 the probability, which the activation
is multiplied by as well. So rows get theirs by a product with a matrix that selects their group,
and gradients are weight gradients for that one input.

Letters: n home experts, G = 2n row groups, N grouped rows, M receive rows, H row width,
F1 rows of FC1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonep_megatron import gemm
from moonep_megatron.backends.base import Backend, Bounds, Route
from moonep_megatron.weights import HomeWeights

_INPUTS = 8
"""Columns of the one input, which the grouped GEMM wants 16 bytes wide; the others are zero."""


@dataclass(frozen=True, kw_only=True)
class Biases:
    """The biases of this rank's row groups in one pass.

    Attributes:
        fc1_GF1, fc2_GH: by row group; of a group without an expert, any.
        expert_G: int64, the global expert of each group; of a group without one, any.
        start_G: int [G + 1], the groups' row boundaries.
    """

    backend: Backend
    route: Route
    fc1_GF1: Tensor
    fc2_GH: Tensor
    expert_G: Tensor
    start_G: Tensor

    @classmethod
    def gather(cls, home: HomeWeights, backend: Backend, route: Route) -> Biases | None:
        """Those of all ranks, cut for this one; None where experts have none. Collective."""
        if not home.biased:
            return None
        fc1_nF1, fc2_nH = home.fc1.biases(), home.fc2.biases()
        all_EW = backend.gather_biases(torch.cat((fc1_nF1, fc2_nH), dim=1))
        plan, device = route.plan, all_EW.device
        expert_G = plan.group_expert_RG[backend.rank].to(device).long().clamp(min=0)
        fc1_GF1, fc2_GH = all_EW[expert_G].split((fc1_nF1.shape[1], fc2_nH.shape[1]), dim=1)
        start_G = plan.group_start_RG1[backend.rank].to(device)
        return cls(
            backend=backend,
            route=route,
            fc1_GF1=fc1_GF1,
            fc2_GH=fc2_GH,
            expert_G=expert_G,
            start_G=start_G,
        )

    def add_to_fc1(self, pre_NF1: Tensor) -> None:
        """In place."""
        select_NG = self._groups(pre_NF1.shape[0])[:, None] == self._numbers()
        pre_NF1.addmm_(select_NG.to(pre_NF1.dtype), self.fc1_GF1)

    def add_to_fc2(self, out_NH: Tensor, probs_N: Tensor) -> None:
        """In place, times the probability of a row."""
        select_NG = self._groups(out_NH.shape[0])[:, None] == self._numbers()
        weights_NG = torch.where(select_NG, probs_N[:, None], 0)
        out_NH.addmm_(weights_NG.to(out_NH.dtype), self.fc2_GH)

    def add_to_d_probs(self, d_probs_N: Tensor, d_sums_MH: Tensor) -> None:
        """Gradients of the probabilities, from those of the per-token sums; in place."""
        wide = torch.promote_types(d_sums_MH.dtype, torch.float32)
        d_MG = gemm.wide_product(d_sums_MH, self.fc2_GH.mT, wide)
        # What lies behind the last group names no row and no group.
        rows_N = self.route.source_row_N[: d_probs_N.shape[0]].long()
        groups_N = self._groups(d_probs_N.shape[0])
        rows_N = rows_N.clamp(0, max(d_MG.shape[0] - 1, 0))
        d_probs_N += d_MG[rows_N, groups_N.clamp(max=d_MG.shape[1] - 1)].to(d_probs_N.dtype)

    def gradients(
        self, d_pre_NF1: Tensor, d_sums_MH: Tensor, probs_N: Tensor, bounds: Bounds
    ) -> tuple[Tensor, Tensor]:
        """Of FC1 [n, F1] and FC2 [n, H] of this rank's experts, at least fp32. Collective."""
        groups, wide = len(self.expert_G), torch.promote_types(d_pre_NF1.dtype, torch.float32)
        fc1_GF18 = d_pre_NF1.new_zeros(groups, self.fc1_GF1.shape[1], _INPUTS, dtype=wide)
        fc2_GH8 = d_pre_NF1.new_zeros(groups, self.fc2_GH.shape[1], _INPUTS, dtype=wide)
        ones_N8, probs_N8 = (d_pre_NF1.new_zeros(len(probs_N), _INPUTS) for _ in range(2))
        ones_N8[:, 0], probs_N8[:, 0] = 1, probs_N
        index = self.route.source_row_N
        gemm.add_weight_gradients(d_pre_NF1, ones_N8, fc1_GF18, bounds, accumulate=True)
        gemm.add_weight_gradients(
            d_sums_MH, probs_N8, fc2_GH8, bounds, accumulate=True, out_index=index
        )
        own_GW = torch.cat((fc1_GF18[..., 0], fc2_GH8[..., 0]), dim=1)
        experts = self.route.counts_RE.shape[1]
        # Groups without an expert have no rows, and add zeros to some expert.
        all_EW = own_GW.new_zeros(experts, own_GW.shape[1]).index_add_(0, self.expert_G, own_GW)
        mine_nW = self.backend.sum_bias_gradients(all_EW)
        fc1_nF1, fc2_nH = mine_nW.split((self.fc1_GF1.shape[1], self.fc2_GH.shape[1]), dim=1)
        return fc1_nF1, fc2_nH

    def _groups(self, rows: int) -> Tensor:
        """int64 [rows], the group of each row; G behind the last."""
        number = torch.arange(rows, dtype=self.start_G.dtype, device=self.start_G.device)
        return torch.searchsorted(self.start_G[1:].contiguous(), number, right=True)

    def _numbers(self) -> Tensor:
        return torch.arange(len(self.expert_G), device=self.expert_G.device)
