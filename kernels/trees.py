"""The rule trees on the device, as `moonep_megatron.trees`.

Letters: R ranks, n home experts of a rank.

A candidate is grown by two warps for every 32 ranks. The ranks stand by falling room, ties to the
lowest, each at its *place*, and a lane has one of them; the first half of the warps rates the
passes and fills that serve it, the second half the relays. In every step all warps agree on the
least rating and go on from there alike. A pass only says what to move. What fills or relays is
taken from the giver at once, by the first warp: the next step depends on what the giver has left.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import chain, ratings, transfers, warp
from moonep_megatron.kernels.candidate import EXISTS, FILLS, TRANSFERS, State, append, padded
from moonep_megatron.kernels.ratings import KEYS, Key, Rating

LIMITS = 4
CANDIDATES = LIMITS * KEYS
"""Candidate c has the limit number c // KEYS, from the least on, and key c % KEYS."""


class _Rank(NamedTuple):
    """What never changes of a lane's rank."""

    place: Int32
    surplus: Int32
    passable: Int32
    """The most rows that it can give away."""
    fits: Int32
    """The first place whose room it can fill."""
    one: Int32
    """Rows of its largest expert, and of the largest two."""
    two: Int32


class _Share(NamedTuple):
    """What a lane's fill or relay would take from the giver."""

    second: Int32
    """Place of the other rank of a relay, and its room."""
    room: Int32
    rows: Int32
    """Of all; 0 where there is nothing to take."""


class _Giver(NamedTuple):
    """The rank that gives; the same in all lanes."""

    flow: Int32
    """Rows that it has yet to give away."""
    budget: Int32
    """Experts that it may still send."""
    row: Int32
    """Where its experts begin in the state, and ``head``, the first that it still has."""
    head: Int32
    rows: Int32
    """Rows that it has left; those of its largest budget - 1 experts, and of budget."""
    few: Int32
    many: Int32


@cute.jit
def stand(s: State, ranks: cutlass.Constexpr[int], threads: cutlass.Constexpr[int]) -> None:
    """All threads: put the ranks in the order of falling room."""
    thread, _, _ = cute.arch.thread_idx()
    for d in cutlass.range(thread, padded(ranks) + 1, threads):
        place, rank, surplus = d, Int32(0), Int32(warp.MOST)
        if d < ranks:
            place, rank, surplus = Int32(0), d, s.surplus[d]
            for other in cutlass.range(0, ranks, unroll=8):
                theirs = s.surplus[other]
                place += Int32(theirs < surplus) | (Int32(theirs == surplus) & Int32(other < d))
        s.order[place] = rank
        s.ranked[place] = surplus
    cute.arch.sync_threads()


def warps(ranks: int) -> int:
    """Warps that grow a candidate."""
    return 2 * padded(ranks) // warp.WARP


@cute.jit
def grow(
    s: State,
    number: Int32,
    pieces: Int64,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
) -> None:
    """The first `warps`: grow candidate ``number`` step by step, and write its transfers.

    Fills and relays are already carried out for the giver, with their pieces.
    """
    thread, _, _ = cute.arch.thread_idx()
    key, relays = ratings.key_of(number % KEYS), Int32(thread >= padded(ranks))
    cap, least = _least(s, ranks, homes)
    limit = least + number // KEYS
    mine = _look_up(s, thread % padded(ranks), limit, cap, relays, ranks, homes)
    # Bits of the places that are still to be served.
    left = [Int32(ratings.ones(ranks - start)) for start in range(0, ranks, warp.WARP)]
    donor, flow, budget = Int32(0), Int32(0), limit
    row, head, rows, few, many = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    t, served, steps, more = Int32(0), Int32(0), Int32(0), Int32(1)
    share = _share(s, mine, left, relays)
    while more != 0:
        best = _pass(mine, left, flow, key, relays)
        if flow > 0 and budget > 1:
            giver = _Giver(flow, budget, row, head, rows, few, many)
            best = _give(s, mine, share, giver, cap, key, relays, best, homes)
        high, low = _agree(s, best, steps, ranks)
        steps += 1
        if low == warp.MOST:
            more = Int32(0)
        else:
            kind, place, second, experts, size = ratings.step_of(high, low, key)
            rank, left = s.order[place], _without(left, place)
            if kind == ratings.PASS:
                if thread == 0 and flow > 0:
                    append(s, t, donor, rank, flow)
                t, served = t + Int32(flow > 0), served + 1
                flow += size if experts != 0 else Int32(0) - size
                donor, row, head, budget = rank, rank * (homes + 1), Int32(0), limit
                rows, few, many = [s.held[i * padded(ranks) + place] for i in range(3)]
                share = _share(s, mine, left, relays)
            else:
                flow, rows, budget = flow - size, rows - size, budget - experts
                cut = head + experts - 1
                if thread < warp.WARP:
                    transfers.part_with(s, donor, rank, rows, head, cut, pieces, homes)
                if kind == ratings.RELAY:
                    if thread == 0:
                        append(s, t, rank, s.order[second], Int32(0) - s.ranked[second])
                    left = _without(left, second)
                    t, served = t + 1, served + 1
                share = _share(s, mine, left, relays)
                _meet(ranks)
                head = s.head[donor]
                few = rows - s.after[row + cutlass.min(head + budget - 1, homes)]
                many = rows - s.after[row + cutlass.min(head + budget, homes)]
                served += 1
            if served == ranks:
                more = Int32(0)
    _conclude(s, t, Int32(served == ranks))


