"""Dispatch, bit for bit against a routing worked out in torch; nothing else may be written."""

import harness
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")

from moonep_megatron.kernels.dispatch import dispatch, free_receive
from routed import CASES, Routing, barrier, poison, row_memory, same, symmetric

EPOCHS = 4
SMS = (3, 1, 8, 5)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_rows_and_metadata_arrive_where_the_plan_says(ranks):
    harness.run(ranks, _every_case)


def _every_case(group, device):
    memory = symmetric(group, device)
    for case in CASES:
        routings = [Routing(case, group.size(), epoch, device) for epoch in range(EPOCHS)]
        rows = row_memory(memory, case)
        # Twice over, so that the second run meets other epochs and sizes in memory.
        first, second = (_run(group, rows, routings) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            for name in one:
                same(f"second run, {case}, {name}", other[name], one[name])
        for epoch, (routing, got) in enumerate(zip(routings, first, strict=True)):
            _compare(f"{case}, epoch {epoch}, rank {rows.rank}", rows.rank, epoch, routing, got)


def _run(group, rows, routings):
    """All epochs without a word between the hosts; what each left on this rank."""
    regions = {
        name: rows.memory.local(getattr(rows, name))
        for name in ("receive", "rows_of", "source_row", "probs")
    }
    inputs = [_inputs(routing, epoch, rows.rank) for epoch, routing in enumerate(routings)]
    barrier(group)
    poison(*regions.values())
    barrier(group)
    results = []
    for epoch, (routing, (x, y, probs)) in enumerate(zip(routings, inputs, strict=True)):
        where = routing.rank[rows.rank], routing.row[rows.rank]
        dispatch(rows, x, *where, probs, sms=SMS[epoch])
        result = {name: region.clone() for name, region in regions.items()}
        # From here on no other rank writes until it is told that the rows are free.
        poison(*regions.values())
        free_receive(rows)
        dispatch(rows, y, *where, sms=SMS[epoch])
        result["rows alone"] = regions["receive"].clone()
        for name in ("rows_of", "source_row", "probs"):
            result[f"{name} untouched"] = regions[name].clone()
        poison(*regions.values())
        free_receive(rows)
        results.append(result)
    barrier(group)
    return results


def _inputs(routing, epoch, rank):
    case = routing.case
    return (
        routing.per_rank(0, epoch, case.dtype, case.width)[rank],
        routing.per_rank(1, epoch, case.dtype, case.width)[rank],
        routing.per_rank(2, epoch, torch.float32, case.topk)[rank].contiguous(),
    )


def _compare(name, rank, epoch, routing, got):
    case = routing.case
    x, y = (routing.per_rank(kind, epoch, case.dtype, case.width) for kind in (0, 1))
    probs = routing.per_rank(2, epoch, torch.float32, case.topk)
    expected = {
        "receive": routing.received(rank, x),
        "rows alone": routing.received(rank, y),
        "rows_of": routing.rows_of(rank),
        "source_row": routing.source_row(rank),
        "probs": routing.probs(rank, probs),
    }
    for what, tensor in expected.items():
        same(f"{name}, {what}", got[what], tensor)
    for what in ("rows_of", "source_row", "probs"):
        untouched = got[f"{what} untouched"]
        poisoned = untouched.clone()
        poison(poisoned)
        same(f"{name}, {what} after rows alone", untouched, poisoned)
