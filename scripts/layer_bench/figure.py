"""Pictures: times over skew, and which kernels ran when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from layer_bench.options import FORMS, IDEAL
from layer_bench.report import name_of

_COLORS = {"alltoall": "tab:orange", "allgather": "tab:green", "flex": "tab:purple"}
_MOONEP = "tab:blue"
_PANELS = {
    "one": ("surplus of one rank on few experts", "rows of the hottest rank ÷ mean"),
    "even": ("surplus on all experts of one rank", "rows of the hottest rank ÷ mean"),
    "maxvio": ("one hot expert", "maxvio"),
}
_KINDS = {
    "gemm": "tab:gray",
    "push": "tab:blue",
    "pull": "tab:red",
    "nccl": "tab:orange",
    "wait": "gold",
    "other": "tab:green",
}


def draw(rows: list[dict[str, Any]], shapes: Sequence[Any], path: Path) -> None:
    """Write a PNG: a line of panels a shape, forward + backward over skew."""
    kinds = [kind for kind in _PANELS if any(row["kind"] == kind for row in rows)] or ["even"]
    size = (4.6 * len(kinds) + 1.5, 3.6 * len(shapes))
    figure, grid = plt.subplots(
        len(shapes), len(kinds), figsize=size, layout="constrained", squeeze=False
    )
    for shape, line in zip(shapes, grid, strict=True):
        own = [row for row in rows if row["shape"] == shape.name]
        for kind, axes in zip(kinds, line, strict=True):
            _panel(axes, own, kind)
            axes.set_title(f"{shape}\n{_PANELS[kind][0]}", fontsize=9)
    figure.legend(*_labels(grid), loc="outside right upper")
    _save(figure, path)


def _panel(axes: Any, rows: list[dict[str, Any]], kind: str) -> None:
    x = "maxvio" if kind == "maxvio" else "hottest_rank"
    for name in dict.fromkeys(name_of(row) for row in rows):
        own = [row for row in rows if name_of(row) == name]
        dispatcher, experts = own[0]["dispatcher"], own[0]["experts"]
        dashes = "--" if experts == "ours" and dispatcher in _COLORS else "-"
        if dispatcher == IDEAL:
            style = "-" if experts == "ours" else ":"
            axes.axhline(own[0]["ms"], color="black", linewidth=0.9, linestyle=style, label=name)
            continue
        points = sorted((r[x], r["ms"]) for r in own if r["kind"] in (kind, "balanced"))
        color = _COLORS.get(dispatcher, _MOONEP)
        dashes = FORMS.get(dispatcher, dashes)
        axes.plot(*zip(*points, strict=True), dashes, marker="o", color=color, label=name)
    axes.set(xlabel=_PANELS[kind][1], ylabel="forward + backward, ms")
    axes.set_ylim(bottom=0)


def _labels(grid: Any) -> tuple[list[Any], list[str]]:
    found: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def overlap(events: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG of a Chrome trace: a bar a kernel, a lane for every rank's stream."""
    work = [event for event in events if event["ph"] == "X"]
    lanes = sorted({(event["pid"], event["tid"]) for event in work})
    figure, axes = plt.subplots(figsize=(14, 1.2 + 0.5 * len(lanes)), layout="constrained")
    # The clocks of ranks on one machine agree to microseconds.
    first = min((event["ts"] for event in work), default=0.0)
    for kind, color in _KINDS.items():
        for number, lane in enumerate(lanes):
            bars = [
                ((event["ts"] - first) / 1e3, event["dur"] / 1e3)
                for event in work
                if (event["pid"], event["tid"]) == lane and event["cat"] == kind
            ]
            axes.broken_barh(bars, (number - 0.4, 0.8), color=color)
        axes.plot([], [], color=color, linewidth=6, label=kind)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}, stream {stream}" for rank, stream in lanes])
    axes.invert_yaxis()
    axes.set(xlabel="ms", title=title)
    figure.legend(loc="outside right upper")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
