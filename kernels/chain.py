"""The rule chain on the device: ranks in a row in which each passes rows only to the next.

Two searches as in `moonep_megatron.rules`: the best row of all for at most ``EXACT_RANKS`` ranks,
beyond that a greedy one, which may find none. Both append the transfers of the row they find.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute
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
    groups = range(padded(ranks) // warp.WARP)
    # A lane keeps its ranks' state in registers: only ``after`` is read step by step.
    mine = [g * warp.WARP + lane for g in groups]
    surplus, cap = [s.surplus[d] for d in mine], [s.cap[d] for d in mine]
    head, is_open = [s.head[d] for d in mine], [s.open[d] for d in mine]
    rows = [cutlass.min(d, ranks - 1) * (homes + 1) for d in mine]
    placed, flow, before = Int32(0), Int32(0), Int32(0)
    t, more = s.scalars[TRANSFERS], Int32(1)
    # All lanes have read before lane 0 writes: a vote alone orders no memory.
    cute.arch.sync_warp()
    while more != 0:
        passed = pass_on(s, rows, head, [c - flow for c in cap], homes)
        ratings = []
        for g in cutlass.range_constexpr(len(groups)):
            rating = passed[g] * 2 + Int32(surplus[g] > 0)
            if is_open[g] == 0 or cap[g] < flow or flow + surplus[g] < 0:
                rating = Int32(warp.MOST)
            ratings.append(rating)
        best, preferred, rank = _best(surplus, ratings, flow)
        if best < warp.MOST:
            if lane == 0 and flow > 0:
                append(s, t, before, rank, flow)
            t += Int32(flow > 0)
            # flow + surplus, without a look at whose it is
            flow = flow - preferred if best & 1 != 0 else preferred
            for g in cutlass.range_constexpr(len(groups)):
                if mine[g] == rank:
                    is_open[g] = Int32(0)
            before = rank
            placed += 1
        if best == warp.MOST or placed == left:
            more = Int32(0)
    if lane == 0:
        s.scalars[TRANSFERS] = t
        s.scalars[EXISTS] = Int32(placed == left)


def _probes(homes: int) -> list[tuple[int, int]]:
    """Levels of a search among ``homes + 1`` answers: places to look at, and the step between."""
    steps = [1]
    while steps[0] * 8 <= homes + 1:
        steps.insert(0, steps[0] * 4)
    return [(-(-(homes + 1) // steps[0]) - 1, steps[0]), *((3, step) for step in steps[1:])]


@cute.jit
def pass_on(
    s: State,
    rows: list[Int32],
    heads: list[Int32],
    rooms: list[Int32],
    homes: cutlass.Constexpr[int],
) -> list[Int32]:
    """`_passes_on` of several ranks at once, four ways a step; ``rows`` is where each begins.

    Without room the answer means nothing.
    """
    low = heads
    for count, step in _probes(homes):
        after = [
            [s.after[row + cutlass.min(k + (m + 1) * step - 1, homes)] for m in range(count)]
            for row, k in zip(rows, low, strict=True)
        ]
        low = [
            k + step * _number([value > room for value in values])
            for k, room, values in zip(low, rooms, after, strict=True)
        ]
    return [k - head for k, head in zip(low, heads, strict=True)]


def _number(flags: list[Boolean]) -> Int32:
    """How many hold."""
    total = Int32(0)
    for flag in flags:
        total = total + Int32(flag)
    return total


@cute.jit
def _best(surplus: list[Int32], ratings: list[Int32], flow: Int32) -> tuple[Int32, Int32, Int32]:
    """One warp: the least rating, what it is preferred for among equals, and the lowest such rank.

    Of ranks that give rows, the preference is minus their surplus; of others, the flow they leave.
    """
    least = ratings[0]
    for rating in ratings[1:]:
        least = cutlass.min(least, rating)
    best = warp.warp_min(least)
    preferences = []
    preferred = Int32(warp.MOST)
    for g in cutlass.range_constexpr(len(ratings)):
        preference = Int32(warp.MOST)
        if ratings[g] == best:
            preference = flow + surplus[g]
            if best & 1 != 0:
                preference = Int32(0) - surplus[g]
        preferences.append(preference)
        preferred = cutlass.min(preferred, preference)
    preferred = warp.warp_min(preferred)
    chosen = [
        Int32(rating == best) & Int32(preference == preferred)
        for rating, preference in zip(ratings, preferences, strict=True)
    ]
    return best, preferred, warp.lowest_rank(chosen)


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
    if lane < EXACT_RANKS:
        s.member[lane] = 0
        s.excess[lane] = 0
    cute.arch.sync_warp()
    found = Int32(0)
    for g in cutlass.range_constexpr(padded(ranks) // warp.WARP):
        d = g * warp.WARP + lane
        is_open = s.open[d] != 0
        opens = warp.ballot(is_open)
        if is_open:
            place = found + cute.arch.popc(opens & warp.lower_lanes())
            s.member[place] = d
            s.excess[place] = s.surplus[d]
        found += cute.arch.popc(opens)


@cute.jit
def _fill_ways(
    s: State,
    left: Int32,
    homes: cutlass.Constexpr[int],
    threads: cutlass.Constexpr[int],
) -> None:
    """All threads: what every rank passes on where it enters every set last; at least one rank.

    A thread takes a rank and a set without it, and so two entries: this set has no way.
    """
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread, EXACT_RANKS << (left - 1), threads):
        number, k = i // EXACT_RANKS, i % EXACT_RANKS
        way = Int32(_NEVER)
        rest, placed = number, number | (Int32(1) << (left - 1))
        if k < left:
            # The set's bits from k on make room for k.
            rest = number + (number >> k << k)
            placed = rest | (Int32(1) << k)
            flow = Int32(0)
            excess = [s.excess[other] for other in range(EXACT_RANKS)]
            for other in cutlass.range_constexpr(EXACT_RANKS):
                flow += excess[other] * ((rest >> other) & 1)
            rank = s.member[k]
            room = s.cap[rank] - flow
            if room >= 0 and flow + s.excess[k] >= 0:
                way = _passes_on(s, rank, room, homes)
        s.ways[rest * EXACT_RANKS + k] = Int32(_NEVER)
        s.ways[placed * EXACT_RANKS + k] = way
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
                # All loads at once and no branches; who is not in the set has no way into it.
                ways = [s.ways[placed * EXACT_RANKS + k] for k in range(EXACT_RANKS)]
                before = [s.cost[placed & ~(1 << k)] for k in range(EXACT_RANKS)]
                for k in cutlass.range_constexpr(EXACT_RANKS):
                    joined = cutlass.max(before[k], ways[k])
                    if cutlass.const_expr(add):
                        joined = before[k] + ways[k]
                    if cutlass.max(ways[k] - bound, before[k] - (_NEVER - 1)) > 0:
                        joined = Int32(_NEVER)
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
