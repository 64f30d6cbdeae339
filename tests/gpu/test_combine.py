"""presum and gather, bit for bit against fp32 sums in the same order, rounded once."""

import harness
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")

from moonep_megatron.kernels.gather import gather
from moonep_megatron.kernels.presum import presum
from routed import CASES, Routing, barrier, noise, poison, poisoned, row_memory, same, symmetric

EPOCHS = 4
SMS = (3, 1, 8, 5)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sums_and_gradients_come_home(ranks):
    harness.run(ranks, _every_case)


def _every_case(group, device):
    memory = symmetric(group, device)
    for case in CASES:
        rows = row_memory(memory, case)
        routings = [Routing(case, group.size(), epoch, device) for epoch in range(EPOCHS)]
        first, second = (_apart(group, rows, routings) for _ in range(2))
        together = _back_to_back(group, rows, routings)
        for epoch, routing in enumerate(routings):
            name = f"{case}, epoch {epoch}, rank {rows.rank}"
            for what in first[epoch]:
                same(f"second run, {name}, {what}", second[epoch][what], first[epoch][what])
            expected = _expected(rows.rank, epoch, routing)
            for what, tensor in expected.items():
                same(f"{name}, {what}", first[epoch][what], tensor)
            same(f"back to back, {name}", together[epoch], expected["out"])


def _grouped(routing, epoch, d):
    """Grouped rows and gradients of rank d, NaN behind its cap."""
    case, cap, seed = routing.case, routing.caps[d], 31 * epoch + 5 * d
    like = {"device": routing.device}
    rows = noise(routing.grouped, case.width, seed=seed, dtype=case.dtype, **like)
    d_probs = noise(1, routing.grouped, seed=seed + 1, dtype=torch.float32, **like)[0]
    poison(rows[cap:], d_probs[cap:])
    return rows, d_probs


def _tables(routing, d):
    """rows_of, source_row and cap of rank d, with plausible leftovers where nothing is said."""
    rows_of, source_row = routing.rows_of(d), routing.source_row(d)
    (behind,) = (source_row < 0).nonzero(as_tuple=True)
    source_row[behind] = behind.int()
    if not routing.by_token:
        rows_of[rows_of[:, 0] < -1] = 0
    cap = torch.tensor(routing.caps[d], dtype=torch.int32, device=routing.device)
    return rows_of, source_row, cap


def _apart(group, rows, routings):
    """One epoch after the other, with everything poisoned in between."""
    combine, d_probs = (rows.memory.local(r) for r in (rows.combine, rows.d_probs))
    results = []
    for epoch, routing in enumerate(routings):
        where = routing.rank[rows.rank], routing.row[rows.rank]
        grouped, gradient = _grouped(routing, epoch, rows.rank)
        out = _output(routing, rows.rank)
        entries = poisoned(*where[0].shape, dtype=torch.float32, device=routing.device)
        barrier(group)
        poison(combine)
        d_probs.copy_(gradient)
        presum(rows, grouped, *_tables(routing, rows.rank), sms=SMS[epoch])
        gather(rows, *where, out, entries, sms=SMS[epoch])
        barrier(group)
        results.append({"combine": combine.clone(), "out": out, "d_probs": entries})
    barrier(group)
    return results


def _back_to_back(group, rows, routings):
    """All epochs without a word between the hosts: only flags keep the combine rows apart."""
    grouped = [_grouped(routing, epoch, rows.rank)[0] for epoch, routing in enumerate(routings)]
    tables = [_tables(routing, rows.rank) for routing in routings]
    outs = [_output(routing, rows.rank) for routing in routings]
    barrier(group)
    for epoch, routing in enumerate(routings):
        presum(rows, grouped[epoch], *tables[epoch], sms=SMS[epoch])
        where = routing.rank[rows.rank], routing.row[rows.rank]
        gather(rows, *where, outs[epoch], sms=SMS[epoch])
    barrier(group)
    return outs


def _output(routing, rank):
    """Poisoned rows that do not lie side by side."""
    shape = len(routing.rank[rank]), 2 * routing.case.width
    wide = poisoned(*shape, dtype=routing.case.dtype, device=routing.device)
    return wide[:, : routing.case.width]


def _expected(rank, epoch, routing):
    grouped = [_grouped(routing, epoch, d) for d in range(routing.ranks)]
    combine = [routing.presummed(d, grouped[d][0]) for d in range(routing.ranks)]
    return {
        "combine": combine[rank],
        "out": routing.gathered(rank, combine),
        "d_probs": routing.returned(rank, [gradient for _, gradient in grouped]),
    }
