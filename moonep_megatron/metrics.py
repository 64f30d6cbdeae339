"""Balance metrics of every layer: recorded for a caller, or written to Megatron's logs.

The violation of expert e is T_e / mean T - 1, with T_e the rows routed to it over all ranks of the
group: maxvio is the largest, minvio the smallest, avgvio the mean of absolute values. The *hottest
rank* is the rows of the busiest rank divided by the mean: without us, when every expert is computed
at home, and with us.

*Routed* rows are choices, K for each token, and every one is computed. *Arrived* rows are fewer: a
token reaches a rank once, however many of its experts are computed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_megatron.backends.base import Route
from moonep_megatron.dispatcher import recomputing
from moonep_megatron.experts import ExpertCall, group_rows

Record = dict[str, Any]
TRACKED = (
    "moonep_maxvio",
    "moonep_minvio",
    "moonep_avgvio",
    "moonep_hottest_rank_without",
    "moonep_hottest_rank",
    "moonep_duplicates",
    "moonep_busiest",
    "moonep_busiest_sent",
    "moonep_busiest_received",
    "moonep_pushed_mb",
)
RECORDED = ("maxvio", "minvio", "avgvio", "hottest_rank_without")
_records: list[Record] | None = None


@contextmanager
def record() -> Iterator[list[Record]]:
    """Record every forward pass of every MoonEP layer; collective, enter it on all ranks.

    Yields:
        A list that gets one dict a pass, recomputations left out: ``layer``; ``rows_per_rank`` [R]
        and ``per_expert`` [E], counted from the boundaries handed to the products;
        ``router_per_expert`` [E], counted from the routing map, None where a replayed CUDA graph
        kept that; ``arrived_rows_per_rank`` [R], its own tokens included; ``maxvio``, ``minvio``,
        ``avgvio``; ``hottest_rank_without``; ``duplicates``; ``busiest_sent`` and
        ``busiest_received`` (most experts that one rank sends or receives) and ``busiest``, the
        larger; ``waves``; ``rule``.
    """
    global _records
    previous, _records = _records, []
    try:
        yield _records
    finally:
        _records = previous


def recording() -> bool:
    """Whether passes are being recorded now."""
    return _records is not None and not recomputing()


def observe(layer: Any, call: ExpertCall) -> None:
    """Take the metrics of one pass; called by the layer before its experts compute."""
    if recording():
        assert _records is not None
        _records.append(_take(layer, call))
    if layer.moonep.log_maxvio and layer.training and not recomputing():
        _track(layer, call)


def balance(route: Route) -> dict[str, Tensor]:
    """Scalars of one plan, on the device of the counts, without communication or host sync."""
    counts_E = route.counts_RE.sum(0, dtype=torch.float64)
    ranks, experts = route.counts_RE.shape
    mean_E, mean_R = counts_E.mean().clamp(min=1e-9), counts_E.sum().clamp(min=1e-9) / ranks
    home_R = counts_E.view(ranks, experts // ranks).sum(1)
    violation_E = counts_E / mean_E - 1
    return {
        "maxvio": violation_E.max(),
        "minvio": violation_E.min(),
        "avgvio": violation_E.abs().mean(),
        "hottest_rank_without": home_R.max() / mean_R,
        "hottest_rank": route.plan.cap_R.max() / mean_R,
    }


def _take(layer: Any, call: ExpertCall) -> Record:
    plan, route = call.route.plan, call.route
    computed_RE = _gather(_computed_rows(call), layer.ep_group)
    router = layer.router_histogram
    if router is not None:
        router = _gather(router, layer.ep_group).sum(0).tolist()
    scalars = balance(route)
    return {
        "layer": layer.layer_number,
        "rows_per_rank": computed_RE.sum(1).tolist(),
        "per_expert": computed_RE.sum(0).tolist(),
        "router_per_expert": router,
        "arrived_rows_per_rank": _gather(_arrived_rows(call), layer.ep_group).tolist(),
        **{name: float(scalars[name]) for name in RECORDED},
        "duplicates": int(plan.duplicates),
        "busiest": int(plan.busiest),
        "busiest_sent": int(plan.sent_R.max()),
        "busiest_received": int(plan.received_R.max()),
        "waves": route.waves,
        "rule": plan.rule,
    }


def _computed_rows(call: ExpertCall) -> Tensor:
    """int64 [E], rows of every expert in this rank's launches."""
    plan = call.route.plan
    experts = plan.group_expert_RG[call.backend.rank].tolist()
    rows_E = torch.zeros(plan.rows_RE.shape[1], dtype=torch.int64)
    for first, handed in group_rows(call):
        bounds = handed.tolist() if isinstance(handed, Tensor) else handed
        for i in range(len(bounds) - 1):
            if bounds[i + 1] > bounds[i]:
                rows_E[experts[first + i]] += bounds[i + 1] - bounds[i]
    return rows_E


def _arrived_rows(call: ExpertCall) -> Tensor:
    """int64 scalar, receive rows of this rank that its groups read."""
    real = call.route.plan.group_start_RG1[call.backend.rank, -1]
    return torch.tensor(len(call.route.source_row_N[: int(real)].unique()))


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, *x.shape] on the host."""
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    everyone = [torch.empty_like(x, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, x.to(device), group=group)
    return torch.stack(everyone).cpu()


def _track(layer: Any, call: ExpertCall) -> None:
    """Add the pass to Megatron's MoE metrics, which its training loop writes and clears."""
    from megatron.core.transformer.moe.moe_logging import (  # noqa: PLC0415
        get_moe_metrics_tracker,
    )

    plan, config = call.route.plan, layer.config
    duplicates = plan.received_R.sum()
    copy_bytes = sum(p.weights()[0].nbytes for p in (call.home.fc1, call.home.fc2))
    values = {f"moonep_{name}": value for name, value in balance(call.route).items()}
    values["moonep_duplicates"] = duplicates
    values["moonep_busiest"] = plan.busiest_rank
    values["moonep_busiest_sent"] = plan.sent_R.max()
    values["moonep_busiest_received"] = plan.received_R.max()
    values["moonep_pushed_mb"] = duplicates * (copy_bytes / 1e6)
    device = call.route.source_row_N.device
    # As Megatron counts: multi-token prediction layers come behind the model's.
    layer_number = layer.layer_number + (config.num_layers if layer.is_mtp_layer else 0)
    for name in TRACKED:
        get_moe_metrics_tracker().record(
            name,
            values[name].float().to(device),
            layer_number,
            config.num_layers + (config.mtp_num_layers or 0),
        )
