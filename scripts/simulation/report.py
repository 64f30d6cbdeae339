"""Tables and the picture. A row is one layer on R ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
WAYS = {"alltoall": "tab:orange", "moonep": "tab:blue", "balanced": "tab:gray"}


def mean(rows: Sequence[Row], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def ratio(rows: Sequence[Row], key: str, other: str) -> float:
    """Sum over sum; 1 where both are 0."""
    above, below = (sum(row[one] for row in rows) for one in (key, other))
    return above / below if below else float("inf" if above else 1)


def above_pairs(rows: Sequence[Row]) -> int:
    return sum(row["busiest"] > row["pairs_busiest"] for row in rows)


def group(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def tables(rows: Sequence[Row], planner: str, console: Console) -> None:
    """Quality and times, means over layers; then sums over all layers of all data sets."""
    quality = _table(f"duplicates, planner {planner}, means over layers")
    for name in ("data", "R", "slack", "layers", "hottest", "D bound", "D", "D pairs", "U bound"):
        quality.add_column(name, justify="left" if name == "data" else "right")
    for name in ("U", "U pairs", "tiny", "padded"):
        quality.add_column(name, justify="right")
    times = _table("predicted ms a layer, forward + backward, means over layers")
    for name in ("data", "R", "slack", *WAYS, "alltoall ÷ moonep", "moonep ÷ balanced"):
        times.add_column(name, justify="left" if name == "data" else "right")
    for (data, ranks, slack), own in group(rows, "data", "ranks", "slack").items():
        keys = ("busiest_bound", "busiest", "pairs_busiest")
        keys += ("duplicates_bound", "duplicates", "pairs_duplicates", "tiny")
        quality.add_row(
            *(data, str(ranks), f"{slack:g}", str(len(own)), f"{mean(own, 'hottest_rank'):.2f}"),
            *(f"{mean(own, key):.2f}" for key in keys),
            f"{mean(own, 'padded'):.3f}",
        )
        times.add_row(
            *(data, str(ranks), f"{slack:g}"),
            *(f"{mean(own, f'{way}_ms'):.2f}" for way in WAYS),
            f"{ratio(own, 'alltoall_ms', 'moonep_ms'):.2f}",
            f"{ratio(own, 'moonep_ms', 'balanced_ms'):.2f}",
        )
    console.print(quality, times, _sums(rows))


def _sums(rows: Sequence[Row]) -> Table:
    table = _table("sums over all layers")
    names = ("R", "slack", "layers", "D", "÷ bound", "÷ pairs", "U", "÷ bound", "÷ pairs")
    for name in (*names, "tiny", "pushed GB", "D > pairs"):
        table.add_column(name, justify="right")
    for (ranks, slack), own in group(rows, "ranks", "slack").items():
        table.add_row(
            *(str(ranks), f"{slack:g}", str(len(own)), str(sum(row["busiest"] for row in own))),
            *(f"{ratio(own, 'busiest', one):.3f}" for one in ("busiest_bound", "pairs_busiest")),
            str(sum(row["duplicates"] for row in own)),
            f"{ratio(own, 'duplicates', 'duplicates_bound'):.3f}",
            f"{ratio(own, 'duplicates', 'pairs_duplicates'):.3f}",
            str(sum(row["tiny"] for row in own)),
            f"{sum(row['pushed_mb'] for row in own) / 1e3:.1f}",
            str(above_pairs(own)),
        )
    return table


def draw(rows: Sequence[Row], planner: str, path: Path) -> None:
    """Write a PNG: over R, the busiest rank and all duplicates beside their bounds; the times.

    Bounds and times are those of the least slack.
    """
    slacks = sorted(group(rows, "slack").items())
    rows = slacks[0][1]
    panels = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    figure, (busiest, duplicates, times) = panels
    by_ranks = sorted(group(rows, "ranks").items())
    ranks = [key[0] for key, _ in by_ranks]
    for axes, key, what in (
        (busiest, "busiest", "D, duplicates of the busiest rank"),
        (duplicates, "duplicates", "U, all duplicates"),
    ):
        lines = {"pairs": (f"pairs_{key}", "s--"), "best": (f"best_{key}", "^-")}
        lines |= {planner: (key, "o-"), "lower bound": (f"{key}_bound", "k:")}
        for name, (column, style) in lines.items():
            axes.plot(ranks, [mean(own, column) for _, own in by_ranks], style, label=name)
        for (slack,), more in slacks[1:]:
            means = [mean(own, key) for _, own in sorted(group(more, "ranks").items())]
            axes.plot(ranks, means, "v-", label=f"{planner}, slack {slack:g}")
        axes.set(ylabel=f"{what}, mean of layers")
    for way, color in WAYS.items():
        values = [mean(own, f"{way}_ms") for _, own in by_ranks]
        times.plot(ranks, values, "o-", color=color, label=way)
    times.set(ylabel="predicted ms a layer, forward + backward")
    for axes in (busiest, duplicates, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(one) for one in ranks])
        axes.set(xlabel="ranks R")
        axes.set_ylim(bottom=0)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
