"""Whether memory stayed flat, and the table at the end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from soaking.settings import Settings

# Bytes that memory may differ by, beside a share of it: allocators keep what they once needed.
ALLOWANCES = {"rss": 24 << 20, "cuda_allocated": 1 << 20, "cuda_reserved": 64 << 20}
SHARE = 0.02
SAMPLES = 3


def growth(samples: Sequence[dict[str, int]], warmup: int) -> dict[str, tuple[int, int]]:
    """Bytes after warm-up and at the end, by kind: medians of three samples each.

    Empty where there are too few samples behind the warm-up.
    """
    warm = [sample for sample in samples if sample["steps"] >= warmup]
    if len(warm) < 2 * SAMPLES:
        return {}
    kinds = [kind for kind in warm[0] if kind != "steps"]
    return {
        kind: tuple(
            int(statistics.median(sample[kind] for sample in part))
            for part in (warm[:SAMPLES], warm[-SAMPLES:])
        )
        for kind in kinds
    }


def problems(results: Sequence[dict[str, Any]], settings: Settings) -> list[str]:
    """Everything that was wrong on any rank, in sentences."""
    found = [problem for result in results for problem in result["problems"]]
    if len(results) < settings.ranks:
        found.append(f"{settings.ranks - len(results)} ranks gave no result")
    for result in results:
        if not result["compared"]:
            found.append(f"rank {result['rank']}: no step was compared with the reference")
        for kind, (early, late) in growth(result["memory"], settings.warmup).items():
            if late > early * (1 + SHARE) + ALLOWANCES[kind]:
                found.append(
                    f"rank {result['rank']}: {kind} grew from {early / 2**20:.1f} to "
                    f"{late / 2**20:.1f} MiB after warm-up"
                )
    return found


def table(results: Sequence[dict[str, Any]], settings: Settings) -> Table:
    """One line a rank."""
    title = f"{settings.backend}, {settings.ranks} ranks"
    shown = Table(title=title, title_justify="left")
    columns = ["rank", "passes", "s", "compared", "worst error", "plans"]
    kinds = [kind for kind in results[0]["memory"][0] if kind != "steps"] if results else []
    for name in (*columns, *(f"{kind}, MiB" for kind in kinds)):
        shown.add_column(name, justify="right")
    for result in results:
        grown = growth(result["memory"], settings.warmup)
        last = result["memory"][-1]
        shown.add_row(
            *(str(result["rank"]), str(result["passes"]), f"{result['seconds']:.0f}"),
            str(result["compared"]),
            f"{max(result['worst'].values(), default=float('nan')):.1e}",
            str(result["plans"]),
            *(_cell(grown.get(kind), last[kind]) for kind in kinds),
        )
    return shown


def _cell(ends: tuple[int, int] | None, last: int) -> str:
    if ends is None:
        return f"{last / 2**20:.1f} (too short to judge)"
    return " → ".join(f"{end / 2**20:.1f}" for end in ends)
