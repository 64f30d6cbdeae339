"""Medians, ratios, tables and JSON. A row is one variant on one routing."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from bench_machine import gpu_and_driver
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from layer_bench.options import FORMS, IDEAL, Options

Row = dict[str, Any]
BASELINES = ("alltoall", "allgather")
_KEY = ("shape", "case", "dispatcher", "experts")
_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "moonep-megatron",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "triton",
)


def name_of(row: Row) -> str:
    """As a user calls the variant; moonep's experts are always its own."""
    own = row["dispatcher"].startswith("moonep")
    return row["dispatcher"] if own else f"{row['dispatcher']}/{row['experts']}"


def add_times(row: Row) -> Row:
    """Into a row the medians and quartiles of its samples."""
    low, middle, high = statistics.quantiles(row["samples_ms"], n=4)
    forward = statistics.median(row["forward_samples_ms"])
    return row | {"forward_ms": forward, "ms": middle, "quartiles_ms": [low, high]}


def together(rows: list[Row], profiles: list[Row]) -> list[Row]:
    """Every configuration once: repeated measurements pooled, what the profiler saw beside it."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = _key(row)
        if key in found:
            for name in ("samples_ms", "forward_samples_ms"):
                found[key][name] = found[key][name] + row[name]
        else:
            found[key] = dict(row)
    for profile in profiles:
        if (key := _key(profile)) in found:
            found[key] = profile | found[key]
    return add_ratios([add_times(row) for row in found.values()])


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _KEY)


def add_ratios(rows: list[Row]) -> list[Row]:
    """Rows with ``ratio_ideal``, and moonep's ``gain_te`` and ``gain_ours``.

    ``ratio_ideal`` is the time over the ideal's with the same products; a gain is the time of the
    better of alltoall and allgather, with that kind of experts, over moonep's.
    """
    ideals = {row["shape"]: row["ms"] for row in rows if _is(row, IDEAL, "ours")}
    done = []
    for row in rows:
        ideal = ideals.get(row["shape"])
        ratios = {"ratio_ideal": row["ms"] / ideal if ideal and not row["wrong"] else None}
        if row["dispatcher"].startswith("moonep"):
            ratios |= {f"gain_{experts}": _gain(row, rows, experts) for experts in ("te", "ours")}
        done.append(row | ratios)
    return done


def _gain(row: Row, rows: list[Row], experts: str) -> float | None:
    others = [
        other["ms"]
        for other in rows
        if (other["shape"], other["case"]) == (row["shape"], row["case"])
        and other["dispatcher"] in BASELINES
        and other["experts"] == experts
        and not other["wrong"]
    ]
    return min(others) / row["ms"] if others and not row["wrong"] else None


def _is(row: Row, dispatcher: str, experts: str) -> bool:
    return (row["dispatcher"], row["experts"]) == (dispatcher, experts)


def line(row: Row) -> str:
    """One configuration, as soon as it is known."""
    row = add_times(row)
    hot = f"hottest rank {row['hottest_rank']:.2f}"
    text = (
        f"{row['shape']:>4} {name_of(row):<17} {row['case']:<13} {hot}  forward "
        f"{row['forward_ms']:8.2f}  forward+backward {row['ms']:8.2f} ms"
    )
    if "peak_mb" in row:
        text += f"  peak {row['peak_mb']:,.0f} MB"
    if "duplicates" in row:
        text += f"  duplicates {row['duplicates']} (D {row['busiest']})"
    return text + "".join(f"\n  WRONG: {what}" for what in row["wrong"])


def tables(rows: list[Row], shapes: Sequence[Any]) -> Iterable[Table]:
    """Two tables a shape: times with their ratios, and what is kept and moved."""
    for shape in shapes:
        own = [row for row in rows if row["shape"] == shape.name]
        if own:
            yield _times(str(shape), own)
            if any(name in row for row in own for name in _COSTS):
                yield _costs(own)


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for name in columns:
        left = name in ("routing", "variant")
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    return table


def _times(title: str, rows: list[Row]) -> Table:
    """A line a routing; forward and forward + backward of every variant."""
    names = list(dict.fromkeys(name_of(row) for row in rows))
    gains = ("gain_te", "gain_ours")
    heads = ["routing", "maxvio", "hottest", *names, "moonep÷ideal", "TE÷moonep", "ours÷moonep"]
    table = _table(f"{title}\nforward / forward+backward, ms", heads)
    ideal = {name_of(row): row for row in rows if row["dispatcher"] == IDEAL}
    cases = dict.fromkeys(row["case"] for row in rows)
    for case in cases:
        here = ideal | {name_of(row): row for row in rows if row["case"] == case}
        measured = [row for row in here.values() if row["case"] == case]
        any_row = measured[-1]
        ours = next((here[name] for name in ("moonep", *FORMS) if name in here), {})
        few = any_row.get("hot_experts", 1)
        table.add_row(
            case + (f" ({few} experts)" if few > 1 else ""),
            f"{any_row['maxvio']:.2f}",
            f"{any_row['hottest_rank']:.2f}",
            *(_time_cell(here.get(name)) for name in names),
            *(_number(ours.get(name), ".3f") for name in ("ratio_ideal", *gains)),
        )
    return table


def _time_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return "WRONG" if row["wrong"] else f"{row['forward_ms']:.2f} / {row['ms']:.2f}"


_COSTS = {
    "peak_mb": "peak MB",
    "pass_mb": "of a pass",
    "kept_mb": "kept for backward",
    "duplicates": "duplicates",
    "busiest": "D",
    "pushed_mb": "pushed MB",
    "pulled_mb": "pulled MB",
    "push_ms": "push ms",
    "exposed_push_ms": "exposed",
    "pull_ms": "pull ms",
    "exposed_pull_ms": "exposed",
    "idle_ms": "idle ms",
    "host_syncs": "host syncs",
    "copies_to_host": "copies to host",
    "launches": "launches",
}


def _costs(rows: list[Row]) -> Table:
    """A line a configuration; without what nobody measured."""
    names = [name for name in _COSTS if any(name in row for row in rows)]
    heads = ["variant", "routing", *(_COSTS[name] for name in names)]
    table = _table("memory (MB beside weights and their gradients), movement, host", heads)
    for row in rows:
        cells = [
            _number(row.get(name), ",.2f" if name.endswith("_ms") else ",.0f") for name in names
        ]
        if any(cell != "-" for cell in cells):
            table.add_row(name_of(row), row["case"], *cells)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def findings(rows: list[Row]) -> list[str]:
    """Sentences: notes of the variants, and how constant memory is over the routings."""
    notes = {f"{name_of(row)}: {note}": None for row in rows for note in row["notes"]}
    peaks: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if "peak_mb" in row:
            peaks.setdefault((row["shape"], name_of(row)), []).append(row["peak_mb"])
    flat = [
        f"{shape} {name}: highest peak memory ÷ lowest over the routings {max(p) / min(p):.3f}"
        for (shape, name), p in peaks.items()
        if min(p) > 0
    ]
    return [*notes, *flat]


def show(
    console: Console,
    options: Options,
    rows: list[Row],
    notes: list[str],
    failures: dict[str, str],
) -> None:
    """Everything measured, then what was wrong, left out or failed."""
    for table in tables(rows, options.shapes):
        console.print(table)
    for text in (*notes, *findings(rows)):
        console.print(f"- {text}", markup=False)
    for row in rows:
        for what in row["wrong"]:
            text = f"WRONG RESULT: {row['shape']} {name_of(row)}, {row['case']}: {what}"
            console.print(text, markup=False)
    for name, error in failures.items():
        console.print(f"FAILED: {name}\n{error}", markup=False)


def write(
    path: Path,
    options: Options,
    rows: list[Row],
    notes: list[str],
    failures: dict[str, str],
    seconds: float,
) -> None:
    """Everything with where and when it was measured."""
    gpu, driver = gpu_and_driver() if options.device == "cuda" else [None, None]
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "driver": driver,
        "cpu": platform.machine(),
        "versions": versions(),
        "options": asdict(options),
        "seconds": seconds,
        "notes": [*notes, *findings(rows)],
        "failures": failures,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def versions() -> dict[str, str | None]:
    """Of the packages that matter, none for those that are missing."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
