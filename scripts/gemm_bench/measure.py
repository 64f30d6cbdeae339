"""Times of grouped products on one GPU, those that are compared taken in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

_FLUSH_BYTES = 256 << 20  # above the 50 MB of an H200's second-level cache


def medians_ms[Key](calls: Mapping[Key, Callable[[], None]], samples: int) -> dict[Key, float]:
    """Median milliseconds of each call, caches cold; taken in turn, so that clocks are alike."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for call in calls.values():
        call()
    taken: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in calls}
    for _ in range(samples):
        for key, call in calls.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            taken[key].append((begin, end))
    torch.cuda.synchronize()
    return {key: statistics.median(a.elapsed_time(b) for a, b in t) for key, t in taken.items()}
