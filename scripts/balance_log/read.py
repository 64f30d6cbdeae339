"""What `--moe-moonep-log-maxvio` left in a run's console log or TensorBoard folder."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from megatron_lm import log

PREFIX = "moonep_"
DRAWN = (
    "moonep_hottest_rank_without",
    "moonep_hottest_rank",
    "moonep_maxvio",
    "moonep_duplicates",
)
_SURE = DRAWN[0]  # at least 1 wherever moonep dispatched a row
_EVENTS = "tfevents"  # in the names of event files
_FLAGS = "--moe-token-dispatcher-type moonep --moe-moonep-log-maxvio"
_LAYER_TAG = re.compile(rf"moe/({PREFIX}\w+)_layer_(\d+)")

Series = dict[int, float]
"""A value at every logged iteration."""


class LogError(ValueError):
    """A path that holds no balance log; the message names it and what to do."""


@dataclass(frozen=True)
class Balance:
    """A run's values by their logged names: means over MoE layers, and those of each layer."""

    iterations: list[int]
    means: dict[str, list[float]]
    """One value an iteration."""
    layers: list[int] = field(default_factory=list)
    """MoE layers, numbered as in Megatron's tags: from 0, dense ones counted."""
    layer_values: dict[str, np.ndarray] = field(default_factory=dict)
    """[iterations, layers]; NaN where a layer was not logged."""
    skipped: int = 0
    """Iterations that lack one of `DRAWN`."""


def read(path: Path) -> Balance:
    """A console log of Megatron's training loop, or TensorBoard's event files: a folder, or one.

    Of an iteration that was logged twice, by a run that resumed before it, the later values count.

    Raises:
        LogError: there are no balance values, or one of them is no finite number.
        ImportError: event files, and TensorBoard is not installed.
    """
    if not path.exists():
        raise LogError(f"{path}: no such file or folder")
    events = path.is_dir() or _EVENTS in path.name
    means, layers = _events(path) if events else (_console(path), {})
    if not any(name in means for name in DRAWN):
        raise LogError(f"{path}: no {PREFIX}* values: train with {_FLAGS}")
    missing = [name for name in DRAWN if name not in means]
    if missing:
        raise LogError(f"{path}: {', '.join(missing)} never logged, though {', '.join(means)} are")
    _check_finite(path, means | {f"{n} of layer {i}": s for (n, i), s in layers.items()})
    if not any(means[_SURE].values()):
        raise LogError(f"{path}: {_SURE} is always 0: no layer used moonep; train with {_FLAGS}")
    logged = sorted(set().union(*means.values()))
    whole = [i for i in logged if all(i in means[name] for name in DRAWN)]
    if not whole:
        raise LogError(f"{path}: no iteration has all of {', '.join(DRAWN)}")
    numbers, values = _by_layer(layers, whole)
    rows = {name: [series.get(i, math.nan) for i in whole] for name, series in means.items()}
    return Balance(whole, rows, numbers, values, len(logged) - len(whole))


def _console(path: Path) -> dict[str, Series]:
    text = path.read_text(errors="replace")
    if not text.strip():
        raise LogError(f"{path}: the file is empty")
    entries = log.iterations(text)
    if not entries:
        raise LogError(f"{path}: no iteration lines of Megatron's training loop in this file")
    found: dict[str, Series] = {}
    for entry in entries:
        for name, value in entry.items():
            if name.startswith(PREFIX):
                found.setdefault(name, {})[int(entry["iteration"])] = value
    return found


def _events(path: Path) -> tuple[dict[str, Series], dict[tuple[str, int], Series]]:
    """Means by name, and values by name and layer."""
    if path.is_dir() and not any(path.glob(f"*{_EVENTS}*")):
        raise LogError(f"{path}: no event files (*{_EVENTS}*) in this folder")
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError(
            f"{path}: reading event files needs TensorBoard (pip install tensorboard): {error}"
        ) from error
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: all of them
    accumulator.Reload()
    means: dict[str, Series] = {}
    layers: dict[tuple[str, int], Series] = {}
    for tag in accumulator.Tags()["scalars"]:
        layer = _LAYER_TAG.fullmatch(tag)
        if layer or tag.startswith(PREFIX):
            series = {event.step: event.value for event in accumulator.Scalars(tag)}
            if layer:
                layers[layer[1], int(layer[2])] = series
            else:
                means[tag] = series
    return means, layers


def _check_finite(path: Path, values: dict[str, Series]) -> None:
    for name, series in values.items():
        for iteration, value in series.items():
            if not math.isfinite(value):
                raise LogError(f"{path}: {name} is {value} at iteration {iteration}")


def _by_layer(
    layers: dict[tuple[str, int], Series], iterations: list[int]
) -> tuple[list[int], dict[str, np.ndarray]]:
    """The MoE layers and their values."""
    # Megatron writes 0 for dense layers.
    numbers = sorted(i for (name, i), s in layers.items() if name == _SURE and any(s.values()))
    names = {name for name, _ in layers} if numbers else set()
    return numbers, {
        name: np.array(
            [[layers.get((name, n), {}).get(i, math.nan) for n in numbers] for i in iterations]
        )
        for name in names
    }
