"""The seam between the layer and a transport.

Letters (design of the whole package): S most tokens a rank may bring, s tokens it brings now,
K experts a token goes to, E experts, R expert-parallel ranks, n = E/R home experts of a rank,
B duplicate slots of a rank, H width of a row, N = S*K grouped rows (more with a slack), M receive
rows: R*S for R <= K, else N.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_megatron.caps import most_rows
from moonep_megatron.plan import Plan, plan_hash
from moonep_megatron.slots import SlotPool, SlotShape

# Row boundaries of consecutive groups: integers on the host, or int32 on the device, 16-byte
# aligned. One more than there are groups; absolute rows.
Bounds = Sequence[int] | Tensor


@dataclass(kw_only=True)
class Choices:
    """The experts that this rank's tokens chose.

    Attributes:
        ids_sK: int32 or int64 [s, K], -1 for none; repeats are legal.
        excess: int scalar, choices beyond K that could not be represented, or None for none.
        places_sK, counts_CE: what counting on the device left for the exchange (see
            `moonep_megatron.kernels.counting`), or None.
    """

    ids_sK: Tensor
    excess: Tensor | None = None
    places_sK: Tensor | None = None
    counts_CE: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Route(ABC):
    """Everything one pass of one layer needs after its exchange, forward and backward.

    Kept in the autograd contexts of that pass, so any number of microbatches may be in flight.

    Attributes:
        plan: the placement, equal on all ranks.
        counts_RE: int32 [R, E], rows that rank r routes to expert e.
        source_row_N: int32 [N], the receive row that holds the input of each grouped row of this
            rank. Only the first ``cap`` entries mean anything, and those after the first dispatch.
        tokens: s, the tokens this rank brought.
        topk: K.
        max_tokens: S.
        waves: how many rounds of B foreign experts this pass runs.
    """

    plan: Plan
    counts_RE: Tensor
    source_row_N: Tensor
    tokens: int
    topk: int
    max_tokens: int
    waves: int

    @property
    def receive_rows(self) -> int:
        """M."""
        ranks = self.plan.rows_RE.shape[0]
        grouped = self.source_row_N.numel()
        return ranks * self.max_tokens if ranks <= self.topk else grouped

    @abstractmethod
    def bounds(self, first: int, count: int) -> Bounds:
        """Row boundaries of this rank's groups first .. first + count (home, then foreign)."""

    @abstractmethod
    def starts_G1(self) -> list[int]:
        """The 2n + 1 boundaries of all groups on the host, which may have to wait for them."""


