"""From how many tokens a rank on balancing pays, by the cost model of `simulation.times`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulation.times import Model

MOST_TOKENS = 1 << 24
Row = dict[str, Any]


def gain(model: Model, row: Row, tokens: int) -> float:
    """alltoall's predicted time of a layer divided by moonep's, with ``tokens`` a rank."""
    times = replace(model, tokens=tokens).times(row)
    return times["alltoall_ms"] / times["moonep_ms"]


def break_even(model: Model, row: Row) -> int | None:
    """The fewest tokens a rank from which on moonep is as fast; None if it never is.

    The same skew and the same duplicates are assumed for every number of tokens. What moonep saves
    grows with them and what it costs (weights of duplicates, launches) is hidden more and more, so
    there is one such number.
    """
    if gain(model, row, MOST_TOKENS) < 1:
        return None
    low, high = 0, MOST_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(model, row, middle) >= 1 else (middle, high)
    return high


def logged_row(ranks: int, node: int, hottest_rank: float, busiest: int) -> Row:
    """A layer from its balance log, whose duplicates are all taken to cross the slower wires."""
    far = ranks > node
    return {
        "ranks": ranks,
        "hottest_rank": hottest_rank,
        "fullest_rank": 1.0,
        "near_busiest": 0 if far else busiest,
        "far_busiest": busiest if far else 0,
    }


def draw(model: Model, rows: Sequence[Row], path: Path) -> None:
    """The gain over tokens a rank: of the layers whose hottest rank is least, median and most."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    ordered = sorted(rows, key=lambda row: row["hottest_rank"])
    chosen = {id(r): r for r in (ordered[0], ordered[len(ordered) // 2], ordered[-1])}
    tokens = [1 << power for power in range(6, 18)]
    for row in chosen.values():
        label = f"hottest rank {row['hottest_rank']:.2f}, R = {row['ranks']}"
        axes.plot(tokens, [gain(model, row, s) for s in tokens], "o-", label=label)
    axes.axhline(1, color="k", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens a rank S", ylabel="predicted alltoall ÷ moonep")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
