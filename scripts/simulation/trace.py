"""Megatron's router trace: which experts each rank's tokens chose, step by step.

Written with ``--moe-routing-trace-path`` by ``megatron/core/transformer/moe/router_trace.py`` (read
in megatron-core 0.19 and Megatron-LM's main): one ``router_trace_rank<rank>.jsonl`` a rank, with a
record for every call of a router, ``{"step": 0, "block": "decoder", "layer": 3, "rank": 0,
"top_indices": [[12, 45, ...], ...], ...}``; records of prediction heads also have ``mtp_idx``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PATTERN = "router_trace_rank*.jsonl"

Layer = tuple[str, int, int]
"""Block, prediction head (-1 for none), number."""


class TraceError(ValueError):
    """A file that is no router trace; the message names file, line and field."""


def read_trace(files: Sequence[Path], experts: int | None) -> list[tuple[str, np.ndarray]]:
    """(name, int64 [layers, experts]) of every step and microbatch, the rows of all ranks added.

    The k-th record of a step, layer and rank is that of microbatch k. A layer that was recomputed
    in backward has recorded its microbatches twice.

    Args:
        files: one a rank.
        experts: E; default: the largest id + 1.

    Raises:
        TraceError: naming file, line and field.
    """
    chosen: dict[tuple[int, int], dict[Layer, list[np.ndarray]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for path in files:
        calls: dict[tuple[int, Layer], int] = defaultdict(int)
        for step, layer, ids in _records(path, experts):
            chosen[step, calls[step, layer]][layer].append(ids)
            calls[step, layer] += 1
    if not chosen:
        raise TraceError(f"{files[0]}: no records")
    layers = sorted({layer for one in chosen.values() for layer in one})
    if experts is None:
        everything = [ids for one in chosen.values() for parts in one.values() for ids in parts]
        experts = max(int(ids.max(initial=-1)) for ids in everything) + 1
    if experts < 1:
        raise TraceError(f"{files[0]}: top_indices: no token of any record chose an expert")
    several = max(microbatch for _, microbatch in chosen) > 0
    return [
        (
            f"step {step}" + f" microbatch {microbatch}" * several,
            np.stack([_count(one.get(layer, []), experts) for layer in layers]),
        )
        for (step, microbatch), one in sorted(chosen.items())
    ]


def _count(parts: Sequence[np.ndarray], experts: int) -> np.ndarray:
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *(ids.ravel() for ids in parts)])
    return np.bincount(flat[flat >= 0], minlength=experts)


def _records(path: Path, experts: int | None) -> Iterator[tuple[int, Layer, np.ndarray]]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}: line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{where}: no JSON ({error})") from error
            if not isinstance(record, dict):
                raise TraceError(f"{where}: no object")
            step, layer = (_whole(record, field, where) for field in ("step", "layer"))
            head = _whole(record, "mtp_idx", where) if "mtp_idx" in record else -1
            yield step, (str(record.get("block", "")), head, layer), _ids(record, experts, where)


def _whole(record: dict[str, Any], field: str, where: str) -> int:
    value = record.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TraceError(f"{where}: {field} is {value!r}: give a whole number")
    return value


def _ids(record: dict[str, Any], experts: int | None, where: str) -> np.ndarray:
    try:
        ids = np.array(record.get("top_indices"))
    except ValueError:
        ids = np.array(None)
    if ids.size == 0:
        return np.zeros((0, 1), dtype=np.int64)
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise TraceError(f"{where}: top_indices: give a list of tokens, each a list of expert ids")
    low, high = int(ids.min()), int(ids.max())
    if low < -1 or (experts is not None and high >= experts):
        most = "" if experts is None else str(experts - 1)
        raise TraceError(f"{where}: top_indices hold {low}..{high}: give 0..{most}, or -1 for none")
    return ids.astype(np.int64)
