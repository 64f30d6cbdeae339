"""How many rows every rank computes: exactly its share, or within a slack whatever is cheapest.

Letters: R expert-parallel ranks, M all routed rows. All is integer arithmetic with ties to the
lowest rank, so that every rank, and the kernel, finds the same caps.
"""

from collections.abc import Sequence

SLACK_UNIT = 10_000
"""A slack of 1 is so many parts: it comes in steps of 0.0001."""

TILE = 128
"""Rows of a tile of the grouped GEMMs."""


def slack_parts(slack: float) -> int:
    """A slack as a whole number of parts, 0..``SLACK_UNIT``.

    Raises:
        ValueError: it is outside 0..1, or no multiple of a part.
    """
    parts = round(slack * SLACK_UNIT) if 0 <= slack <= 1 else -1
    if parts < 0 or abs(parts - slack * SLACK_UNIT) > 1e-6:
        raise ValueError(f"slack {slack!r} is no number 0..1 in steps of {1 / SLACK_UNIT}")
    return parts


def most_rows(share: int, slack: int) -> int:
    """ceil((1 + slack) * share): rows that a rank may hold whose share is at most ``share``.

    Args:
        slack: parts of ``SLACK_UNIT``.
    """
    return -(-share * (SLACK_UNIT + slack) // SLACK_UNIT)


def caps(loads: Sequence[int], slack: int = 0) -> list[int]:
    """Rows that every rank computes.

    Without slack the equal shares of all rows, of which the first ranks take what does not divide.

    With slack a rank may compute up to ``high`` = floor((1 + slack) * M / R) rows, or ceil(M / R)
    where that is more. Who is above it sheds the difference; everybody else keeps its own rows and
    costs nothing. The largest surplus goes to the roomiest rank, and what does not fit there to the
    next. A rank sheds whole tiles where that leaves it a mean share and fits, so that few
    duplicates have less than a tile. Nobody ends below a mean share, ceil(M / R), that gives, and
    nobody takes more than that: a donor always has the rows that a receiver lacks, which the rules
    rely on, and there is always enough room.

    Args:
        loads: [R] rows of the home experts of every rank.
        slack: parts of ``SLACK_UNIT``.
    """
    total, ranks = sum(loads), len(loads)
    share, extra = divmod(total, ranks)
    if slack == 0:
        return [share + (d < extra) for d in range(ranks)]
    mean = share + (extra > 0)
    high = max(mean, total * (SLACK_UNIT + slack) // (SLACK_UNIT * ranks))
    found = list(loads)
    surplus = [max(load - high, 0) for load in loads]
    room = [max(min(high - load, mean), 0) for load in loads]
    while any(surplus):
        donor = max(range(ranks), key=surplus.__getitem__)
        receiver = max(range(ranks), key=room.__getitem__)
        rows = surplus[donor]
        tiles = -(-rows // TILE) * TILE
        if tiles - rows <= high - mean and tiles <= room[receiver]:
            rows = tiles
        rows = min(rows, room[receiver])
        found[donor] -= rows
        found[receiver] += rows
        surplus[donor] = max(surplus[donor] - rows, 0)
        room[receiver] -= rows
    return found
