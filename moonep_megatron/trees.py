"""A planning rule for many ranks: trees in which no rank sends or receives above a limit.

Letters: R expert-parallel ranks, n home experts of a rank. As in `rules`: exact integers, every tie
to the lowest rank, a rank receives at most once and gives rows of its own experts only.

The *flow* is what the present *giver* has yet to give away. A step serves one more rank:

- *pass*: the rank takes the whole flow, and gives away in turn what is then too much for it;
- *fill*: the rank takes what it has room for, and is full; the giver goes on with the rest;
- *relay*: two ranks with room are filled as one. The first takes the room of both from the giver,
  and gives the second its share of rows of its own.

Passes alone make a chain. Fills and relays let a rank that is too hot for one receiver have several
of the right size. With a *limit* L on the experts that a rank may send or receive, every step is
either allowed or not, and no step is taken back. ``KEYS`` are ways to choose among the allowed
ones; each finds trees where others do not. The search starts at a limit that no plan can be below.

A pair (limit, key) is one candidate: it needs the experts of every rank by falling rows, their
sums, and one look at every open rank a step.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from moonep_megatron.transfers import Loads, Transfer

LIMITS = 4
"""Limits tried, from the least possible one on."""


class Step(NamedTuple):
    """One way to serve one more rank, or two."""

    kind: int
    rank: int
    second: int
    """The other rank of a relay, else -1."""
    rows: int
    """Rows that the giver gives."""
    size: int
    """Surplus or room that is settled: the larger, the harder it is to place later."""
    gives: bool
    """Whether the rank adds to the flow."""
    experts: int
    """Experts that must be sent because of this step."""


PASS, FILL, RELAY = range(3)

Key = Callable[[Step], tuple[int, ...]]


def largest(step: Step) -> tuple[int, ...]:
    """What is hardest to place goes first."""
    return -step.size, step.experts


def absorbing(step: Step) -> tuple[int, ...]:
    """Rows are taken in before more are added."""
    return step.gives, -step.size


def thrifty(step: Step) -> tuple[int, ...]:
    """Steps of one expert, then of two, then all others; relays only where all else fails."""
    return min(max(step.experts, 1), 3), step.gives, -step.size


def smallest(step: Step) -> tuple[int, ...]:
    """As `absorbing`, but what is easiest to place goes first, while the flow is still small."""
    return step.gives, step.size


KEYS: tuple[Key, ...] = (largest, absorbing, thrifty, smallest)


def trees(homes: Loads, caps: Sequence[int], most: int) -> list[list[Transfer]]:
    """Trees of the least limit for which one is found, at most one a key; [] if there are none.

    Args:
        homes: rows of the n home experts of every rank.
        caps: rows that every rank must compute.
        most: highest limit worth a try.
    """
    prefix = [list(accumulate(sorted(home, reverse=True), initial=0)) for home in homes]
    surplus = [sum(home) - cap for home, cap in zip(homes, caps, strict=True)]
    least = least_limit(prefix, surplus, caps)
    for limit in range(least, min(most, least + LIMITS - 1) + 1):
        ranks = _Ranks(prefix, surplus, caps, max(caps), limit)
        # At the highest limit there is only something to save in all.
        keys = (thrifty,) if limit == most else KEYS
        found = [tree for key in keys if (tree := _grow(ranks, key)) is not None]
        if found:
            return found
    return []


def least_limit(
    prefix: Sequence[Sequence[int]], surplus: Sequence[int], caps: Sequence[int]
) -> int:
    """The most experts that some rank must send, as its largest ones and in parts of a cap."""
    most = max(caps)
    return max(
        max(bisect_left(sums, rows), -(-rows // most)) if rows > 0 else 0
        for sums, rows in zip(prefix, surplus, strict=True)
    )


class _Ranks(NamedTuple):
    prefix: Sequence[Sequence[int]]
    """[R][n+1] rows of the k largest experts of a rank."""
    surplus: Sequence[int]
    caps: Sequence[int]
    cap: int
    """The largest of ``caps``."""
    limit: int

    def passable(self, rank: int) -> int:
        """The most rows that a rank can give away."""
        sums = self.prefix[rank]
        return min(sums[min(self.limit, len(sums) - 1)], self.limit * self.cap)


class _Giver:
    """The rank that gives, the flow, and how many experts it may still send."""

    def __init__(self, rank: int, flow: int, prefix: Sequence[int], budget: int):
        self.rank, self.flow, self.prefix, self.budget = rank, flow, prefix, budget

    def spare(self, rows: int, cap: int) -> int:
        """Experts that leave with ``rows`` rows; 0 where the rest of the flow could not follow."""
        sums, rest = self.prefix, self.flow - rows
        # One more expert at least must remain, and no receiver takes more than a cap of one.
        if rest <= 0 or rest > (self.budget - 1) * cap:
            return 0
        experts = bisect_left(sums, rows)
        budget, last = self.budget - experts, len(sums) - 1
        if budget <= 0 or rest > budget * cap:
            return 0
        # The rest of the last expert touched is among the largest left, or it is not.
        if rest <= sums[min(last, experts + budget - 1)] - rows:
            return experts
        return experts if rest <= sums[min(last, experts + budget)] - sums[experts] else 0

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


def _grow(ranks: _Ranks, key: Key) -> list[Transfer] | None:
    """Serve the ranks step by step, each the allowed one that ``key`` puts first."""
    passable = [ranks.passable(d) for d in range(len(ranks.caps))]
    # by falling room, ties to the lowest rank
    left = sorted(range(len(ranks.caps)), key=lambda d: ranks.surplus[d])
    giver = _Giver(-1, 0, [0], ranks.limit)
    transfers: list[Transfer] = []
    while left:
        steps = _passes(ranks, passable, giver, left)
        if giver.flow and giver.budget > 1:
            steps += _fills(ranks, giver, left)
            if not steps or key is not thrifty:
                steps += _relays(ranks, giver, left)
        if not steps:
            return None
        step = min(steps, key=lambda one: (*key(one), one))
        if step.rows:
            transfers.append(Transfer(giver.rank, step.rank, step.rows))
        left.remove(step.rank)
        if step.kind == PASS:
            flow = step.rows + ranks.surplus[step.rank]
            giver = _Giver(step.rank, flow, ranks.prefix[step.rank], ranks.limit)
        else:
            giver.give(step.rows)
        if step.kind == RELAY:
            left.remove(step.second)
            transfers.append(Transfer(step.rank, step.second, -ranks.surplus[step.second]))
    return transfers


def _passes(
    ranks: _Ranks, passable: Sequence[int], giver: _Giver, left: Sequence[int]
) -> list[Step]:
    # What a rank can give away it has, so nobody is given more than a cap. The giver's own budget
    # is enough: it was looked at when the flow came in, and at every fill.
    flow = giver.flow
    return [
        Step(PASS, d, -1, flow, abs(s), s > 0, bisect_left(ranks.prefix[d], flow + s))
        for d in left
        if 0 <= flow + (s := ranks.surplus[d]) <= passable[d]
    ]


def _fills(ranks: _Ranks, giver: _Giver, left: Sequence[int]) -> list[Step]:
    steps = []
    for d in left:
        room = -ranks.surplus[d]
        if room <= 0:
            break
        experts = giver.spare(room, ranks.cap)
        if experts:
            steps.append(Step(FILL, d, -1, room, room, False, experts))
    return steps


def _relays(ranks: _Ranks, giver: _Giver, left: Sequence[int]) -> list[Step]:
    """For every first rank the roomiest second one that fits."""
    rooms = [ranks.surplus[d] for d in left]  # ascending: minus the room
    most = min(giver.flow - 1, giver.prefix[min(giver.budget - 1, len(giver.prefix) - 1)])
    steps = []
    for d, s in zip(left, rooms, strict=True):
        if s >= 0:
            break
        sums = ranks.prefix[d]
        room = min(min(most, ranks.caps[d]) + s, sums[min(ranks.limit, len(sums) - 1)])
        place = bisect_left(rooms, -room)
        if place < len(left) and left[place] == d:
            place += 1
        if place == len(left) or rooms[place] >= 0:
            continue
        rows = -s - rooms[place]
        experts = giver.spare(rows, ranks.cap)
        if experts:
            passed = bisect_left(sums, -rooms[place])
            steps.append(Step(RELAY, d, left[place], rows, rows, False, experts + passed))
    return steps
