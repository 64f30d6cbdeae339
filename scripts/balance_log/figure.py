"""The picture of plot_balance.py: panels over iterations, and a map of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from balance_log.read import Balance

mpl.use("Agg")
import matplotlib.pyplot as plt

_MARKED = 60  # so many points can be told apart
_OF_LAYERS = "moonep_hottest_rank_without"


def draw(balance: Balance, path: Path) -> None:
    """Write the picture as a PNG, its folder too."""
    picture = figure(balance)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=110)
    plt.close(picture)


def figure(balance: Balance) -> Any:
    """Hottest rank, maxvio and duplicates, one above the other; below, if logged, each layer's."""
    heights = [3, 2, 2] + [3] * bool(balance.layers)
    picture, panels = plt.subplots(
        *(len(heights), 1),
        figsize=(9, 1.1 * sum(heights)),
        height_ratios=heights,
        sharex=True,
        layout="constrained",
    )
    hottest, maxvio, duplicates = panels[:3]
    _line(hottest, balance, "moonep_hottest_rank_without", "tab:orange", "without moonep")
    _line(hottest, balance, "moonep_hottest_rank", "tab:blue", "with moonep")
    hottest.set(ylabel="rows of the hottest\nrank ÷ mean")
    hottest.set_title("Balance, means over MoE layers")
    hottest.set_ylim(bottom=min(0.95, hottest.get_ylim()[0]))
    hottest.legend(loc="upper right")
    _line(maxvio, balance, "moonep_maxvio", "tab:green")
    maxvio.set(ylabel="maxvio: rows of the\nhottest expert ÷ mean - 1")
    _line(duplicates, balance, "moonep_duplicates", "tab:purple")
    duplicates.set(ylabel="duplicates\na layer")
    for axes in (maxvio, duplicates):
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax or 1)
    for axes in panels[:3]:
        axes.grid(alpha=0.3)
    if balance.layers:
        _map(picture, panels[3], balance)
    panels[-1].set(xlabel="iteration")
    picture.align_ylabels(panels)
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    return picture


def _line(axes: Any, balance: Balance, name: str, color: str, label: str | None = None) -> None:
    marker = "o" if len(balance.iterations) <= _MARKED else None
    axes.plot(
        *(balance.iterations, balance.means[name]),
        marker=marker,
        markersize=3,
        color=color,
        label=label,
    )


def _map(picture: Any, axes: Any, balance: Balance) -> None:
    """A cell an iteration and layer."""
    mesh = axes.pcolormesh(
        _edges(balance.iterations),
        np.arange(len(balance.layers) + 1) - 0.5,
        balance.layer_values[_OF_LAYERS].T,
        cmap="viridis",
    )
    # Dense layers have no row, so rows are named instead of numbered; all names, or about ten.
    shown = range(0, len(balance.layers), -(-len(balance.layers) // 10))
    axes.set_yticks(shown, [str(balance.layers[row]) for row in shown])
    axes.set(ylabel="MoE layer\n(from 0, as logged)")
    picture.colorbar(mesh, ax=axes, label="hottest rank ÷ mean,\nwithout moonep", pad=0.01)


def _edges(iterations: list[int]) -> np.ndarray:
    """Borders of cells around the iterations, which may lie unevenly: one more than there are."""
    centres = np.asarray(iterations, dtype=float)
    half = np.diff(centres) / 2 if len(centres) > 1 else np.array([0.5])
    between = centres[:-1] + half[: len(centres) - 1]
    return np.concatenate(([centres[0] - half[0]], between, [centres[-1] + half[-1]]))
