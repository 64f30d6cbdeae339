"""What a planning rule returns, the experts that move with it, and what it costs.

Letters: R expert-parallel ranks, n home experts of a rank.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """``rows`` rows of the donor's own experts move to the receiver."""

    donor: int
    receiver: int
    rows: int


class Piece(NamedTuple):
    """``rows`` rows of the donor's home expert number ``expert`` (0..n-1) move to ``rank``."""

    rank: int
    donor: int
    expert: int
    rows: int


Loads = Sequence[Sequence[int]]


def take(home: list[int], rows: int) -> list[tuple[int, int]]:
    """Remove ``rows`` rows from ``home`` in place, largest remaining expert first (ties: lowest).

    Returns (expert, rows) for every expert touched. Largest first touches the fewest experts.
    """
    taken = []
    for expert in sorted(range(len(home)), key=lambda e: -home[e]):
        if rows == 0:
            break
        part = min(home[expert], rows)
        home[expert] -= part
        rows -= part
        taken.append((expert, part))
    return taken


def pieces(homes: Loads, transfers: Sequence[Transfer]) -> list[Piece]:
    """Say which experts the rows of each transfer belong to; transfers are served in order."""
    left = [list(home) for home in homes]
    return [
        Piece(receiver, donor, expert, part)
        for donor, receiver, rows in transfers
        for expert, part in take(left[donor], rows)
    ]


def cost(ranks: int, parts: Sequence[Piece], slots: int) -> tuple[int, int, int]:
    """(waves, D, U): rounds of ``slots`` duplicates, most that a rank sends or receives, all."""
    sent, received = [0] * ranks, [0] * ranks
    for part in parts:
        sent[part.donor] += 1
        received[part.rank] += 1
    return -(-max(received) // slots), max(*sent, *received), len(parts)
