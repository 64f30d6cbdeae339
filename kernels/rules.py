"""The planning rules on the device: from sorted counts to transfers, as `moonep_megatron.rules`.

Letters: R ranks, n home experts of a rank, E = R*n.

All but trees are one scheme, *candidate f*: the largest surplus fills the roomiest rank f times,
then the ranks that have not been filled form a chain. With f = 0 this is the rule chain, with
f = R - 1 pairs, and peel is the least f whose chain exists (filled ranks have no surplus left, so
pairs and peel fill alike). Trees are candidates of their own (`moonep_megatron.kernels.trees`). No
candidate depends on another: each is one block's work.

A rank's experts stand in shared memory by falling rows (ties: lowest id first), from ``head`` on,
with ``after[k]``, the rows of the experts from the k-th on. A rank that passes on its largest k
keeps ``after[k]``, so where a flow comes in it must pass on the least k with
``after[k] <= cap - flow``. A rank's row has n + 1 places; the last one has no rows.

Everything is exact int32: all routed rows together are below 2^31, which the launcher checks.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import chain, transfers, trees, warp
from moonep_megatron.kernels.candidate import EXISTS, FILLS, TRANSFERS, State, append, padded


@cute.jit
def find(
    s: State,
    tree: Int32,
    fills: Int32,
    pieces: Int64,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
    with_trees: cutlass.Constexpr[bool],
) -> None:
    """All threads: carry out a candidate and store its pieces.

    Args:
        tree: number of the tree, or -1 for candidate ``fills``.
    """
    _, own = warp.lane_and_warp()
    if cutlass.const_expr(with_trees):  # noqa: SIM102 - run time inside
        if tree >= 0:
            trees.stand(s, ranks, threads)
            if own < trees.warps(ranks):
                trees.grow(s, tree, pieces, ranks, homes)
    if tree < 0 and own == 0:
        _fill(s, fills, ranks)
    cute.arch.sync_threads()
    # Read before the barrier, behind which warp 0 may set it.
    filled, complete = s.scalars[FILLS], s.scalars[EXISTS]
    transfers.serve(s, Int32(0), filled, pieces, homes, threads)
    cute.arch.sync_threads()
    if complete == 0 and tree < 0:
        left = ranks - filled
        if left <= chain.EXACT_RANKS:
            chain.exact_row(s, left, ranks, homes, threads)
        if cutlass.const_expr(ranks > chain.EXACT_RANKS):  # noqa: SIM102 - run time inside
            if left > chain.EXACT_RANKS and own == 0:
                chain.greedy_row(s, left, ranks, homes)
        cute.arch.sync_threads()
        if s.scalars[EXISTS] == 1:
            transfers.serve(s, filled, s.scalars[TRANSFERS], pieces, homes, threads)
    cute.arch.sync_threads()


@cute.jit
def _fill(s: State, fills: Int32, ranks: cutlass.Constexpr[int]) -> None:
    """Warp 0: the largest surplus fills the roomiest rank, up to ``fills`` times.

    Without surplus the candidate is complete, with the transfers so far.
    """
    lane, _ = warp.lane_and_warp()
    groups = padded(ranks) // warp.WARP
    # A lane keeps its ranks' state in registers: the steps wait for nothing but votes.
    surplus = [s.surplus[g * warp.WARP + lane] for g in range(groups)]
    filled = [Int32(0)] * groups
    t = Int32(0)
    more = Int32(1)
    while more != 0:
        most, least = surplus[0], surplus[0]
        for g in cutlass.range_constexpr(1, groups):
            most = cutlass.max(most, surplus[g])
            least = cutlass.min(least, surplus[g])
        most, least = warp.warp_max(most), warp.warp_min(least)
        if most > 0 and t < fills:
            donor = warp.lowest_rank([Int32(one == most) for one in surplus])
            receiver = warp.lowest_rank([Int32(one == least) for one in surplus])
            for g in cutlass.range_constexpr(groups):
                if g * warp.WARP + lane == donor:
                    surplus[g] = most + least
                if g * warp.WARP + lane == receiver:
                    surplus[g] = Int32(0)
                    filled[g] = Int32(1)
            if lane == 0:
                append(s, t, donor, receiver, Int32(0) - least)
            t += 1
        else:
            more = Int32(0)
            if lane == 0:
                s.scalars[FILLS] = t
                s.scalars[TRANSFERS] = t
                s.scalars[EXISTS] = Int32(most == 0)
    for g in cutlass.range_constexpr(groups):
        s.surplus[g * warp.WARP + lane] = surplus[g]
        if filled[g] != 0:
            s.open[g * warp.WARP + lane] = 0
