"""Ratios to the ceilings, tables and JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bench_machine import gpu_and_driver
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kernel_bench.ranks import Options

Row = dict[str, Any]
# What the best ceiling of a link is, where it is not the fastest copy kernel over that link.
_BEST = {"local": "device"}


def add_ratios(rows: list[Row]) -> None:
    """Into each row the ceiling of its link, with as many SMs and with the best number of them."""
    by_sms: dict[tuple[str, int], float] = defaultdict(float)
    best: dict[str, float] = defaultdict(float)
    for row in rows:
        if row["section"] == "copy" and not row["wrong"]:
            key = row["link"], row["sms"]
            by_sms[key] = max(by_sms[key], row["gbps"])
            best[row["link"]] = max(best[row["link"]], row["gbps"])
    for row in rows:
        link = row["link"]
        same = by_sms.get((link, row["sms"]))
        most = best.get(_BEST.get(link, link))
        for name, ceiling in (("same_sms", same), ("best", most)):
            row[f"ceiling_{name}_gbps"] = ceiling
            row[f"ratio_{name}"] = row["gbps"] / ceiling if ceiling and row["gbps"] else None


def tables(rows: list[Row]) -> Iterable[Table | str]:
    """One table a section, a line for each configuration, SMs side by side."""
    for section in dict.fromkeys(row["section"] for row in rows):
        own = [row for row in rows if row["section"] == section]
        if own[0]["bytes"] is None:
            yield _times(section, own)
            continue
        yield _rates(section, own)
        yield from _flatness(own)


def _rates(section: str, rows: list[Row]) -> Table:
    counts = sorted({row["sms"] for row in rows})
    notes = (
        "GB/s" if section == "copy" else "µs, GB/s, % of the copy with as many SMs / of its best"
    )
    table = Table(title=f"{section}: {notes}", title_justify="left", box=SIMPLE)
    for name in ("form", "maxvio", "MB", *(f"{sms} SMs" for sms in counts)):
        table.add_column(name, justify="left" if name == "form" else "right")
    lines: dict[tuple[str, ...], dict[int, Row]] = defaultdict(dict)
    # By shape and form, so that the loads of each stand together.
    for row in rows if section == "copy" else sorted(rows, key=_place):
        load = f"{row['maxvio']:.2f}" if "maxvio" in row else ""
        name = row["link"] if section == "copy" else row.get("shape", "")
        lines[f"{name} {row['form']}".strip(), load, f"{row['bytes'] / 1e6:.1f}"][row["sms"]] = row
    for line, cells in lines.items():
        table.add_row(*line, *(_cell(section, cells.get(sms)) for sms in counts))
    return table


def _place(row: Row) -> tuple[str, str]:
    return row["shape"], row["form"]


def _cell(section: str, row: Row | None) -> str:
    if row is None:
        return ""
    if row["wrong"]:
        return "WRONG"
    text = f"{row['gbps']:.0f}"
    if section != "copy":
        text = f"{row['seconds'] * 1e6:.0f}  {text}"
        ratios = [row["ratio_same_sms"], row["ratio_best"]]
        text += "  " + "/".join("-" if r is None else f"{100 * r:.0f}" for r in ratios)
    return text + ("" if row["queued_ahead"] else " *")


def _times(section: str, rows: list[Row]) -> Table:
    title = f"{section}: {rows[0]['shape']}"
    table = Table("part", "µs", "quartiles", title=title, title_justify="left", box=SIMPLE)
    for row in rows:
        low, high = (f"{1e6 * t:.1f}" for t in row["seconds_quartiles"])
        mark = "" if row["queued_ahead"] else " *"
        shown = "WRONG" if row["wrong"] else f"{1e6 * row['seconds']:.1f}{mark}"
        table.add_row(row["form"], shown, f"{low} to {high}")
    return table


def _flatness(rows: list[Row]) -> Iterable[str]:
    """How far the rates over the loads lie apart, by number of SMs."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in rows:
        if "load" in row and not row["wrong"]:
            groups[row["shape"], row["form"], row["sms"]].append(row["gbps"])
    parts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (shape, form, sms), rates in groups.items():
        if len(rates) > 1 and min(rates) > 0:
            spread = 100 * (max(rates) / min(rates) - 1)
            parts[shape, form].append(f"{spread:.1f} % with {sms} SMs")
    for (shape, form), texts in parts.items():
        yield f"  {shape} {form}: highest above lowest rate over maxvio {', '.join(texts)}"


def show(console: Console, rows: list[Row], failures: dict[str, str]) -> None:
    """Everything measured, then what was wrong or failed."""
    for part in tables(rows):
        console.print(part)
    if any(not row["queued_ahead"] for row in rows):
        console.print("* launches came late: the time has gaps in it")
    for row in rows:
        if row["wrong"]:
            what = [row["section"], row["form"], f"{row['sms']} SMs", str(row.get("maxvio", ""))]
            text = f"WRONG RESULT: {', '.join(what)}: {'; '.join(row['wrong'])}"
            console.print(text, markup=False)
    for section, error in failures.items():
        console.print(f"FAILED: {section}\n{error}", markup=False)


def write(
    path: Path, options: Options, rows: list[Row], failures: dict[str, str], seconds: float
) -> None:
    """Everything with where and when it was measured."""
    gpu, driver = gpu_and_driver()
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"),
        "options": asdict(options),
        "bandwidths": not options.same_gpu,
        "run_seconds": round(seconds, 1),
        "failures": failures,
        "rows": rows,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
