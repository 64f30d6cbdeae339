"""Lower bounds on the duplicates of any plan, exact or within a slack. For tests and scripts only.

Letters: R expert-parallel ranks, n home experts of a rank, E = R*n. A *duplicate* is a pair (rank,
foreign expert with rows there). D is the most duplicates that a rank sends or receives, U is all.
The bounds hold for every way to balance, with any number of donors for a receiver.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from moonep_megatron.caps import SLACK_UNIT, caps

COMPONENT_RANKS = 16
"""The component bound looks at every set of ranks: up to so many."""


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of one layer."""

    received: tuple[int, ...]
    """[R] duplicates that each rank must receive."""
    sent: tuple[int, ...]
    """[R] duplicates of its experts that each rank must send."""
    component: int
    """Duplicates that are needed to join the ranks; 0 where there are too many ranks to say."""

    @property
    def duplicates(self) -> int:
        """At least so many duplicates in all."""
        return max(self.component, sum(self.received), sum(self.sent))

    @property
    def busiest(self) -> int:
        """Some rank sends or receives at least so many."""
        return max(*self.received, *self.sent)


def bounds(total_E: Sequence[int], ranks: int, slack: int = 0) -> Bounds:
    """Bounds of one layer.

    With slack a rank sheds only what is above the most that it may hold, and must hold only what
    all others at their most leave over; the ranks need not be joined.

    Args:
        total_E: rows of every expert, home by home.
        ranks: R, a divisor of E.
        slack: as of `moonep_megatron.caps.caps`.

    Raises:
        ValueError: E is no multiple of ``ranks``.
    """
    if ranks < 1 or len(total_E) % ranks:
        raise ValueError(f"{len(total_E)} experts on {ranks} ranks: not the same number on each")
    total_E = [int(rows) for rows in total_E]
    homes = len(total_E) // ranks
    own = [total_E[d * homes : (d + 1) * homes] for d in range(ranks)]
    loads, total = [sum(home) for home in own], sum(total_E)
    most = caps(loads)
    least = most
    if slack:
        high = max(*most, total * (SLACK_UNIT + slack) // (SLACK_UNIT * ranks))
        most, least = [high] * ranks, [max(total - (ranks - 1) * high, 0)] * ranks
    above = [load - cap for load, cap in zip(loads, most, strict=True)]
    below = [load - cap for load, cap in zip(loads, least, strict=True)]
    joined = ranks <= COMPONENT_RANKS and not slack
    return Bounds(
        received=receiver_bound(total_E, below),
        sent=sender_bound(own, above, max(most)),
        component=component_bound(above) if joined else 0,
    )


def receiver_bound(total_E: Sequence[int], surplus: Sequence[int]) -> tuple[int, ...]:
    """[R] least number of foreign experts, largest first, that fill each rank."""
    ranks = len(surplus)
    homes = len(total_E) // ranks
    order = sorted(range(len(total_E)), key=lambda e: -total_E[e])
    return tuple(
        _fewest([total_E[e] for e in order if e // homes != d], -surplus[d]) for d in range(ranks)
    )


def sender_bound(own: Sequence[Sequence[int]], surplus: Sequence[int], cap: int) -> tuple[int, ...]:
    """[R] least number of parts, none above ``cap`` rows, in which each rank's surplus leaves."""
    least = []
    for home, rows in zip(own, surplus, strict=True):
        # An expert of 2.5 caps leaves in three parts at least.
        parts = [min(cap, total - start) for total in home for start in range(0, total, cap or 1)]
        least.append(_fewest(sorted(parts, reverse=True), rows))
    return tuple(least)


def component_bound(surplus: Sequence[int]) -> int:
    """R minus the most parts into which the ranks fall such that each part is balanced in itself.

    m ranks that are joined need m - 1 duplicates at least, and parts that are not joined exchange
    no rows. The most parts is the most balanced sets in a row of sets, each of one rank more.
    """
    ranks = len(surplus)
    # The sum and the size of every set, a set being the bits of its number.
    total, size = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for rows in surplus:
        total = np.concatenate([total, total + rows])
        size = np.concatenate([size, size + 1])
    parts = np.zeros_like(total)
    for members in range(1, ranks + 1):
        sets = np.flatnonzero(size == members)
        for d in range(ranks):
            with_d = sets[sets >> d & 1 == 1]
            parts[with_d] = np.maximum(parts[with_d], parts[with_d ^ (1 << d)])
        parts[sets] += total[sets] == 0
    return ranks - int(parts[-1])


def _fewest(sizes: Sequence[int], rows: int) -> int:
    """How many of the sizes, falling, are needed for ``rows`` rows."""
    return bisect_left(list(accumulate(sizes)), rows) + 1 if rows > 0 else 0
