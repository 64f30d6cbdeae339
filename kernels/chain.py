"""The rule chain on the device: ranks in a row in which each passes rows only to the next.

Two searches as in `moonep_megatron.rules`: the best row of all for at most ``EXACT_RANKS`` ranks,
beyond that a greedy one, which may find none. Both append the transfers of the row they find.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from moonep_megatron.kernels import warp
from moonep_megatron.kernels.candidate import EXACT_RANKS, EXISTS, TRANSFERS, State, append, padded

# Beyond every number of experts, and every sum of eight of them.
_NEVER = 1 << 20


@cute.jit
def _passes_on(s: State, rank: Int32, room: Int32, homes: cutlass.Constexpr[int]) -> Int32:
    """Least number of experts that a rank passes on to keep at most ``room`` of its rows."""
    row = rank * (homes + 1)
    low, high = s.head[rank], Int32(homes)
    for _ in cutlass.range_constexpr(homes.bit_length()):
        middle = (low + high) // 2
        # at low == high there is nothing to decide, and ``after`` is small enough there
        if s.after[row + middle] <= room:
            high = middle
        else:
            low = middle + 1
    return high - s.head[rank]


@cute.jit
def greedy_row(
    s: State, left: Int32, ranks: cutlass.Constexpr[int], homes: cutlass.Constexpr[int]
) -> None:
    """Warp 0: place, one by one, the rank that passes on the fewest experts.

    Among equals one that absorbs comes first, the one that leaves the least flow; else the hottest.
    """
    lane, _ = warp.lane_and_warp()
    placed, flow, before = Int32(0), Int32(0), Int32(0)
    t, more = s.scalars[TRANSFERS], Int32(1)
    while more != 0:
        rank = _next_rank(s, flow, ranks, homes)
        # All lanes have read before lane 0 writes: a reduction alone orders no memory.
        cute.arch.sync_warp()
        if rank < warp.MOST:
            if lane == 0:
                s.open[rank] = 0
                if flow > 0:
                    append(s, t, before, rank, flow)
            t += Int32(flow > 0)
            flow += s.surplus[rank]
            before = rank
            placed += 1
        if rank == warp.MOST or placed == left:
            more = Int32(0)
        cute.arch.sync_warp()
    if lane == 0:
        s.scalars[TRANSFERS] = t
        s.scalars[EXISTS] = Int32(placed == left)


@cute.jit
def _next_rank(
    s: State, flow: Int32, ranks: cutlass.Constexpr[int], homes: cutlass.Constexpr[int]
) -> Int32:
    """One warp: the rank to place next, ``warp.MOST`` where none may take the flow."""
    lane, _ = warp.lane_and_warp()
    first, second, rank = Int32(warp.MOST), Int32(warp.MOST), Int32(warp.MOST)
    for g in cutlass.range_constexpr(padded(ranks) // warp.WARP):
        d = g * warp.WARP + lane
        surplus, room = s.surplus[d], s.cap[d] - flow
        if s.open[d] != 0 and room >= 0 and flow + surplus >= 0:
            gives = Int32(surplus > 0)
            preference = flow + surplus
            if gives != 0:
                preference = Int32(0) - surplus
            rating = _passes_on(s, d, room, homes) * 2 + gives
            if rating < first or (rating == first and preference < second):
                first, second, rank = rating, preference, d
    best = warp.warp_min(first)
    if best != first:
        second = Int32(warp.MOST)
    preferred = warp.warp_min(second)
    if best != first or preferred != second:
        rank = Int32(warp.MOST)
    return warp.warp_min(rank)


@cute.jit
def exact_row(
    s: State,
    left: Int32,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All threads: the best row of at most eight ranks, by a table over the sets of ranks placed.

    The flow depends only on the set placed. The first pass finds the least possible "most experts
    that a rank passes on", the second the fewest experts in all under that bound.
    """
    _, own = warp.lane_and_warp()
    if own == 0:
        _list_open(s, ranks)
    cute.arch.sync_threads()
    _fill_ways(s, left, homes, threads)
    _shortest(s, left, Int32(_NEVER - 1), False, threads)
    everyone = (Int32(1) << left) - 1
    busiest = s.cost[everyone]
    cute.arch.sync_threads()
    if busiest < _NEVER:
        _shortest(s, left, busiest, True, threads)
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            _read_row(s, left)


@cute.jit
def _list_open(s: State, ranks: cutlass.Constexpr[int]) -> None:
    """Warp 0: the open ranks, ascending; at most eight."""
    lane, _ = warp.lane_and_warp()
    found = Int32(0)
    for g in cutlass.range_constexpr(padded(ranks) // warp.WARP):
        d = g * warp.WARP + lane
        is_open = s.open[d] != 0
        opens = warp.ballot(is_open)
        if is_open:
            s.member[found + cute.arch.popc(opens & warp.lower_lanes())] = d
        found += cute.arch.popc(opens)


@cute.jit
def _fill_ways(
    s: State,
    left: Int32,
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All threads: what every rank passes on where it enters every set last."""
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread, EXACT_RANKS << left, threads):
        placed, k = i // EXACT_RANKS, i % EXACT_RANKS
        way = Int32(_NEVER)
        if (placed >> k) & 1 != 0:
            rest = placed ^ (Int32(1) << k)
            flow = Int32(0)
            for other in cutlass.range_constexpr(EXACT_RANKS):
                if (rest >> other) & 1 != 0:
                    flow += s.surplus[s.member[other]]
            rank = s.member[k]
            room = s.cap[rank] - flow
            if room >= 0 and flow + s.surplus[rank] >= 0:
                way = _passes_on(s, rank, room, homes)
        s.ways[i] = way
    cute.arch.sync_threads()


@cute.jit
def _shortest(
    s: State,
    left: Int32,
    bound: Int32,
    add: cutlass.Constexpr[bool],
    threads: cutlass.Constexpr[int],
) -> None:
    """All threads: least sum (or maximum) of the ways to every set, none above ``bound``."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        s.cost[0] = 0
    for size in cutlass.range(1, left + 1):
        cute.arch.sync_threads()
        for placed in cutlass.range(thread, Int32(1) << left, threads):
            if cute.arch.popc(placed) == size:
                best, last = Int32(_NEVER), Int32(0)
                for k in cutlass.range_constexpr(EXACT_RANKS):
                    if (placed >> k) & 1 != 0:
                        way, before = s.ways[placed * EXACT_RANKS + k], s.cost[placed ^ (1 << k)]
                        if way <= bound and before < _NEVER:
                            joined = cutlass.max(before, way)
                            if cutlass.const_expr(add):
                                joined = before + way
                            if joined < best:
                                best, last = joined, Int32(k)
                s.cost[placed] = best
                s.last[placed] = last
    cute.arch.sync_threads()


@cute.jit
def _read_row(s: State, left: Int32) -> None:
    """One thread: the row, back to front, and its transfers. Overwrites ``cost``."""
    placed = (Int32(1) << left) - 1
    i = left
    while placed != 0:
        i -= 1
        k = s.last[placed]
        s.cost[i] = s.member[k]
        placed ^= Int32(1) << k
    t, flow, before = s.scalars[TRANSFERS], Int32(0), Int32(0)
    for i in cutlass.range(0, left):
        rank = s.cost[i]
        if flow > 0:
            append(s, t, before, rank, flow)
            t += 1
        flow += s.surplus[rank]
        before = rank
    s.scalars[TRANSFERS] = t
    s.scalars[EXISTS] = 1
