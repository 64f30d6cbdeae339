"""Exact planners for small problems: an integer program, and brute force over all allocations.

Letters: R ranks, E experts, n = E/R. Both allow every exact balance, with any number of donors.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, hstack, vstack


def caps_of(total: int, ranks: int) -> list[int]:
    return [len(range(d, total, ranks)) for d in range(ranks)]


def least_busiest(total_E: Sequence[int], ranks: int, seconds: float = 60) -> int:
    """The least D of any plan, proved by HiGHS; TimeoutError where it cannot tell in time."""
    experts = len(total_E)
    caps = np.array(caps_of(sum(total_E), ranks))
    rank_P, expert_P = np.divmod(np.arange(ranks * experts), experts)
    home_P = expert_P // (experts // ranks)
    foreign = home_P != rank_P
    rank_P, expert_P, home_P = rank_P[foreign], expert_P[foreign], home_P[foreign]
    pairs = len(rank_P)
    most_P = np.minimum(np.array(total_E)[expert_P], caps[rank_P])

    # Variables: rows of every foreign pair, whether it has any, and D.
    def table(numbers: np.ndarray, rows: int) -> csr_array:
        """[rows, pairs], 1 where the pair has this number."""
        return csr_array((np.ones(pairs), (numbers, np.arange(pairs))), shape=(rows, pairs))

    into, out_of = table(rank_P, ranks), table(home_P, ranks)
    none = csr_array((ranks, pairs))
    column, wide = np.ones((ranks, 1)), np.inf
    loads = np.array(total_E).reshape(ranks, -1).sum(1)
    constraints = [
        (hstack([into - out_of, none, 0 * column]), caps - loads, caps - loads),
        (hstack([table(expert_P, experts), csr_array((experts, pairs + 1))]), 0, total_E),
        (hstack([eye_array(pairs), -csr_array(np.diag(most_P)), csr_array((pairs, 1))]), -wide, 0),
        (hstack([none, into, -column]), -wide, 0),
        (hstack([none, out_of, -column]), -wide, 0),
    ]
    matrix = vstack([csr_array(part) for part, _, _ in constraints]).tocsr()
    low, high = (
        np.concatenate([np.broadcast_to(one[i], one[0].shape[0]) for one in constraints])
        for i in (1, 2)
    )
    whole = np.concatenate([np.zeros(pairs), np.ones(pairs + 1)])  # rows follow, as in any flow
    result = milp(
        np.concatenate([np.zeros(2 * pairs), [1]]),
        constraints=LinearConstraint(matrix, low, high),
        integrality=whole,
        bounds=Bounds(0, np.concatenate([most_P, np.ones(pairs), [experts]])),
        options={"time_limit": seconds, "mip_rel_gap": 0},
    )
    if result.status != 0:
        raise TimeoutError(result.message)
    return round(result.fun)


def allocations(
    total_E: Sequence[int], ranks: int, most: int | None = None
) -> Iterator[list[list[int]]]:
    """Every way to give rows[e][d] >= 0 rows of expert e to rank d such that all caps are met.

    With ``most`` no rank has more than that, and any number up to it.
    """

    def place(expert: int, room: list[int]) -> Iterator[list[list[int]]]:
        if expert == len(total_E):
            yield []
            return
        for part in _parts(total_E[expert], room):
            rest = [r - p for r, p in zip(room, part, strict=True)]
            for others in place(expert + 1, rest):
                yield [part, *others]

    yield from place(0, caps_of(sum(total_E), ranks) if most is None else [most] * ranks)


def _parts(rows: int, room: Sequence[int]) -> Iterator[list[int]]:
    """Every way to put ``rows`` rows into the rooms."""
    if len(room) == 1:
        if rows <= room[0]:
            yield [rows]
        return
    for first in range(min(rows, room[0]) + 1):
        for rest in _parts(rows - first, room[1:]):
            yield [first, *rest]


def best_of_all(
    total_E: Sequence[int], ranks: int, most: int | None = None
) -> tuple[int, int, tuple[int, ...], ...]:
    """By brute force: least D, least U, least received and least sent of every rank."""
    homes = len(total_E) // ranks
    least: list[np.ndarray] = []
    for rows in allocations(total_E, ranks, most):
        used = np.array(rows).T > 0  # [R, E]
        used &= np.arange(ranks)[:, None] != np.arange(len(total_E)) // homes
        received = used.sum(1)
        sent = used.sum(0).reshape(ranks, homes).sum(1)
        found = np.concatenate([[max(received.max(), sent.max()), received.sum()], received, sent])
        least = [found if not least else np.minimum(least[0], found)]
    numbers = least[0].tolist()
    return (
        numbers[0],
        numbers[1],
        tuple(numbers[2 : 2 + ranks]),
        tuple(numbers[2 + ranks :]),
    )
