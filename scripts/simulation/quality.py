"""One layer on R ranks: the plan, the pairs rule beside it, and how far both are from the bounds.

D, *busiest*: most duplicates that a rank sends or receives. U, *duplicates*: all. A duplicate is a
pair (rank, foreign expert with rows there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonep_megatron.bounds import bounds
from moonep_megatron.caps import SLACK_UNIT, TILE
from moonep_megatron.rules import solve_within
from moonep_megatron.transfers import Piece, cost

Row = dict[str, Any]


def judge(total_E: Sequence[int], ranks: int, planner: str, node: int, slack: int = 0) -> Row:
    """Counts of one layer; ``node`` ranks share a link, what leaves them crosses the network.

    A duplicate of less than a tile of the grouped GEMM is *tiny*. The pairs rule beside the plan is
    exact.
    """
    homes = len(total_E) // ranks
    own = [list(map(int, total_E[d * homes : (d + 1) * homes])) for d in range(ranks)]
    rule, caps, parts = solve_within(own, slack=slack, planner=planner, slots=homes)
    _, busiest, duplicates = cost(ranks, parts, homes)
    _, pairs_busiest, pairs_duplicates = _cost_of("pairs", own, 0)
    _, best_busiest, best_duplicates = _cost_of("best", own, slack)
    least = bounds(total_E, ranks, slack)
    mean = sum(map(sum, own)) / ranks
    return {
        "ranks": ranks,
        "experts": len(total_E),
        "slack": slack / SLACK_UNIT,
        "rule": rule,
        "duplicates": duplicates,
        "duplicates_bound": least.duplicates,
        "busiest": busiest,
        "busiest_bound": least.busiest,
        "pairs_busiest": pairs_busiest,
        "pairs_duplicates": pairs_duplicates,
        "best_busiest": best_busiest,
        "best_duplicates": best_duplicates,
        "maxvio": max(map(max, own)) * len(total_E) / sum(map(sum, own)) - 1,
        "hottest_rank": max(map(sum, own)) / mean,
        "fullest_rank": max(caps) / mean,
        "tiny": sum(part.rows < TILE for part in parts),
        "padded": max(_padded(own, parts)) / mean,
        **_crossing(parts, ranks, node),
    }


def _cost_of(planner: str, own: Sequence[Sequence[int]], slack: int) -> tuple[int, int, int]:
    homes = len(own[0])
    _, _, parts = solve_within(own, slack=slack, planner=planner, slots=homes)
    return cost(len(own), parts, homes)


def _padded(own: Sequence[Sequence[int]], parts: Sequence[Piece]) -> list[int]:
    """[R] rows that each rank computes, every expert's rounded up to whole tiles."""
    left = [list(home) for home in own]
    padded = [0] * len(own)
    for part in parts:
        left[part.donor][part.expert] -= part.rows
        padded[part.rank] += _tiles(part.rows)
    return [p + sum(map(_tiles, home)) for p, home in zip(padded, left, strict=True)]


def _tiles(rows: int) -> int:
    return -(-rows // TILE) * TILE


def _crossing(parts: Sequence[Piece], ranks: int, node: int) -> Row:
    """Most duplicates over one rank's link, and over its place in the network, in one direction.

    ``sent`` and ``received`` are of all ranks: times the bytes of an expert, the bytes by rank.
    """
    sent, received = [0] * ranks, [0] * ranks
    far_sent, far_received = [0] * ranks, [0] * ranks
    for part in parts:
        far = part.donor // node != part.rank // node
        sent[part.donor] += 1
        received[part.rank] += 1
        far_sent[part.donor] += far
        far_received[part.rank] += far
    near = [a - b for a, b in zip(sent + received, far_sent + far_received, strict=True)]
    return {
        "sent": sent,
        "received": received,
        "near_busiest": max(near),
        "far_busiest": max(far_sent + far_received),
    }
