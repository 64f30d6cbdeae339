"""The picture of compare_dispatchers.py: losses, rows per rank, and maxvio per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_STYLES = {"alltoall": ("tab:orange", "-"), "allgather": ("tab:green", "-.")}
_MOONEP = ("tab:blue", "--")


def draw(results: dict[str, dict[str, Any]], balanced_rows: int, path: Path) -> None:
    """Write a PNG of the runs in ``results`` (by dispatcher, as train_gpt_moe.py's JSON)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, rows, maxvio) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    _losses(loss, results)
    _rows(rows, results, balanced_rows)
    _maxvio(maxvio, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _losses(axes: Any, results: dict[str, dict[str, Any]]) -> None:
    for dispatcher, result in results.items():
        color, line = _STYLES.get(dispatcher, _MOONEP)
        steps = range(1, len(result["loss"]) + 1)
        axes.plot(steps, result["loss"], line, color=color, label=dispatcher)
    axes.set(title="Loss", xlabel="step", ylabel="nats a byte")
    axes.legend()


def hottest(rows: list[list[list[int]]]) -> tuple[int, int]:
    """Step and layer (from 0) where the busiest rank had most rows; rows [steps][layers][ranks]."""
    places = ((step, layer) for step in range(len(rows)) for layer in range(len(rows[step])))
    return max(places, key=lambda place: max(rows[place[0]][place[1]]))


def _rows(axes: Any, results: dict[str, dict[str, Any]], balanced_rows: int) -> None:
    first = next(iter(results))
    step, layer = hottest(results[first]["rows_per_rank"])
    width = 0.8 / len(results)
    for number, (dispatcher, result) in enumerate(results.items()):
        heights = result["rows_per_rank"][step][layer]
        places = [rank + (number - (len(results) - 1) / 2) * width for rank in range(len(heights))]
        color, _ = _STYLES.get(dispatcher, _MOONEP)
        axes.bar(places, heights, width, color=color, label=dispatcher)
    axes.axhline(balanced_rows, color="black", linewidth=0.8, label="S·K")
    axes.set(title=f"Rows per rank, step {step + 1}, MoE layer {layer + 1}", xlabel="rank")
    axes.set_xticks(range(len(heights)))
    axes.legend()


def _maxvio(axes: Any, results: dict[str, dict[str, Any]]) -> None:
    result = results[list(results)[-1]]
    for layer, values in enumerate(zip(*result["maxvio"], strict=True)):
        axes.plot(range(1, len(values) + 1), values, label=f"layer {layer + 1}")
    axes.set(title="Router: maxvio", xlabel="step", ylabel="hottest expert / mean - 1")
    axes.set_ylim(bottom=0)
    axes.legend()
