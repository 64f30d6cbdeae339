"""The rule trees on the device, a candidate a warp, as `moonep_megatron.trees`.

Letters: R ranks, n home experts of a rank.

The ranks stand by falling room, ties to the lowest, each at its *place*; a lane has those at places
lane, lane + 32 and so on. In every step each lane rates the steps that serve its ranks, and the
warp takes the least rating. What passes on must wait; what fills or relays is taken from the giver
at once, because the next step depends on what the giver has left.

A rating is two words of at most 31 bits, compared one after the other, which also say which step it
is: from the top *grade* (3 bits), *preference* (31), kind (2), place (7), second place (7) and
experts (11: those that the giver parts with, or whether a passing rank adds to the flow).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import chain, transfers, warp
from moonep_megatron.kernels.candidate import EXISTS, FILLS, TRANSFERS, State, append, padded

LIMITS = KEYS = 4
CANDIDATES = LIMITS * KEYS
"""Candidate c has the limit number c // KEYS, from the least on, and key c % KEYS."""

_LARGEST, _ABSORBING, _THRIFTY, _SMALLEST = range(KEYS)
_PASS, _FILL, _RELAY = range(3)

Rating = tuple[Int32, Int32]


class _Key(NamedTuple):
    """How this warp rates: each field is 0 or 1, but the last two."""

    by_gives: Int32
    by_experts: Int32
    base: Int32
    """The preference of a size is base + sign * size."""
    sign: Int32


class _Ranks(NamedTuple):
    """A lane's ranks, an entry for each 32 places."""

    surplus: list[Int32]
    passable: list[Int32]
    """The most rows that a rank can give away."""
    fits: list[Int32]
    """The first place whose room a rank can fill."""
    one: list[Int32]
    """Rows of the largest expert, and of the largest two."""
    two: list[Int32]


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


@cute.jit
def grow(
    s: State,
    number: Int32,
    pieces: Int64,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
) -> None:
    """One warp: grow candidate ``number`` step by step, and write its transfers.

    Fills and relays are already carried out for the giver, with their pieces.
    """
    lane, _ = warp.lane_and_warp()
    cap, least = _least(s, ranks, homes)
    limit = least + number // KEYS
    key = _key_of(number % KEYS)
    mine = _look_up(s, limit, cap, ranks, homes)
    # Bits of the places that are still to be served.
    left = [Int32(_ones(ranks - start)) for start in range(0, ranks, warp.WARP)]
    donor, flow, budget = Int32(0), Int32(0), limit
    row, head, rows, few, many = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    t, served, more = Int32(0), Int32(0), Int32(1)
    while more != 0:
        best = _passes(mine, left, flow, key)
        if flow > 0 and budget > 1:
            giver = _Giver(flow, budget, row, head, rows, few, many)
            best = _shares(s, mine, left, giver, cap, key, best, homes)
        high, low = _least_rating(best)
        if low == warp.MOST:
            more = Int32(0)
        else:
            kind, place, second, experts, size = _step(high, low, key)
            rank = s.order[place]
            left = _without(left, place)
            if kind == _PASS:
                if lane == 0 and flow > 0:
                    append(s, t, donor, rank, flow)
                t += Int32(flow > 0)
                flow += size if experts != 0 else Int32(0) - size
                donor, row, head, budget = rank, rank * (homes + 1), Int32(0), limit
                rows, few, many = [s.held[i * padded(ranks) + place] for i in range(3)]
            else:
                flow, rows, budget = flow - size, rows - size, budget - experts
                head = transfers.part_with(
                    s, donor, rank, rows, head, head + experts - 1, pieces, homes
                )
                few = rows - s.after[row + cutlass.min(head + budget - 1, homes)]
                many = rows - s.after[row + cutlass.min(head + budget, homes)]
            if kind == _RELAY:
                if lane == 0:
                    append(s, t, rank, s.order[second], Int32(0) - s.ranked[second])
                left = _without(left, second)
                t += 1
                served += 1
            served += 1
            if served == ranks:
                more = Int32(0)
    if lane == 0:
        found = Int32(served == ranks)
        s.scalars[FILLS] = t * found
        s.scalars[TRANSFERS] = t * found
        s.scalars[EXISTS] = found