class Backend(ABC):
    """Moves counts, rows, weights and gradients between the ranks of one expert-parallel group.

    Every method but `choose` is collective: all ranks call it, in the same order, also with zero
    tokens. `dispatch` and `gather` are adjoint to each other, and each serves as the other's
    backward; so are reading rows through ``source_row_N`` and `presum`.

    Rows from `dispatch` are lent until `free_receive`, which is called once for each dispatch.
    The sums from `presum` are lent until the `gather` that follows it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    slots: int
    layer: int = 0
    """Number of the layer, for messages."""
    device_bounds: bool = False
    """Whether routes have their row boundaries on the device, and reading them waits for it."""
    slot_chunks: tuple[int, ...] = ()
    """Slots of the first launches over a wave's slots, before one over all the rest."""

    def choose(self, routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Choices, Tensor]:
        """The chosen experts of every token, ascending, and their probabilities.

        Args:
            routing_map: bool [s, E].
            probs: [s, E], any floating dtype.

        Returns:
            the choices, and [s, K], 0 for none, differentiable in ``probs``.
        """
        ids_sK, excess = compact(routing_map, topk)
        return Choices(ids_sK=ids_sK, excess=excess), chosen_probs(probs, ids_sK)

    @abstractmethod
    def publish_home_order(self, order_n: Tensor) -> Tensor:
        """Tell all ranks the memory order of this rank's home experts.

        Args:
            order_n: int32 [n], global expert ids.

        Returns:
            int32 [R, n], the order of every rank.
        """

    @abstractmethod
    def exchange(self, choices: Choices, home_order_Rn: Tensor) -> Route:
        """Exchange the counts, plan, and derive where every row goes.

        Args:
            home_order_Rn: int32 [R, n], from `publish_home_order`.

        Raises:
            ValueError: on every rank alike, naming the offending rank, when some rank brought more
                than S tokens, ids outside -1..E-1, or more than K choices for a token. The
                symmetric backend ends the processes with the same words instead.
        """

    @abstractmethod
    def dispatch(
        self, route: Route, x_sH: Tensor, probs_sK: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Send each token once to every rank that computes one of its rows.

        Args:
            x_sH: [s, H], any floating dtype.
            probs_sK: [s, K], weights that travel to the grouped rows, or none. The first dispatch
                of a route has them.

        Returns:
            receive rows [M, H] in the dtype of ``x_sH``, lent, and probabilities [N].
        """

    def keep(self, lent: Tensor) -> Tensor:
        """Lent rows in memory of their own, to be read after their return."""
        return lent

    def free_receive(self) -> None:
        """Say that the rows of the last `dispatch` have been read by all work queued so far."""

    @abstractmethod
    def presum(self, route: Route, rows_NH: Tensor, d_probs_N: Tensor | None = None) -> Tensor:
        """Sum the grouped rows of one token on this rank, in fp32, in order of k.

        Args:
            d_probs_N: [N], the values that the `gather` after this one returns, if it does.

        Returns:
            [M, H] in the dtype of ``rows_NH``, lent; rows without a token are zero or unread.
        """

    @abstractmethod
    def gather(
        self, route: Route, sums_MH: Tensor, d_probs_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Bring the per-rank sums of every token back to its owner and add them in fp32, by rank.

        Args:
            sums_MH: [M, H], from `presum`.
            d_probs_N: [N], as given to that `presum`: values that return from the grouped rows to
                their entries (the gradient of the probabilities), or none.

        Returns:
            [s, H] in the dtype of ``sums_MH`` and [s, K].
        """

    def make_slots(self, count: int, shape: SlotShape) -> SlotPool:
        """B slots in memory that `push_weights` and `pull_gradients` reach. Collective."""
        return SlotPool.empty(count, shape)

    def keep_slots(self, shared: SlotPool, version: Callable[[], int]) -> SlotPool:
        """Slots of this layer alone, which keep their weights until others are pushed. Collective.

        From now on only what they do not hold is pushed; they are given to every `push_weights`.

        Args:
            shared: from `make_slots`; its gradients serve all layers.
            version: of this rank's home weights; another one whenever they may have changed.
        """
        raise TypeError(f"--moe-moonep-reuse: {type(self).__name__} keeps no duplicates")

    @abstractmethod
    def push_weights(
        self,
        route: Route,
        wave: int,
        weights: Mapping[int, Sequence[Tensor]],
        slots: SlotPool,
        *,
        backward: bool = False,
    ) -> None:
        """Start to copy the weights of every foreign expert of a wave into the slots.

        Called after the `free_slots` of the wave before. All ranks push the same projections.

        Args:
            weights: by projection, 0 for FC1 and 1 for FC2: n tensors [out, in], this rank's home
                weights by local expert index.
            backward: FC2 is needed first.
        """

    def wait_slots(self, route: Route, wave: int, projection: int, first: int, end: int) -> None:
        """Let work queued from here on begin when slots [first, end) have a projection's weights.

        Only for projections of the last `push_weights`.
        """

    def free_slots(self) -> None:
        """Say, once for each push, that the slots have been read by all work queued so far."""

    def wait_pulled(self) -> None:
        """Let work queued from here on begin when the slot gradients may be overwritten."""

    @abstractmethod
    def pull_gradients(
        self,
        route: Route,
        wave: int,
        slots: SlotPool,
        targets: tuple[Sequence[Tensor], Sequence[Tensor]],
    ) -> None:
        """Start to add the slot gradients of a wave to their home, in fixed (rank, slot) order.

        The sums are plain; ``slots.grad1`` and ``slots.grad2`` have been computed by work queued
        before. Until `join`, nothing else may add to the targets.

        Args:
            targets: of FC1 and FC2, n tensors [out, in] by local expert index, added to in place.
        """

    def join(self) -> None:
        """Let work queued from here on begin when pushes and pulls of this rank are done.

        Only after some: a captured pass may not wait for a stream that does nothing in it.
        """

    def gather_biases(self, biases_nW: Tensor) -> Tensor:
        """[E, W], the biases of all experts, from those [n, W] of each rank."""
        parts = [torch.empty_like(biases_nW) for _ in range(self.size)]
        dist.all_gather(parts, biases_nW, group=self.group)
        return torch.cat(parts)

    def sum_bias_gradients(self, gradients_EW: Tensor) -> Tensor:
        """[n, W] of this rank's experts, summed over what all ranks have [E, W]; overwrites it."""
        dist.all_reduce(gradients_EW, group=self.group)
        return gradients_EW.chunk(self.size)[self.rank]


def gather_objects[T](group: dist.ProcessGroup, mine: T) -> list[T]:
    """What every rank of a group says, by rank; waits for all of them."""
    everyone: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone  # type: ignore[return-value]


def compare_plans(group: dist.ProcessGroup, plan: Plan) -> None:
    """Debugging: the same plan on every rank of a group; waits for all of them.

    Raises:
        RuntimeError: on all ranks, when their plans differ.
    """
    hashes = gather_objects(group, plan_hash(plan))
    if len(set(hashes)) > 1:
        raise RuntimeError(f"expert-parallel ranks derived different plans, hashes {hashes}")


def compact(routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The chosen experts of every token, ascending, in one pass and without a host sync.

    Args:
        routing_map: bool [s, E].

    Returns:
        ids int32 [s, K], -1 for none, and the number of choices beyond K as an int64 scalar.
    """
    tokens, experts = routing_map.shape
    place = routing_map.cumsum(1, dtype=torch.int32) - 1
    # Entries that are not chosen, or come after the K-th, land in a column that is cut off.
    place = torch.where(routing_map & (place < topk), place, topk).long()
    ids = torch.full((tokens, topk + 1), -1, dtype=torch.int32, device=routing_map.device)
    expert = torch.arange(experts, dtype=torch.int32, device=routing_map.device)
    ids = ids.scatter(1, place, expert.expand(tokens, -1))[:, :topk].contiguous()
    return ids, routing_map.sum() - (ids >= 0).sum()


def chosen_probs(probs: Tensor, ids_sK: Tensor) -> Tensor:
    """Probabilities [s, K] of the chosen experts, 0 for none; differentiable in ``probs``."""
    return torch.where(ids_sK >= 0, probs.gather(1, ids_sK.clamp(min=0).long()), 0)


def row_counts(max_tokens: int, topk: int, ranks: int, slack: int) -> tuple[int, int]:
    """(N, M): the grouped rows that a rank may hold, and the receive rows they stand in.

    Args:
        slack: in parts, see `moonep_megatron.caps`.
    """
    grouped = most_rows(max_tokens * topk, slack)
    return grouped, ranks * max_tokens if ranks <= topk else grouped


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
