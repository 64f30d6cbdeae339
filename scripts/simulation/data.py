"""Recorded routing: files of expert choices or counts, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simulation.trace import PATTERN, TraceError, read_trace

MOST_ROWS = 2**31 - 1


class DataError(ValueError):
    """A file that holds no routing; the message names the file and the field."""


@dataclass(frozen=True)
class DataSet:
    """Rows of every expert, layer by layer."""

    name: str
    total_LE: np.ndarray
    """int64 [layers, experts]"""

    @property
    def experts(self) -> int:
        return self.total_LE.shape[1]


def read(path: Path, experts: int | None = None, microbatches: int = 1) -> list[DataSet]:
    """The data sets of one file, or of all files of a folder by name.

    - ``.npy``, integers [layer, token, choice]: expert ids, -1 for none;
    - ``.npy``, integers [layer, expert]: counts;
    - ``.json``: ``{"logical_count": [[rows of expert 0, …], …]}``, a list a layer; where it has
      ``rank_count`` [layer][rank][expert] too, that must add up to it;
    - ``router_trace_rank*.jsonl``: Megatron's router trace (see `simulation.trace`), a data set for
      every step and microbatch, the ranks of a folder together.

    Args:
        path: the file or folder.
        experts: E of files with ids; default: their largest id + 1.
        microbatches: files with ids are cut into so many, a data set each.

    Raises:
        DataError: nothing to read, or a file that holds no routing.
    """
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix in (".npy", ".json"))
        traces = sorted(path.glob(PATTERN))
        if not files and not traces:
            raise DataError(f"{path}: no .npy or .json file and no {PATTERN} in this folder")
    elif path.suffix in (".npy", ".json", ".jsonl"):
        files, traces = ([], [path]) if path.suffix == ".jsonl" else ([path], [])
    else:
        raise DataError(f"{path}: neither a folder nor a .npy, .json or .jsonl file")
    sets = [one for file in files for one in _read_file(file, experts, microbatches)]
    return sets + _read_traces(traces, experts)


def together(sets: Sequence[DataSet], names: Sequence[str]) -> DataSet:
    """One data set of the named ones' rows, added layer by layer."""
    known = {one.name: one for one in sets}
    missing = [name for name in names if name not in known]
    if missing:
        raise DataError(f"--together {','.join(names)}: there is no {missing[0]} in --data")
    shapes = {known[name].total_LE.shape for name in names}
    if len(shapes) > 1:
        raise DataError(f"--together {','.join(names)}: the shapes {sorted(shapes)} differ")
    return DataSet("+".join(names), sum(known[name].total_LE for name in names))


def _read_traces(paths: Sequence[Path], experts: int | None) -> list[DataSet]:
    try:
        for path in paths:
            if path.stat().st_size == 0:
                raise DataError(f"{path}: the file is empty")
        return [DataSet(*one) for one in read_trace(paths, experts)] if paths else []
    except TraceError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror or error}") from error


def _read_file(path: Path, experts: int | None, microbatches: int) -> list[DataSet]:
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        if path.suffix == ".json":
            return [DataSet(path.name, _from_json(path))]
        parts = _from_array(path, experts, microbatches)
        cut = len(parts) > 1
        return [
            DataSet(path.name + f" microbatch {number}" * cut, part)
            for number, part in enumerate(parts)
        ]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _from_array(path: Path, experts: int | None, microbatches: int) -> list[np.ndarray]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: not a .npy file of numbers ({error})") from error
    if not isinstance(array, np.ndarray) or array.ndim not in (2, 3) or 0 in array.shape:
        shape = list(getattr(array, "shape", []))
        raise DataError(
            f"{path}: the array has shape {shape}: give ids [layer, token, choice] "
            "or counts [layer, expert]"
        )
    if array.ndim == 2:
        return [_checked(array, f"{path}: counts")]
    if array.dtype.kind not in "iu":
        raise DataError(f"{path}: ids have dtype {array.dtype}: give integers")
    low, high = int(array.min()), int(array.max())
    experts = high + 1 if experts is None else experts
    if low < -1 or high >= experts or experts < 1:
        raise DataError(f"{path}: ids hold {low}..{high}: give 0..{experts - 1}, or -1 for none")
    if microbatches > array.shape[1]:
        raise DataError(f"{path}: {array.shape[1]} tokens are no {microbatches} microbatches")
    return [_count(part, experts) for part in np.array_split(array, microbatches, axis=1)]


def _count(ids_LTK: np.ndarray, experts: int) -> np.ndarray:
    # -1 is counted in front and dropped
    flat = ids_LTK.reshape(len(ids_LTK), -1).astype(np.int64) + 1
    return np.stack([np.bincount(layer, minlength=experts + 1)[1:] for layer in flat])


def _from_json(path: Path) -> np.ndarray:
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no JSON ({error})") from error
    if not isinstance(content, dict) or "logical_count" not in content:
        raise DataError(f"{path}: no object with the key logical_count")
    counts = _checked(content["logical_count"], f"{path}: logical_count")
    if "rank_count" in content:
        _check_ranks(content["rank_count"], counts, f"{path}: rank_count")
    return counts


def _check_ranks(by_rank: Any, total_LE: np.ndarray, where: str) -> None:
    """Refuse counts by rank that are none, or do not add up."""
    layers, experts = total_LE.shape
    if not isinstance(by_rank, list) or len(by_rank) != layers:
        raise DataError(f"{where}: give a list for each of the {layers} layers of logical_count")
    for layer, counts in enumerate(by_rank):
        counts_RE = _checked(counts, f"{where}: layer {layer}", "rank")
        if counts_RE.shape[1] != experts or (counts_RE.sum(0) != total_LE[layer]).any():
            raise DataError(f"{where}: layer {layer} does not add up to logical_count")


def _checked(counts: Any, where: str, first: str = "layer") -> np.ndarray:
    """int64 [layers, experts], refused where these are no counts."""
    try:
        array = np.array(counts)
    except ValueError:
        array = np.array(None)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "iuf":
        raise DataError(f"{where}: give a list of {first}s, each a list of as many counts")
    for layer, expert in _first(~np.isfinite(array) | (array < 0) | (array > MOST_ROWS)):
        value = array[layer, expert]
        raise DataError(
            f"{where}: {first} {layer}, expert {expert} has {value} rows: give 0..{MOST_ROWS}"
        )
    for layer, expert in _first(array != np.floor(array)):
        value = array[layer, expert]
        raise DataError(
            f"{where}: {first} {layer}, expert {expert} has {value} rows: give a whole number"
        )
    return array.astype(np.int64)


def _first(wrong: np.ndarray) -> Iterable[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in np.argwhere(wrong)[:1]]
