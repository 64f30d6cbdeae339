"""What a profiler saw of one pass: host synchronisations, and transfers that nothing hides.

All functions but ``profile`` work on the events of a Chrome trace, times in microseconds.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from layer_bench.measure import Bench
from layer_bench.model import Layer

Event = dict[str, Any]
Interval = tuple[float, float]
# Passes under the profiler: the host runs ahead of the GPU in the last, as it does in training.
PASSES = 3
RANGE = "layer pass"
_HOST_SYNCS = re.compile(r"(cuda|cu)(Stream|Event|Device|Ctx|Context)Synchronize|(cuda|cu)Memcpy$")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_KINDS = (
    ("wait", re.compile(r"_wait|barrier")),
    ("push", re.compile(r"_push")),
    ("pull", re.compile(r"_pull")),
    ("nccl", re.compile(r"nccl", re.IGNORECASE)),
    ("gemm", re.compile(r"gemm|nvjet|xmma", re.IGNORECASE)),
)


def profile(bench: Bench, layer: Layer) -> tuple[dict[str, Any], list[Event]]:
    """Profile passes on all ranks; the summary of the worst rank and the events of each."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(PASSES):
            bench.align()
            with torch.profiler.record_function(f"{RANGE} {number}"):
                bench.step(layer)
        bench.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls, work = pass_of(events, f"{RANGE} {PASSES - 1}")
    everyone = bench.gather((summary(calls, work), work))
    # Counts and times of the worst rank, each.
    worst = {name: max(own[name] for own, _ in everyone) for name in everyone[0][0]}
    return worst, merged([events for _, events in everyone])


def pass_of(events: list[Event], name: str) -> tuple[list[Event], list[Event]]:
    """The CUDA calls that the host made within a range, and the GPU's work that they started.

    Raises:
        ValueError: the trace has no such range.
    """
    ranges = [e for e in events if e.get("name") == name and e.get("cat") == "user_annotation"]
    if not ranges:
        raise ValueError(f"the profiler's trace has no range {name!r}")
    begin, end = ranges[0]["ts"], ranges[0]["ts"] + ranges[0]["dur"]
    calls = [
        e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] <= end
    ]
    started = {e["args"]["correlation"] for e in calls if "correlation" in e.get("args", {})}
    work = [
        e
        for e in events
        if e.get("cat") in _WORK and e.get("args", {}).get("correlation") in started
    ]
    return calls, sorted(work, key=lambda e: e["ts"])


def summary(calls: list[Event], work: list[Event]) -> dict[str, float]:
    """Counts of what makes the host wait, launches, and milliseconds of transfers and idling."""
    spans: dict[str, list[Interval]] = {name: [] for name in ("push", "pull", "wait", "busy")}
    for event in work:
        kind = kind_of(event)
        span = (event["ts"], event["ts"] + event["dur"])
        spans[kind if kind in spans else "busy"].append(span)
    everything = [span for kind in spans.values() for span in kind]
    window = max(b for _, b in everything) - min(a for a, _ in everything) if everything else 0.0
    return {
        "host_syncs": sum(bool(_HOST_SYNCS.match(e["name"])) for e in calls),
        "copies_to_host": sum("DtoH" in e["name"] for e in work),
        "launches": sum("Launch" in e["name"] for e in calls),
        "push_ms": length(spans["push"]) / 1e3,
        "pull_ms": length(spans["pull"]) / 1e3,
        "exposed_push_ms": alone(spans["push"], spans["busy"]) / 1e3,
        "exposed_pull_ms": alone(spans["pull"], spans["busy"]) / 1e3,
        "idle_ms": (window - length(spans["busy"] + spans["push"] + spans["pull"])) / 1e3,
    }


def kind_of(event: Event) -> str:
    """Push, pull, wait (one block that waits for flags), nccl, gemm or other."""
    return next((kind for kind, pattern in _KINDS if pattern.search(event["name"])), "other")


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Disjoint ascending intervals that cover the same."""
    merged_spans: list[Interval] = []
    for begin, end in sorted(spans):
        if merged_spans and begin <= merged_spans[-1][1]:
            merged_spans[-1] = (merged_spans[-1][0], max(end, merged_spans[-1][1]))
        else:
            merged_spans.append((begin, end))
    return merged_spans


def length(spans: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in union(spans))


def alone(spans: list[Interval], others: list[Interval]) -> float:
    """How long some of ``spans`` lasts while none of ``others`` does."""
    return length(spans + others) - length(others)


def merged(ranks: list[list[Event]]) -> list[Event]:
    """One Chrome trace of all ranks: a process a rank, a thread a stream."""
    events: list[Event] = []
    for rank, work in enumerate(ranks):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        streams = sorted({event["args"]["stream"] for event in work})
        events += [_name("thread_name", rank, s, f"stream {s}") for s in streams]
        for event in work:
            place = {"ph": "X", "pid": rank, "tid": event["args"]["stream"]}
            kept = {name: event[name] for name in ("name", "ts", "dur")}
            events.append(kept | place | {"cat": kind_of(event)})
    return events


def _name(what: str, rank: int, stream: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": stream, "args": {"name": name}}