@cute.jit
def _conclude(s: State, t: Int32, found: Int32) -> None:
    """One thread: so many transfers, if the candidate exists."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        s.scalars[FILLS] = t * found
        s.scalars[TRANSFERS] = t * found
        s.scalars[EXISTS] = found


@cute.jit
def _meet(ranks: cutlass.Constexpr[int]) -> None:
    """Barrier of the warps that grow."""
    cute.arch.barrier(barrier_id=1, number_of_threads=warps(ranks) * warp.WARP)


@cute.jit
def _agree(
    s: State, rating: Rating, steps: Int32, ranks: cutlass.Constexpr[int]
) -> tuple[Int32, Int32]:
    """All warps that grow: the least rating of all lanes.

    What a warp writes in one step may be read until the barrier of the next, so steps take turns.
    """
    lane, own = warp.lane_and_warp()
    high = warp.warp_min(rating[0])
    low = Int32(warp.MOST)
    if rating[0] == high:
        low = rating[1]
    low = warp.warp_min(low)
    start = (steps & 1) * (2 * warps(ranks))
    if lane == 0:
        s.rated[start + own * 2] = high
        s.rated[start + own * 2 + 1] = low
    _meet(ranks)
    words = [s.rated[start + i] for i in range(2 * warps(ranks))]
    return ratings.least_of(list(zip(words[::2], words[1::2], strict=True)))


@cute.jit
def _without(left: list[Int32], place: Int32) -> list[Int32]:
    """The bits without that of a place."""
    words = []
    for g in cutlass.range_constexpr(len(left)):
        bit = Int32(place // warp.WARP == g) << place % warp.WARP
        words.append(Int32(left[g] & (bit ^ -1)))
    return words


@cute.jit
def _least(
    s: State, ranks: cutlass.Constexpr[int], homes: cutlass.Constexpr[int]
) -> tuple[Int32, Int32]:
    """Every warp: the largest cap, and the most experts that some rank must send."""
    lane, _ = warp.lane_and_warp()
    places = [g * warp.WARP + lane for g in range(padded(ranks) // warp.WARP)]
    caps, surplus = [s.cap[d] for d in places], [s.surplus[d] for d in places]
    cap = caps[0]
    for one in caps[1:]:
        cap = cutlass.max(cap, one)
    cap = warp.warp_max(cap)
    rows = [cutlass.min(d, ranks - 1) * (homes + 1) for d in places]
    sent = chain.pass_on(s, rows, [Int32(0)] * len(rows), caps, homes)
    least = Int32(0)
    for g in cutlass.range_constexpr(len(places)):
        if surplus[g] > 0:
            parts = (surplus[g] - 1) // cap + 1
            least = cutlass.max(least, cutlass.max(sent[g], parts))
    return cap, warp.warp_max(least)


@cute.jit
def _look_up(
    s: State,
    place: Int32,
    limit: Int32,
    cap: Int32,
    relays: Int32,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
) -> _Rank:
    """What never changes of the rank at a place, and into ``held`` what it has as a giver."""
    row = s.order[place] * (homes + 1)
    tops = [limit - 1, limit, Int32(1), Int32(2)]
    after = [s.after[row + cutlass.max(cutlass.min(k, homes), 0)] for k in tops]
    rows = s.after[row]
    few, many, one, two = [rows - rest for rest in after]
    if relays == 0:
        for i, value in enumerate((rows, few, many)):
            s.held[i * padded(ranks) + place] = value
    passable = many
    if Int64(limit) * Int64(cap) < Int64(many):
        passable = limit * cap
    low, high = Int32(0), Int32(ranks)
    for _ in cutlass.range_constexpr(ranks.bit_length()):
        middle = (low + high) // 2
        # behind the last rank stands one without room, so low == high stays
        if s.ranked[middle] >= Int32(0) - many:
            high = middle
        else:
            low = middle + 1
    _meet(ranks)
    return _Rank(place, s.ranked[place], passable, high, one, two)


@cute.jit
def _is_left(left: list[Int32], place: Int32) -> Int32:
    """Whether a place is still to be served."""
    word = left[0]
    for g in cutlass.range_constexpr(1, len(left)):
        if place // warp.WARP == g:
            word = left[g]
    return word >> place % warp.WARP & 1


@cute.jit
def _pass(mine: _Rank, left: list[Int32], flow: Int32, key: Key, relays: Int32) -> Rating:
    """How a lane's rank would pass."""
    out = flow + mine.surplus
    gives = Int32(mine.surplus > 0)
    grade = key.by_gives * gives
    grade += key.by_experts * 2 * (Int32(out > mine.one) + Int32(out > mine.two))
    size = cutlass.max(mine.surplus, Int32(0) - mine.surplus)
    rating = ratings.rate(grade, size, key, Int32(ratings.PASS), mine.place, Int32(0), gives)
    allowed = _is_left(left, mine.place) & Int32(relays == 0)
    allowed = allowed & Int32(out >= 0) & Int32(out <= mine.passable)
    return ratings.better((Int32(warp.MOST), Int32(warp.MOST)), rating, allowed)