@cute.jit
def _without(left: list[Int32], place: Int32) -> list[Int32]:
    """The bits without that of a place."""
    words = []
    for g in cutlass.range_constexpr(len(left)):
        bit = Int32(place // warp.WARP == g) << place % warp.WARP
        words.append(Int32(left[g] ^ bit))
    return words


def _ones(bits: int) -> int:
    """A signed word with the lowest bits set, at most 32."""
    return -1 if bits >= 32 else (1 << bits) - 1


@cute.jit
def _key_of(number: Int32) -> _Key:
    base, sign = Int32(warp.MOST), Int32(-1)
    if number == _SMALLEST:
        base, sign = Int32(0), Int32(1)
    return _Key(Int32(number != _LARGEST), Int32(number == _THRIFTY), base, sign)


@cute.jit
def _least(
    s: State, ranks: cutlass.Constexpr[int], homes: cutlass.Constexpr[int]
) -> tuple[Int32, Int32]:
    """One warp: the largest cap, and the most experts that some rank must send."""
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
    limit: Int32,
    cap: Int32,
    ranks: cutlass.Constexpr[int],
    homes: cutlass.Constexpr[int],
) -> _Ranks:
    """One warp: what never changes of its ranks, and into ``held`` what they have as givers."""
    lane, _ = warp.lane_and_warp()
    found = _Ranks([], [], [], [], [])
    for g in cutlass.range_constexpr(padded(ranks) // warp.WARP):
        place = g * warp.WARP + lane
        row = s.order[place] * (homes + 1)
        tops = [limit - 1, limit, Int32(1), Int32(2)]
        after = [s.after[row + cutlass.max(cutlass.min(k, homes), 0)] for k in tops]
        rows = s.after[row]
        few, many, one, two = (rows - rest for rest in after)
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
        values = (s.ranked[place], passable, high, one, two)
        for values_of, value in zip(found, values, strict=True):
            values_of.append(value)
    cute.arch.sync_warp()
    return found


@cute.jit
def _passes(ranks: _Ranks, left: list[Int32], flow: Int32, key: _Key) -> Rating:
    """A lane's best pass."""
    lane, _ = warp.lane_and_warp()
    best = (Int32(warp.MOST), Int32(warp.MOST))
    for g in cutlass.range_constexpr(len(left)):
        surplus = ranks.surplus[g]
        out = flow + surplus
        gives = Int32(surplus > 0)
        grade = key.by_gives * gives + key.by_experts * 2 * (
            Int32(out > ranks.one[g]) + Int32(out > ranks.two[g])
        )
        size = cutlass.max(surplus, Int32(0) - surplus)
        place = g * warp.WARP + lane
        rating = _rating(grade, size, key, _PASS, place, Int32(0), gives)
        allowed = left[g] >> lane & 1 & Int32(out >= 0) & Int32(out <= ranks.passable[g])
        best = _better(best, rating, allowed)
    return best


@cute.jit
def _shares(
    s: State,
    ranks: _Ranks,
    left: list[Int32],
    giver: _Giver,
    cap: Int32,
    key: _Key,
    best: Rating,
    homes: cutlass.Constexpr[int],
) -> Rating:
    """A lane's best fill or relay where it is better than ``best``."""
    lane, _ = warp.lane_and_warp()
    groups = range(len(left))
    places = [g * warp.WARP + lane for g in groups]
    rooms = [Int32(0) - surplus for surplus in ranks.surplus]
    seconds = [_first_left(left, ranks.fits[g], g) for g in groups]
    others = [Int32(0) - s.ranked[second] for second in seconds]
    given = rooms + [room + other for room, other in zip(rooms, others, strict=True)]
    experts = _spare(s, giver, given, cap, homes)
    for g in cutlass.range_constexpr(len(left)):
        open_ = left[g] >> lane & 1 & Int32(rooms[g] > 0)
        alone, both = experts[g], experts[len(left) + g]
        grade = key.by_experts * 2 * (Int32(alone > 1) + Int32(alone > 2))
        rating = _rating(grade, rooms[g], key, _FILL, places[g], Int32(0), alone)
        best = _better(best, rating, open_ & Int32(alone > 0))
        # Grades of relays are beyond all others where experts count.
        grade = key.by_experts * (6 + (Int32(both > 1) | Int32(others[g] > ranks.one[g])))
        rating = _rating(grade, given[len(left) + g], key, _RELAY, places[g], seconds[g], both)
        best = _better(best, rating, open_ & Int32(others[g] > 0) & Int32(both > 0))
    return best


@cute.jit
def _first_left(left: list[Int32], start: Int32, group: cutlass.Constexpr[int]) -> Int32:
    """First place from ``start`` on that is still to be served and not this lane's, or 32 G."""
    lane, _ = warp.lane_and_warp()
    found = Int32(len(left) * warp.WARP)
    for i in cutlass.range_constexpr(len(left)):
        g = len(left) - 1 - i
        bits = left[g] & (Int32(-1) << cutlass.min(cutlass.max(start - g * warp.WARP, 0), 31))
        if start >= (g + 1) * warp.WARP:
            bits = Int32(0)
        if cutlass.const_expr(g == group):
            bits &= (Int32(1) << lane) ^ -1
        if bits != 0:
            found = g * warp.WARP + warp.lowest(bits)
    return found


@cute.jit
def _spare(
    s: State, giver: _Giver, given: list[Int32], cap: Int32, homes: cutlass.Constexpr[int]
) -> list[Int32]:
    """Experts that leave with so many rows; 0 where the rest of the flow could not follow."""
    keeps = [giver.rows - rows for rows in given]
    same = [giver.row] * len(given), [giver.head] * len(given)
    experts = chain.pass_on(s, *same, keeps, homes)
    # What is left of the last expert touched is among the largest left, or it is not.
    most = [Int32(warp.MOST)] * len(given)
    if giver.flow > giver.few:
        for i in cutlass.range_constexpr(len(given)):
            k = cutlass.min(giver.head + experts[i], homes)
            most[i] = giver.many - (giver.rows - s.after[giver.row + k])
    spared = []
    for i in cutlass.range_constexpr(len(given)):
        rest, budget = giver.flow - given[i], giver.budget - experts[i]
        # No receiver takes more than a cap of one expert.
        follows = Int32(Int64(budget) * Int64(cap) >= Int64(rest))
        spared.append(
            experts[i] * (Int32(rest > 0) & Int32(budget > 0) & Int32(rest <= most[i]) & follows)
        )
    return spared


@cute.jit
def _rating(
    grade: Int32,
    size: Int32,
    key: _Key,
    kind: cutlass.Constexpr[int],
    place: Int32,
    second: Int32,
    experts: Int32,
) -> Rating:
    preference = key.base + key.sign * size
    high = grade << 28 | preference >> 3
    low = (preference & 7) << 27 | kind << 25 | place << 18 | second << 11 | experts
    return high, low


@cute.jit
def _step(high: Int32, low: Int32, key: _Key) -> tuple[Int32, Int32, Int32, Int32, Int32]:
    """Kind, place, second place, experts and size of a rated step."""
    preference = (high & _ones(28)) << 3 | low >> 27
    size = (preference - key.base) * key.sign
    return low >> 25 & 3, low >> 18 & 127, low >> 11 & 127, low & 2047, size


@cute.jit
def _better(best: Rating, rating: Rating, allowed: Int32) -> Rating:
    """The lesser rating, if the second is allowed."""
    less = Int32(rating[0] < best[0]) | (Int32(rating[0] == best[0]) & Int32(rating[1] < best[1]))
    high, low = best
    if less & allowed != 0:
        high, low = rating
    return high, low


@cute.jit
def _least_rating(rating: Rating) -> Rating:
    """One warp: the least of all lanes."""
    high = warp.warp_min(rating[0])
    low = Int32(warp.MOST)
    if rating[0] == high:
        low = rating[1]
    return high, warp.warp_min(low)
