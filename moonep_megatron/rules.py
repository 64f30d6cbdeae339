"""The planning rules: from the rows of every home expert to transfers between ranks.

Letters: R expert-parallel ranks, n home experts of a rank. Everything here is exact Python integers
on the host, and every tie goes to the lowest rank, so that all ranks reach the same answer alone.

``homes`` holds, for every rank, the routed rows of its n home experts, ``caps`` the rows that every
rank must compute, from `moonep_megatron.caps`; both sum to the same number. The *surplus* of a rank
is the sum of its homes minus its cap. No rank lacks more rows than any with a surplus holds. A
rule returns transfers (donor, receiver, rows) after which every surplus is zero, or None where it
finds none; `trees` returns several such lists. Two facts hold for every rule, and keep the foreign
experts of a rank at or below n:

- a donor gives rows of its own experts only, and
- a rank receives at most once. After that it is exactly full and never gives again.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from moonep_megatron.caps import caps as caps_of
from moonep_megatron.reuse import Held
from moonep_megatron.transfers import Loads, Piece, Transfer, cost, pieces, take
from moonep_megatron.trees import trees

EXACT_CHAIN_RANKS = 8


Rule = Callable[[Loads, Sequence[int]], list[list[Transfer]]]
"""Its candidates, the best of which counts."""


def _fill(surplus: list[int]) -> Transfer:
    """Let the largest surplus fill the roomiest rank completely, updating ``surplus`` in place.

    The donor may give beyond its surplus; it then becomes a receiver. It has the rows to do so:
    it holds at least its cap + 1, which no other rank's room exceeds.
    """
    donor = max(range(len(surplus)), key=lambda d: surplus[d])
    receiver = min(range(len(surplus)), key=lambda d: surplus[d])
    rows = -surplus[receiver]
    surplus[donor] -= rows
    surplus[receiver] = 0
    return Transfer(donor, receiver, rows)


def _surplus(homes: Loads, caps: Sequence[int]) -> list[int]:
    return [sum(home) - cap for home, cap in zip(homes, caps, strict=True)]


def pairs(homes: Loads, caps: Sequence[int]) -> list[Transfer]:
    """Largest surplus gives to the roomiest rank, until every rank is full. Always succeeds."""
    surplus = _surplus(homes, caps)
    transfers = []
    while any(surplus):
        transfers.append(_fill(surplus))
    return transfers


def chain(homes: Loads, caps: Sequence[int]) -> list[Transfer] | None:
    """Put the ranks in a row in which each ships only to the next.

    What flows out of a rank must be of its own experts, so the flow into it is at most its cap. Up
    to ``EXACT_CHAIN_RANKS`` ranks the row is the best of all (fewest experts sent by the busiest
    rank, then fewest in all); beyond, it is built greedily and may be missed. None where no row is
    found.
    """
    surplus = _surplus(homes, caps)
    search = _best_row if len(caps) <= EXACT_CHAIN_RANKS else _greedy_row
    row = search(_Flow(homes, caps, surplus))
    if row is None:
        return None
    flows = list(accumulate(surplus[d] for d in row))
    return [
        Transfer(donor, receiver, flow)
        for donor, receiver, flow in zip(row, row[1:], flows, strict=False)
        if flow
    ]


def peel(homes: Loads, caps: Sequence[int]) -> list[Transfer]:
    """Let the largest surplus fill the roomiest ranks until the others form a chain.

    A rank whose surplus exceeds every other cap fits in no chain. Always succeeds: of two ranks
    left, one gives to the other.
    """
    left = [list(home) for home in homes]
    surplus = _surplus(homes, caps)
    ranks = list(range(len(caps)))
    transfers: list[Transfer] = []
    while any(surplus):
        rest = None
        if max(surplus) <= max(caps[d] for d in ranks):
            rest = chain([left[d] for d in ranks], [caps[d] for d in ranks])
        if rest is not None:
            return transfers + [Transfer(ranks[t.donor], ranks[t.receiver], t.rows) for t in rest]
        step = _fill(surplus)
        take(left[step.donor], step.rows)
        ranks.remove(step.receiver)
        transfers.append(step)
    return transfers


def _one(rule: Callable[[Loads, Sequence[int]], list[Transfer] | None]) -> Rule:
    """A rule of at most one candidate."""

    def candidates(homes: Loads, caps: Sequence[int]) -> list[list[Transfer]]:
        found = rule(homes, caps)
        return [] if found is None else [found]

    return candidates


_RULES: dict[str, Rule] = {
    "pairs": _one(pairs),
    "chain": _one(chain),
    "peel": _one(peel),
    "trees": trees,
}

PLANNERS = ("best", *_RULES)

RULES = (*_RULES, "again")
"""All rules; a plan names its own by the place here. `Held.again` is tried with every planner."""


def solve(
    homes: Loads, caps: Sequence[int], *, planner: str, slots: int, held: Held | None = None
) -> tuple[str, list[Piece]]:
    """Run ``planner`` and return the name of the rule used with its pieces.

    Of all that its rules find it takes the lowest (waves, D, U), ties to the first: ``best`` asks
    all rules, any other planner the one it names. Where that finds nothing (only ``chain`` and
    ``trees`` can) ``pairs`` takes its place, and the name returned says so.

    With slots that hold something, duplicates that need a push come before U in the price, and the
    transfers of the plan before are one more candidate.
    """
    found = [
        (name, transfers)
        for name in (_RULES if planner == "best" else (planner,))
        for transfers in _RULES[name](homes, caps)
    ]
    if not found:
        found.append(("pairs", pairs(homes, caps)))
    again = None if held is None else held.again(homes, caps)
    if again is not None:
        found.append(("again", again))
    cut = [(name, pieces(homes, transfers)) for name, transfers in found]
    if held is not None:
        cut += [(name, held.pieces(homes, transfers)) for name, transfers in found]
    return min(cut, key=lambda one: _price(homes, one[1], slots, held))


def _price(
    homes: Loads, parts: Sequence[Piece], slots: int, held: Held | None
) -> tuple[int, int, int, int]:
    """(waves, D, duplicates to push, U)."""
    waves, busiest, everything = cost(len(homes), parts, slots)
    fresh = 0 if held is None else held.fresh(parts, len(homes[0]))
    return waves, busiest, fresh, everything


def solve_within(
    homes: Loads, *, slack: int, planner: str, slots: int, held: Held | None = None
) -> tuple[str, list[int], list[Piece]]:
    """`solve` for the caps of a slack, and what the caps are.

    With slack the exact caps are tried as well, and kept where they are cheaper: a slack never
    costs.
    """
    loads = [sum(home) for home in homes]
    found = []
    for part in dict.fromkeys((slack, 0)):
        caps = caps_of(loads, part)
        rule, parts = solve(homes, caps, planner=planner, slots=slots, held=held)
        found.append((rule, caps, parts))
    return min(found, key=lambda one: _price(homes, one[2], slots, held))


class _Flow:
    """Which rank may take a flow, and what it costs to pass on the rest."""

    def __init__(self, homes: Loads, caps: Sequence[int], surplus: Sequence[int]):
        self.caps, self.surplus = caps, surplus
        # prefix[d][k]: rows of the k largest experts of d, so the least k is a bisection away
        self.prefix = [list(accumulate(sorted(home, reverse=True), initial=0)) for home in homes]

    def experts(self, rank: int, flow: int) -> int | None:
        """Least number of own experts that ``rank`` passes on when ``flow`` rows come in."""
        out = flow + self.surplus[rank]
        if flow > self.caps[rank] or out < 0:
            return None
        return bisect_left(self.prefix[rank], out)


def _best_row(flow: _Flow) -> list[int] | None:
    """The best admissible row by a table over sets: the flow depends only on the set placed."""
    ranks = len(flow.caps)
    inflow = [0] * (1 << ranks)
    for placed in range(1, 1 << ranks):
        low = placed & -placed
        inflow[placed] = inflow[placed ^ low] + flow.surplus[low.bit_length() - 1]
    # steps[s]: the ways into set s, as (rank placed last, experts it passes on)
    steps: list[list[tuple[int, int]]] = [[] for _ in inflow]
    for placed in range(1, 1 << ranks):
        for rank in range(ranks):
            if placed >> rank & 1:
                experts = flow.experts(rank, inflow[placed ^ 1 << rank])
                if experts is not None:
                    steps[placed].append((rank, experts))
    busiest = _shortest(steps, max)[-1][0]
    if busiest is None:
        return None
    allowed = [[step for step in into if step[1] <= busiest] for into in steps]
    fewest = _shortest(allowed, int.__add__)
    row, placed = [], len(steps) - 1
    while placed:
        rank = fewest[placed][1]
        row.append(rank)
        placed ^= 1 << rank
    return row[::-1]


def _shortest(
    steps: list[list[tuple[int, int]]], join: Callable[[int, int], int]
) -> list[tuple[int | None, int]]:
    """Least joined cost of every set, with the rank placed last; cost None where unreachable."""
    best: list[tuple[int | None, int]] = [(0, -1)]
    for placed in range(1, len(steps)):
        ways = []
        for rank, experts in steps[placed]:
            before = best[placed ^ 1 << rank][0]
            if before is not None:
                ways.append((join(before, experts), rank))
        best.append(min(ways, default=(None, -1)))
    return best


def _greedy_row(flow: _Flow) -> list[int] | None:
    """Place, one by one, the rank that passes on the fewest experts; never goes back.

    Among equals a rank that absorbs comes first, the one that leaves the least flow; else the
    hottest that fits is added, for it fits only while the flow is small.
    """
    left, row, rows = list(range(len(flow.caps))), [], 0
    while left:
        ways = []
        for rank in left:
            experts = flow.experts(rank, rows)
            if experts is not None:
                surplus = flow.surplus[rank]
                preference = -surplus if surplus > 0 else rows + surplus
                ways.append((experts, surplus > 0, preference, rank))
        if not ways:
            return None
        rank = min(ways)[-1]
        rows += flow.surplus[rank]
        left.remove(rank)
        row.append(rank)
    return row
