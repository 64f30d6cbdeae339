"""Planning with what the slots still hold: fewer copies of weights for the same balance.

While the weights have not changed, a duplicate that a slot of the same layer still holds need not
be pushed again. A plan may prefer such duplicates, but whether one is pushed is decided by the tag
of its slot alone (see `moonep_megatron.slots`), never by this preference.

Letters: R expert-parallel ranks, n home experts of a rank, B slots of a rank. Exact integers with
ties to the lowest, so that all ranks plan the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonep_megatron.transfers import Loads, Piece, Transfer


@dataclass(frozen=True)
class Held:
    """What the slots of one layer hold when a microbatch is planned; the same on all ranks."""

    experts: Sequence[Sequence[int]]
    """[R][B] expert whose present weights each slot holds, -1 for none."""
    pairs: Sequence[tuple[int, int]] = ()
    """(donor, receiver) of the plan before, if the weights have not changed since."""

    def fresh(self, parts: Sequence[Piece], homes: int) -> int:
        """How many of the pieces need a push."""
        return sum(p.donor * homes + p.expert not in self.experts[p.rank] for p in parts)

    def pieces(self, homes: Loads, transfers: Sequence[Transfer]) -> list[Piece]:
        """As `moonep_megatron.transfers.pieces`, but of as few experts those that are held."""
        count, left = len(homes[0]), [list(home) for home in homes]
        found = []
        for donor, receiver, moved in transfers:
            first, rows = donor * count, moved
            held = {e - first for e in self.experts[receiver] if first <= e < first + count}
            chosen = _fewest(left[donor], rows, held)
            for expert in sorted(chosen, key=lambda e: (-left[donor][e], e)):
                part = min(left[donor][expert], rows)
                left[donor][expert] -= part
                rows -= part
                found.append(Piece(receiver, donor, expert, part))
        return found

    def again(self, homes: Loads, caps: Sequence[int]) -> list[Transfer] | None:
        """The plan before with other numbers of rows; None where its pairs cannot carry these.

        Every rank received from one donor at most, so the pairs are trees, in which the rows that
        must flow over a pair are those that the ranks behind it lack.
        """
        receivers: list[list[int]] = [[] for _ in caps]
        for donor, receiver in self.pairs:
            receivers[donor].append(receiver)
        flows: dict[tuple[int, int], int] = {}

        def lacking(rank: int) -> int:
            rows = caps[rank] - sum(homes[rank])
            for receiver in receivers[rank]:
                flows[rank, receiver] = lacking(receiver)
                rows += flows[rank, receiver]
            return rows

        served = {receiver for _, receiver in self.pairs}
        if any(lacking(rank) for rank in range(len(caps)) if rank not in served):
            return None
        if len(flows) < len(self.pairs):  # a ring, which no rule makes
            return None
        # What comes in must stay there, because a rank passes on rows of its own experts only.
        if any(not 0 <= rows <= caps[receiver] for (_, receiver), rows in flows.items()):
            return None
        return [Transfer(*pair, rows) for pair, rows in flows.items() if rows]

    def placed(self, rank: int, foreign: Sequence[int]) -> list[int]:
        """[n] the foreign experts of a rank in the order of their slots, -1 where there is none.

        Those held stay where they are; the others take slots that hold nothing of use, then the
        first ones. With more foreign experts than slots every slot changes, and nothing is moved.

        Args:
            foreign: [n] ascending, then -1.
        """
        here = self.experts[rank]
        wanted = [e for e in foreign if e >= 0]
        if len(wanted) > len(here):
            return list(foreign)
        found = [-1] * len(foreign)
        for slot, expert in enumerate(here):
            if expert in wanted:
                wanted.remove(expert)
                found[slot] = expert
        free = [slot for slot in range(len(here)) if found[slot] < 0]
        for slot, expert in zip(sorted(free, key=lambda s: here[s] >= 0), wanted, strict=False):
            found[slot] = expert
        return found


def _fewest(home: Sequence[int], rows: int, held: set[int]) -> list[int]:
    """As few experts as cover the rows, and of those as many held ones as possible."""
    order = sorted(range(len(home)), key=lambda e: -home[e])
    count = total = 0
    while total < rows:
        total += home[order[count]]
        count += 1
    kept = [e for e in order if e in held]
    others = [e for e in order if e not in held]
    for most in range(min(count, len(kept)), 0, -1):
        chosen = kept[:most] + others[: count - most]
        if sum(home[e] for e in chosen) >= rows:
            return chosen
    return order[:count]
