"""What the ranks do for one shape: every variant timed on every routing, then profiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from layer_bench import trace
from layer_bench.measure import MB, Bench, Results
from layer_bench.model import Layer, free
from layer_bench.options import BALANCED, IDEAL, Case, Shape, Variant
from layer_bench.routing import choices, hot_experts, loads, statistics
from moonep_megatron import metrics

# Of the variants that are profiled in all routings; the others are in the first.
MOONEP = "moonep"
Routings = dict[Case, Tensor]


def bench_shape(bench: Bench, shape: Shape, todo: Sequence[Variant]) -> None:
    """Measure variants on one shape; collective.

    The profiler slows every launch after its first use, so all times are taken before. The ideal
    is timed again at the end, for clocks drift.
    """
    routings = _routings(bench, shape)
    seen: dict[Case, Results] = {}
    layers: list[Layer] = []
    for variant in todo:
        bench.say("start", variant)
        outside = bench.outside()
        layer = _built(bench, shape, variant)
        if layer is None:
            continue
        layers.append(layer)
        if variant.dispatcher == IDEAL:
            _time_ideal(bench, layer)
        else:
            _time(bench, layer, routings, seen, outside)
    bench.say("start", "the end")
    for layer in layers:
        if layer.variant.dispatcher == IDEAL and len(layers) > 1:
            _time_ideal(bench, layer)
    if bench.cuda and bench.options.profile:
        for layer in layers:
            if layer.variant.dispatcher != IDEAL:
                _profile(bench, layer, routings)


def _routings(bench: Bench, shape: Shape) -> Routings:
    found: Routings = {}
    for case in bench.options.cases(shape):
        try:
            found[case] = choices(shape, bench.ranks, case)
        except ValueError as error:
            bench.say("note", f"left out: {error}")
    return found


def _built(bench: Bench, shape: Shape, variant: Variant) -> Layer | None:
    """The layer, or none where some rank can't build it."""
    layer, reason = None, ""
    try:
        layer = Layer(shape, variant, bench.options, bench.device)
    except (ImportError, TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}"
    reasons = [r for r in bench.gather(reason) if r]
    if not reasons:
        return layer
    bench.say("note", f"{shape.name} {variant} is left out: {reasons[0]}")
    free()
    return None


def _time_ideal(bench: Bench, layer: Layer) -> None:
    for _ in range(bench.options.warmups):
        bench.step(layer)
    row = _row(layer, BALANCED) | {"maxvio": 0.0, "hottest_rank": 1.0}
    bench.say("row", row | _times(bench, layer) | (bench.memory(layer) or {}))


def _time(
    bench: Bench, layer: Layer, routings: Routings, seen: dict[Case, Results], outside: float
) -> None:
    held = 0.0
    for case, ids in routings.items():
        layer.force(ids)
        held += bench.first_pass(layer)
        mine = bench.results(layer)
        wrong = mine.wrong(seen.setdefault(case, mine))
        for _ in range(bench.options.warmups):
            bench.step(layer)
        row = _row(layer, case) | _routing(layer, case, bench.ranks) | _times(bench, layer)
        row |= bench.memory(layer) or {}
        if bench.cuda:
            row["held_mb"] = bench.worst(held)
            row["outside_mb"] = bench.worst(bench.outside() - outside)
            row["peak_mb"] = row["pass_mb"] + row["held_mb"] + row["outside_mb"]
        if layer.variant.dispatcher.startswith(MOONEP):
            row |= _moved(layer)
        everyone = bench.gather(wrong)
        row["wrong"] = [f"rank {r}: {w}" for r, words in enumerate(everyone) for w in words]
        bench.say("row", row)


def _row(layer: Layer, case: Case) -> dict[str, Any]:
    return {
        "shape": layer.shape.name,
        "case": str(case),
        "kind": case.kind,
        "value": case.value,
        "dispatcher": layer.variant.dispatcher,
        "experts": layer.variant.experts,
        "notes": layer.notes,
        "wrong": [],
    }


def _routing(layer: Layer, case: Case, ranks: int) -> dict[str, Any]:
    shape = layer.shape
    row: dict[str, Any] = statistics(loads(shape, ranks, case), ranks)
    if case.kind == "one":
        row["hot_experts"] = hot_experts(shape, ranks, round(case.value * shape.rows))
    return row


def _times(bench: Bench, layer: Layer) -> dict[str, Any]:
    forward, both = bench.times(layer)
    return {"forward_samples_ms": forward, "samples_ms": both}


def _moved(layer: Layer) -> dict[str, Any]:
    """Duplicates of a pass; MB of weights pushed (in forward, and again in backward) and pulled."""
    with metrics.record() as records:
        output = layer.forward()
    layer.backward(output)
    layer.clear()
    names = ("duplicates", "busiest", "waves", "rule", "rows_per_rank")
    row = {name: records[0][name] for name in names}
    values = row["duplicates"] * layer.shape.expert_values
    return row | {"pushed_mb": 2 * values / MB, "pulled_mb": 4 * values / MB}


def _profile(bench: Bench, layer: Layer, routings: Routings) -> None:
    """moonep on every routing, other dispatchers on the first; a trace of the hottest even one."""
    moonep = layer.variant.dispatcher.startswith(MOONEP)
    cases = list(routings) if moonep else list(routings)[:1]
    pictured = max(cases, key=lambda case: (case.kind == "even", case.value))
    for case in cases:
        layer.force(routings[case])
        for _ in range(2):
            bench.step(layer)
        worst, events = trace.profile(bench, layer)
        bench.say("profile", _row(layer, case) | worst)
        if bench.options.trace and layer.variant.dispatcher == MOONEP and case == pictured:
            bench.say("trace", _row(layer, case) | {"events": events})