@cute.jit
def _share(s: State, mine: _Rank, left: list[Int32], relays: Int32) -> _Share:
    """The rows of a lane's fill or relay, which do not depend on the giver."""
    room, other, second = Int32(0) - mine.surplus, Int32(0), Int32(0)
    rows = room
    if relays != 0:
        second = _first_left(left, mine.fits, mine.place)
        other = Int32(0) - s.ranked[second]
        rows = room + other
        if other <= 0:
            rows = Int32(0)
    if room <= 0 or _is_left(left, mine.place) == 0:
        rows = Int32(0)
    return _Share(second, other, rows)


@cute.jit
def _give(
    s: State,
    mine: _Rank,
    share: _Share,
    giver: _Giver,
    cap: Int32,
    key: Key,
    relays: Int32,
    best: Rating,
    homes: cutlass.Constexpr[int],
) -> Rating:
    """A lane's fill or relay where it is better than ``best``."""
    experts = _spare(s, giver, share.rows, cap, homes)
    grade = 2 * (Int32(experts > 1) + Int32(experts > 2))
    kind = Int32(ratings.FILL)
    if relays != 0:
        # Beyond all others, and the last where more than two experts move.
        kind, grade = Int32(ratings.RELAY), Int32(6)
        if experts > 1 or share.room > mine.one:
            grade = Int32(7)
    grade *= key.by_experts
    rating = ratings.rate(grade, share.rows, key, kind, mine.place, share.second, experts)
    return ratings.better(best, rating, Int32(experts > 0))


@cute.jit
def _first_left(left: list[Int32], start: Int32, place: Int32) -> Int32:
    """First place from ``start`` on that is still to be served and not ``place``, or 32 G."""
    found = Int32(len(left) * warp.WARP)
    others = _without(left, place)
    for i in cutlass.range_constexpr(len(left)):
        g = len(left) - 1 - i
        bits = others[g] & (Int32(-1) << cutlass.min(cutlass.max(start - g * warp.WARP, 0), 31))
        if start >= (g + 1) * warp.WARP:
            bits = Int32(0)
        if bits != 0:
            found = g * warp.WARP + warp.lowest(bits)
    return found


@cute.jit
def _spare(
    s: State, giver: _Giver, given: Int32, cap: Int32, homes: cutlass.Constexpr[int]
) -> Int32:
    """Experts that leave with so many rows; 0 where the rest of the flow could not follow."""
    (experts,) = chain.pass_on(s, [giver.row], [giver.head], [giver.rows - given], homes)
    rest, budget = giver.flow - given, giver.budget - experts
    # What is left of the last expert touched is among the largest left, or it is not.
    most = rest
    if giver.flow > giver.few:
        kept = s.after[giver.row + cutlass.min(giver.head + experts, homes)]
        most = giver.many - (giver.rows - kept)
    # No receiver takes more than a cap of one expert.
    follows = Int32(Int64(budget) * Int64(cap) >= Int64(rest))
    return experts * (Int32(rest > 0) & Int32(budget > 0) & Int32(rest <= most) & follows)
