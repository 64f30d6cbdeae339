"""The planning rules on the device: from sorted counts to transfers, as `moonep_megatron.rules`.

Letters: R ranks, n home experts of a rank, E = R*n.

All rules are one scheme, *candidate f*: the largest surplus fills the roomiest rank f times, then
the ranks that have not been filled form a chain. With f = 0 this is the rule chain, with f = R - 1
pairs, and peel is the least f whose chain exists (filled ranks have no surplus left, so pairs and
peel fill alike). Candidates do not depend on each other: each is one block's work.

A rank's experts stand in shared memory by falling rows (ties: lowest id first), from ``head`` on,
with ``after[k]``, the rows of the experts from the k-th on. A rank that passes on its largest k
keeps ``after[k]``, so where a flow comes in it must pass on the least k with
``after[k] <= cap - flow``. A rank's row has n + 1 places; the last one has no rows.

Everything is exact int32: all routed rows together are below 2^31, which the launcher checks.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import chain, ptx, warp
from moonep_megatron.kernels.candidate import EXISTS, FILLS, TRANSFERS, State, append, padded

# Shared loads that a lane has under way at once.
_BATCH = 4


@cute.jit
def find(
    s: State,
    fills: Int32,
    pieces: Int64,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All threads: carry out candidate ``fills`` and store its pieces."""
    _, own = warp.lane_and_warp()
    if own == 0:
        _fill(s, fills, ranks)
    cute.arch.sync_threads()
    # Read before the barrier, behind which warp 0 may set it.
    filled, complete = s.scalars[FILLS], s.scalars[EXISTS]
    _serve(s, Int32(0), filled, pieces, homes, threads)
    cute.arch.sync_threads()
    if complete == 0:
        left = ranks - filled
        if left <= chain.EXACT_RANKS:
            chain.exact_row(s, left, ranks, homes, threads)
        if cutlass.const_expr(ranks > chain.EXACT_RANKS):  # noqa: SIM102 - run time inside
            if left > chain.EXACT_RANKS and own == 0:
                chain.greedy_row(s, left, ranks, homes)
        cute.arch.sync_threads()
        if s.scalars[EXISTS] == 1:
            _serve(s, filled, s.scalars[TRANSFERS], pieces, homes, threads)
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


@cute.jit
def _serve(
    s: State,
    first: Int32,
    last: Int32,
    pieces: Int64,
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All warps: say which experts move, a donor a warp, so that its transfers stay in order."""
    lane, own = warp.lane_and_warp()
    for start in cutlass.range(first, last, warp.WARP):
        ours = Int32(0)
        if start + lane < last:
            ours = Int32(s.donor[start + lane] % (threads // warp.WARP) == own)
        left = warp.ballot(ours != 0)
        while left != 0:
            t = start + warp.lowest(left)
            left &= left - 1
            _take(s, s.donor[t], s.receiver[t], s.moved[t], pieces, homes)


@cute.jit
def _take(
    s: State,
    donor: Int32,
    receiver: Int32,
    moved: Int32,
    pieces: Int64,
    homes: cutlass.Constexpr[int],
) -> None:
    """One warp: remove rows of the donor, largest expert first, and store the pieces.

    What is left of the last expert touched moves to its place in the falling order.
    """
    lane, _ = warp.lane_and_warp()
    row = donor * (homes + 1)
    head = s.head[donor]
    keeps = s.after[row + head] - moved
    whole = Int32(0)
    for start in cutlass.range(0, homes, _BATCH * warp.WARP):
        # Also the experts before the head, so that these loads need not wait for it.
        ks = [start + i * warp.WARP + lane for i in range(_BATCH)]
        after = [s.after[row + cutlass.min(k + 1, homes)] for k in ks]
        for i in cutlass.range_constexpr(_BATCH):
            if ks[i] >= head and ks[i] < homes and after[i] > keeps:
                whole += 1
    # experts head..cut-1 leave as a whole, expert ``cut`` in part or as a whole
    cut = head + warp.warp_sum(whole)
    left = keeps - s.after[row + cut + 1]
    for start in cutlass.range(head, cut + 1, warp.WARP):
        k = start + lane
        if k <= cut:
            given = s.rows[row + k]
            if k == cut:
                given -= left
            piece = pieces + Int64(receiver * homes + k - head) * 8
            ptx.store(piece, donor * homes + s.expert[row + k], "s32")
            ptx.store(piece + 4, given, "s32")
    new_head = cut + 1
    if left > 0:
        _reinsert(s, row, cut, left, homes)
        new_head = cut
    # All lanes have read the old head.
    cute.arch.sync_warp()
    if lane == 0:
        s.head[donor] = new_head
        s.received[receiver] = cut + 1 - head
        s.sent[donor] = s.sent[donor] + cut + 1 - head
    cute.arch.sync_warp()


@cute.jit
def _reinsert(s: State, row: Int32, cut: Int32, left: Int32, homes: cutlass.Constexpr[int]) -> None:
    """One warp: expert ``cut`` keeps ``left`` rows; move it to its place in the falling order."""
    lane, _ = warp.lane_and_warp()
    expert, passed = s.expert[row + cut], Int32(0)
    for start in cutlass.range(cut + 1, homes, warp.WARP):
        k = start + lane
        if k < homes:
            rows = s.rows[row + k]
            if rows > left or (rows == left and s.expert[row + k] < expert):
                passed += 1
    end = cut + warp.warp_sum(passed)
    # The experts passed move up. A step reads ahead of what it writes, and no step reads what an
    # earlier one wrote.
    for start in cutlass.range(cut, end, warp.WARP):
        k = cutlass.min(start + lane, end - 1)
        next_rows, next_expert = s.rows[row + k + 1], s.expert[row + k + 1]
        next_after = s.after[row + k + 1] + left
        cute.arch.sync_warp()
        if start + lane < end:
            s.rows[row + k] = next_rows
            s.expert[row + k] = next_expert
            s.after[row + k] = next_after
        cute.arch.sync_warp()
    # all lanes have read the old state
    cute.arch.sync_warp()
    if lane == 0:
        s.rows[row + end] = left
        s.expert[row + end] = expert
        s.after[row + end] = s.after[row + end + 1] + left
