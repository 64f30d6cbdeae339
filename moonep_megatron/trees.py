"""A planning rule for many ranks: trees in which no rank sends or receives above a limit.

Letters: R expert-parallel ranks, n home experts of a rank. As in `rules`: exact integers, a rank
receives at most once and gives rows of its own experts only. Ranks stand by falling room (rows that
a rank lacks, its negative surplus), equal ones by their number; every tie goes to the first.

The *flow* is what the present *giver* has yet to give away. A step serves one more rank:

- *pass*: the rank takes the whole flow, and gives away in turn what is then too much for it;
- *fill*: the rank takes what it has room for, and is full; the giver goes on with the rest;
- *relay*: two ranks with room are filled as one. The first takes the room of both from the giver,
  and gives the second, the roomiest that it can fill, its share of rows of its own.

Passes alone make a chain. Fills and relays let a rank that is too hot for one receiver have several
of the right size. With a *limit* L on the experts that a rank may send or receive, every step is
either allowed or not, and no step is taken back. ``KEYS`` are ways to choose among the allowed
ones; each finds trees where others do not. The search starts at a limit that no plan can be below.

A pair (limit, key) is one candidate and needs no other: the experts of every rank by falling rows,
their sums, and one look at every open rank a step.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from moonep_megatron.transfers import Loads, Transfer

LIMITS = 4


class Step(NamedTuple):
    """One way to serve one more rank, or two."""

    kind: int
    place: int
    """Of the rank, among all by falling room."""
    second: int
    """Place of the other rank of a relay, else -1."""
    size: int
    """Surplus or room that is settled: the larger, the harder it is to place later."""
    gives: bool
    """Whether the rank adds to the flow."""
    experts: int
    """Experts that must be sent because of this step: 1, 2, or 3 for any more."""


PASS, FILL, RELAY = range(3)

Key = Callable[[Step], tuple[int, ...]]


def largest(step: Step) -> tuple[int, ...]:
    """What is hardest to place goes first."""
    return (-step.size,)


def absorbing(step: Step) -> tuple[int, ...]:
    """Rows are taken in before more are added."""
    return step.gives, -step.size


def thrifty(step: Step) -> tuple[int, ...]:
    """Steps of one expert, then of two, then all others; relays only where all else fails."""
    return step.kind == RELAY, step.experts, step.gives, -step.size


def smallest(step: Step) -> tuple[int, ...]:
    """As `absorbing`, but what is easiest to place goes first, while the flow is still small."""
    return step.gives, step.size


KEYS: tuple[Key, ...] = (largest, absorbing, thrifty, smallest)


def trees(homes: Loads, caps: Sequence[int], limits: int = LIMITS) -> list[list[Transfer]]:
    """Trees of the least limit for which one is found, at most one a key; [] if there are none.

    Args:
        homes: rows of the n home experts of every rank.
        caps: rows that every rank must compute.
        limits: how many are tried, from the least possible one on.
    """
    order, ranks = by_room(homes, caps)
    for more in range(limits):
        given = ranks._replace(limit=ranks.limit + more)
        found = [tree for key in KEYS if (tree := grow(given, key)) is not None]
        if found:
            return [[Transfer(order[a], order[b], rows) for a, b, rows in tree] for tree in found]
    return []


class Ranks(NamedTuple):
    """All ranks by falling room."""

    prefix: Sequence[Sequence[int]]
    """[R][n+1] rows of the k largest experts of a rank."""
    surplus: Sequence[int]
    cap: int
    """The most rows that a rank computes."""
    limit: int

    def largest(self, place: int) -> int:
        """Rows of the largest experts that one rank may send."""
        sums = self.prefix[place]
        return sums[min(self.limit, len(sums) - 1)]


def by_room(homes: Loads, caps: Sequence[int]) -> tuple[list[int], Ranks]:
    """The ranks' order, and what is known of them, at the least possible limit."""
    surplus = [sum(home) - cap for home, cap in zip(homes, caps, strict=True)]
    order = sorted(range(len(caps)), key=surplus.__getitem__)
    prefix = [list(accumulate(sorted(homes[d], reverse=True), initial=0)) for d in order]
    surplus, cap = [surplus[d] for d in order], max(caps)
    # Some rank sends its largest experts, none more than a cap at once.
    least = max(
        max(bisect_left(sums, rows), -(-rows // cap)) if rows > 0 else 0
        for sums, rows in zip(prefix, surplus, strict=True)
    )
    return order, Ranks(prefix, surplus, cap, least)


class _Giver:
    """The rank that gives, the flow, and how many experts it may still send."""

    def __init__(self, place: int, flow: int, prefix: Sequence[int], budget: int):
        self.place, self.flow, self.prefix, self.budget = place, flow, prefix, budget

    def spare(self, rows: int, cap: int) -> int:
        """Experts that leave with ``rows`` rows; 0 where the rest of the flow could not follow."""
        sums, rest = self.prefix, self.flow - rows
        if rest <= 0:
            return 0
        experts = bisect_left(sums, rows)
        budget, last = self.budget - experts, len(sums) - 1
        # No receiver takes more than a cap of one expert.
        if budget <= 0 or rest > budget * cap:
            return 0
        # What is left of the last expert touched is among the largest left, or it is not.
        if self.flow <= sums[min(last, self.budget - 1)]:
            return experts
        return experts if rest <= sums[min(last, self.budget)] - sums[experts] else 0

    def give(self, rows: int) -> None:
        """Part with rows, largest experts first."""
        sums = self.prefix
        experts = bisect_left(sums, rows)
        left = [b - a for a, b in zip(sums[experts:], sums[experts + 1 :], strict=False)]
        left = sorted([sums[experts] - rows, *left], reverse=True)
        left += [0] * (len(sums) - 1 - len(left))
        self.prefix = list(accumulate(left, initial=0))[: len(sums)]
        self.flow -= rows
        self.budget -= experts


def grow(ranks: Ranks, key: Key) -> list[Transfer] | None:
    """Serve the ranks step by step, each the allowed one that ``key`` puts first.

    The transfers are between places.
    """
    passable = [min(ranks.largest(d), ranks.limit * ranks.cap) for d in range(len(ranks.surplus))]
    left = list(range(len(passable)))
    giver = _Giver(-1, 0, [0], ranks.limit)
    transfers: list[Transfer] = []
    while left:
        steps = _passes(ranks, passable, giver, left)
        if giver.flow and giver.budget > 1:
            steps += _fills(ranks, giver, left)
            steps += _relays(ranks, giver, left)
        if not steps:
            return None
        step = min(steps, key=lambda one: (*key(one), one))
        rows = giver.flow if step.kind == PASS else step.size
        if rows:
            transfers.append(Transfer(giver.place, step.place, rows))
        left.remove(step.place)
        if step.kind == PASS:
            flow = rows + ranks.surplus[step.place]
            giver = _Giver(step.place, flow, ranks.prefix[step.place], ranks.limit)
        else:
            giver.give(rows)
        if step.kind == RELAY:
            left.remove(step.second)
            transfers.append(Transfer(step.place, step.second, -ranks.surplus[step.second]))
    return transfers


def _passes(
    ranks: Ranks, passable: Sequence[int], giver: _Giver, left: Sequence[int]
) -> list[Step]:
    # What a rank can give away it has, so nobody is given more than a cap. The giver's own budget
    # is enough: it was looked at when the flow came in, and at every fill.
    steps = []
    for d in left:
        surplus = ranks.surplus[d]
        out = giver.flow + surplus
        if 0 <= out <= passable[d]:
            experts = min(max(bisect_left(ranks.prefix[d], out), 1), 3)
            steps.append(Step(PASS, d, -1, abs(surplus), surplus > 0, experts))
    return steps


def _fills(ranks: Ranks, giver: _Giver, left: Sequence[int]) -> list[Step]:
    steps = []
    for d in left:
        room = -ranks.surplus[d]
        if room <= 0:
            break
        experts = giver.spare(room, ranks.cap)
        if experts:
            steps.append(Step(FILL, d, -1, room, False, min(experts, 3)))
    return steps


def _relays(ranks: Ranks, giver: _Giver, left: Sequence[int]) -> list[Step]:
    """For every first rank the roomiest second one that it can fill."""
    rooms = [ranks.surplus[d] for d in left]  # ascending: minus the room
    steps = []
    for d, s in zip(left, rooms, strict=True):
        if s >= 0:
            break
        at = bisect_left(rooms, -ranks.largest(d))
        if at < len(left) and left[at] == d:
            at += 1
        if at == len(left) or rooms[at] >= 0:
            continue
        rows = -s - rooms[at]
        experts = giver.spare(rows, ranks.cap)
        if experts:
            experts += bisect_left(ranks.prefix[d], -rooms[at])
            steps.append(Step(RELAY, d, left[at], rows, False, min(experts, 3)))
    return steps
