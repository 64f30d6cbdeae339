"""The seam between the layer and a transport.

Letters (design of the whole package): S most tokens a rank may bring, s tokens it brings now,
K experts a token goes to, E experts, R expert-parallel ranks, n = E/R home experts of a rank,
B duplicate slots of a rank, H width of a row, N = S*K grouped rows, M = min(K, R)*S receive rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonep_megatron.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Route:
    """Everything one pass of one layer needs after its exchange, forward and backward.

    Kept in the autograd contexts of that pass, so any number of microbatches may be in flight.

    Attributes:
        plan: the placement, equal on all ranks.
        counts_RE: int32 [R, E], rows that rank r routes to expert e.
        source_row_N: int32 [N], the receive row that holds the input of each grouped row of this
            rank. Only the first ``cap`` entries mean anything.
        starts_G1: the 2n + 1 row boundaries of this rank's groups, home then foreign; on the host
            for the collective backend.
        tokens: s, the tokens this rank brought.
        topk: K.
        max_tokens: S.
        waves: how many rounds of B foreign experts this pass runs.
    """

    plan: Plan
    counts_RE: Tensor
    source_row_N: Tensor
    starts_G1: Sequence[int]
    tokens: int
    topk: int
    max_tokens: int
    waves: int


class Backend(ABC):
    """Moves counts, rows, weights and gradients between the ranks of one expert-parallel group.

    Every method but `presum` is collective: all ranks call it, in the same order, also with zero
    tokens. `dispatch` and `gather` are adjoint to each other, and each serves as the other's
    backward; so are reading rows through ``source_row_N`` and `presum`.
    """

    rank: int
    size: int

    @abstractmethod
    def publish_home_order(self, order_n: Tensor) -> Tensor:
        """Tell all ranks the memory order of this rank's home experts.

        Args:
            order_n: int32 [n], global expert ids.

        Returns:
            int32 [R, n], the order of every rank.
        """

    @abstractmethod
    def exchange(self, ids_sK: Tensor, excess: Tensor, home_order_Rn: Tensor) -> Route:
        """Exchange the counts, plan, and derive where every row goes.

        Args:
            ids_sK: int [s, K], expert ids, -1 for none; repeats are legal.
            excess: int scalar, choices beyond K that could not be represented in ``ids_sK``.
            home_order_Rn: int32 [R, n], from `publish_home_order`.

        Raises:
            ValueError: on every rank alike, naming the offending rank, when some rank brought more
                than S tokens, ids outside -1..E-1, or more than K choices for a token.
        """

    @abstractmethod
    def dispatch(
        self, route: Route, x_sH: Tensor, probs_sK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send each token once to every rank that computes one of its rows.

        Args:
            x_sH: [s, H], any floating dtype.
            probs_sK: [s, K], weights that travel to the grouped rows, or none.

        Returns:
            receive rows [M, H] in the dtype of ``x_sH`` and probabilities [N].
        """

    @abstractmethod
    def presum(self, route: Route, rows_NH: Tensor) -> Tensor:
        """Sum the grouped rows of one token on this rank in fp32, in order of k; no communication.

        Returns:
            [M, H] in the dtype of ``rows_NH``; receive rows without a token are zero or unread.
        """

    @abstractmethod
    def gather(
        self, route: Route, sums_MH: Tensor, probs_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Bring the per-rank sums of every token back to its owner and add them in fp32, by rank.

        Args:
            sums_MH: [M, H], from `presum`.
            probs_N: [N], values that return from the grouped rows to their entries (the gradient
                of the probabilities), or none.

        Returns:
            [s, H] in the dtype of ``sums_MH`` and [s, K].
        """

    @abstractmethod
    def push_weights(
        self, route: Route, wave: int, weights_n: Sequence[Tensor], slots_Boi: Tensor
    ) -> None:
        """Copy the weights of every foreign expert of a wave from its home into the slots.

        Args:
            weights_n: n tensors [out, in], this rank's home weights by local expert index.
            slots_Boi: [B, out, in], this rank's slots of the same projection.
        """

    @abstractmethod
    def pull_gradients(
        self, route: Route, wave: int, slot_grads_Boi: Tensor, targets_n: Sequence[Tensor]
    ) -> None:
        """Add the slot gradients of a wave to their home, in fixed (rank, slot) order, unscaled.

        Args:
            slot_grads_Boi: [B, out, in] fp32, or fp64 in an fp64 model.
            targets_n: n tensors [out, in] by local expert index, added to in place.
        """


def receive_rows(
    rank_sK: Tensor, row_sK: Tensor, source: int, ranks: int, max_tokens: int
) -> Tensor:
    """Receive row, on its destination, of the token behind every entry.

    A token crosses to a rank once. With R <= K, token t of rank r has receive row r*S + t, which
    needs no plan; otherwise it takes the grouped row of its first entry on that rank.

    Args:
        rank_sK, row_sK: int [s, K], destination rank and grouped row of every entry, -1 for none.

    Returns:
        int [s, K], -1 for none. Entries of one token on one rank share their receive row.
    """
    if ranks <= rank_sK.shape[1]:
        tokens = torch.arange(rank_sK.shape[0], device=rank_sK.device, dtype=rank_sK.dtype)
        return torch.where(rank_sK >= 0, source * max_tokens + tokens[:, None], -1)
    return torch.where(rank_sK >= 0, row_sK.gather(1, first_entry(rank_sK)), -1)


def first_entry(rank_sK: Tensor) -> Tensor:
    """For each entry, the lowest k' whose entry of the same token has the same destination rank.

    Returns:
        int64 [s, K].
    """
    same_sKK = rank_sK[:, :, None] == rank_sK[:, None, :]
    k = torch.arange(rank_sK.shape[1], device=rank_sK.device)
    return torch.where(same_sKK, k, rank_sK.shape[1]).amin(dim=2)
