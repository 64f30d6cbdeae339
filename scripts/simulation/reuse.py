"""What slots that keep their duplicates save over the microbatches of one optimizer step.

One layer after the other: all its microbatches are planned in order, and its slots keep what they
hold. Without reuse every duplicate is pushed in forward and again in backward. With it a backward
that follows its forward finds all that went through the slots in one wave, and forward pushes what
they do not hold: *kept* counts that for the plans as they are, *preferred* for plans that prefer
what is held.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from moonep_megatron.caps import SLACK_UNIT
from moonep_megatron.reuse import Held
from moonep_megatron.rules import solve_within
from moonep_megatron.transfers import Piece, cost
from simulation.data import DataError, DataSet

Row = dict[str, Any]
COLUMNS = ("layers", "m", "D kept", "preferred", "U kept", "preferred")


def steps(sets: Sequence[DataSet]) -> list[tuple[str, list[DataSet]]]:
    """The data sets of each optimizer step, those that are microbatches of one by their names.

    Raises:
        DataError: there is no step of several microbatches.
    """
    found: dict[str, list[DataSet]] = {}
    for one in sets:
        found.setdefault(re.split(r"[ _]microbatch[ _]", one.name)[0], []).append(one)
    several = [(name, group) for name, group in found.items() if len(group) > 1]
    if not several:
        raise DataError(
            "--reuse: no step has several microbatches: give --microbatches N for files with ids, "
            "or counts that were recorded by microbatch"
        )
    return several


def judge_reuse(total_mE: np.ndarray, ranks: int, planner: str, slack: int, slots: int) -> Row:
    """One layer over the microbatches of a step."""
    row: Row = {"ranks": ranks, "slack": slack / SLACK_UNIT, "slots": slots}
    homes = total_mE.shape[1] // ranks
    for mode in ("kept", "preferred"):
        held = Held([[-1] * slots] * ranks)
        sums = {"busiest": 0, "duplicates": 0, "pushed": 0}
        for total_E in total_mE.tolist():
            own = [total_E[d * homes : (d + 1) * homes] for d in range(ranks)]
            prefer = held if mode == "preferred" else None
            _, _, parts = solve_within(own, slack=slack, planner=planner, slots=slots, held=prefer)
            _, busiest, duplicates = cost(ranks, parts, slots)
            sums["busiest"] += busiest
            sums["duplicates"] += duplicates
            received = [part.rank for part in parts]
            waves = [rank for rank in received if received.count(rank) > slots]
            sums["pushed"] += held.fresh(parts, homes) + len(waves)
            held = _after(held, parts, homes, slots)
        row |= {f"{mode}_{name}": value for name, value in sums.items()}
    return row


def _after(held: Held, parts: Sequence[Piece], homes: int, slots: int) -> Held:
    """What the slots hold when a microbatch is through; those of several waves hold nothing."""
    foreign: list[list[int]] = [[] for _ in held.experts]
    for part in parts:
        foreign[part.rank].append(part.donor * homes + part.expert)
    experts = []
    for rank, mine in enumerate(foreign):
        placed = held.placed(rank, sorted(mine) + [-1] * (homes - len(mine)))[:slots]
        before = held.experts[rank]
        kept = [new if new >= 0 else old for new, old in zip(placed, before, strict=True)]
        experts.append(kept if len(mine) <= slots else [-1] * slots)
    return Held(experts, sorted({(part.donor, part.rank) for part in parts}))


def table(rows: Sequence[Row], console: Console) -> None:
    """Sums over the layers of every step."""
    title = "sums over layers and m microbatches a step; pushed in forward and backward"
    found = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    columns = ("data", "R", "slack", "slots", *COLUMNS)
    pushed = ("pushed", "kept", "preferred", "÷ pushed")
    for name in (*columns, *pushed):
        found.add_column(name, justify="left" if name == "data" else "right")
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["ranks"], row["slack"], row["slots"]), []).append(row)
    for (data, ranks, slack, slots), own in groups.items():

        def total(key: str, own: Sequence[Row] = own) -> int:
            return sum(row[key] for row in own)

        without = 2 * total("kept_duplicates")
        found.add_row(
            *(data, str(ranks), f"{slack:g}", str(slots), str(len(own))),
            str(own[0]["microbatches"]),
            *(str(total(f"{mode}_{key}")) for key in ("busiest", "duplicates") for mode in _MODES),
            *(str(without), str(total("kept_pushed")), str(total("preferred_pushed"))),
            f"{total('preferred_pushed') / max(without, 1):.3f}",
        )
    console.print(found)


_MODES = ("kept", "preferred")
