"""Routing map or ids to counts, and the exchange between ranks, on through to the destinations."""

import os

import harness
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")

from moonep_megatron.kernels import compact, counting, destinations, exchange, plan, sync
from plan_kernels import (
    check_compact,
    check_count,
    compare_plans,
    equal,
    home_order,
    ids_of,
    random_map,
)
from routed import barrier, poison, symmetric

from moonep_megatron import kernels
from moonep_megatron.backends.memory import Regions
from moonep_megatron.plan import destinations as reference_destinations
from moonep_megatron.plan import make_plan

CUDA = torch.device("cuda")
LAYER = 5
EPOCHS = 4
# experts of a rank, K, S, planner
SIZES = ((3, 2, 70, "pairs"), (16, 8, 1000, "best"), (9, 20, 130, "peel"))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory without values holds NaN, and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("experts", "topk", "dtype"),
    [
        (7, 2, torch.float64),
        (60, 4, torch.float16),
        (256, 8, torch.bfloat16),
        (896, 8, torch.float32),
        (1024, 40, torch.float32),
    ],
)
def test_compact(experts, topk, dtype):
    for tokens in (0, 1, 63, 64, 65, 1000):
        check_compact(kernels, CUDA, tokens, experts, topk, dtype, seed=tokens)
    check_compact(kernels, CUDA, 200, experts, topk, dtype, most=topk + 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_count(dtype):
    for tokens, experts, topk in ((0, 64, 6), (1, 64, 6), (517, 64, 6), (4096, 896, 8)):
        draw = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, experts, (tokens, topk), generator=draw, dtype=dtype)
        ids[tokens // 3 : tokens // 2] = experts - 1
        check_count(kernels, CUDA, ids, experts)
        if tokens > 1:
            ids[5, 1], ids[6, 2] = -5, experts
            if dtype == torch.int64:
                ids[7, 3] = 2**32 + 3
            check_count(kernels, CUDA, ids, experts)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_exchange_to_destinations(ranks):
    harness.run(ranks, _every_size)


@pytest.mark.parametrize("kind", ["bad ids", "excess", "tokens"])
def test_bad_input_of_one_rank_is_named_on_all(kind):
    harness.run(2, _bad_input, kind)


def _every_size(group, device):
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory = symmetric(group, device)
    ranks, rank = group.size(), group.rank()
    for homes, topk, most, planner in SIZES:
        experts = ranks * homes
        order = home_order(ranks, homes, seed=homes)
        solver = plan.Planner(
            ranks,
            experts,
            planner=planner,
            slots=homes,
            most_rows=ranks * most * topk,
            device=device,
        )
        setup = _setup(memory, experts, most)
        inputs = [_inputs(ranks, experts, topk, most, epoch) for epoch in range(EPOCHS)]
        on_device = [[t.to(device) for t in epoch[rank]] for epoch in inputs]
        # Each kernel once alone, for a first launch may wait for a spinning kernel; then all epochs
        # without a word between the hosts.
        _run(setup, on_device[0], topk, solver, order.to(device), torch.cuda.synchronize)
        barrier(group)
        got = [_run(setup, one, topk, solver, order.to(device), lambda: None) for one in on_device]
        barrier(group)
        for epoch in range(EPOCHS):
            _compare(got[epoch], inputs[epoch], topk, planner, order, rank)


def _setup(memory, experts, most):
    ranks, regions = memory.group.size(), Regions()
    flags = regions.add((sync.STAGES, ranks), torch.int32)
    counts = regions.add((2, ranks, experts + counting.HEADER), torch.int32)
    torch.cuda.synchronize()
    torch.distributed.barrier(memory.group)
    poison(memory.local(counts))
    barrier(memory.group)
    return {
        "peers": memory.peers,
        "max_tokens": most,
        "rank": memory.group.rank(),
        "layer": LAYER,
        "counts_offset": counts.offset,
        "flags_offset": flags.offset,
        "control": memory.control,
        "fault": memory.fault,
        "timeout_ns": harness.TIMEOUT_NS,
    }


def _inputs(ranks, experts, topk, most, epoch):
    """Of every rank: a routing map and probabilities, or ids; zero to S tokens."""
    tokens = [(most, 0, most // 2 + 1, 64)[(rank + epoch) % 4] for rank in range(ranks)]
    tokens = [min(s, most) for s in tokens]
    if epoch % 2 == 0:
        return [random_map(s, experts, topk, 100 * epoch + r) for r, s in enumerate(tokens)]
    draw = torch.Generator().manual_seed(epoch)
    hot = [torch.randint(-1, experts, (s, topk), generator=draw) for s in tokens]
    return [(torch.where(torch.rand(i.shape, generator=draw) < 0.5, 1, i).int(),) for i in hot]


def _run(setup, given, topk, solver, order, wait):
    rank = setup["rank"]
    if len(given) == 2:
        ids, _, places, counts = compact.compact(*given, topk)
    else:
        ids, places, counts = counting.count(given[0], solver.config.experts)
    wait()
    exchanged = exchange.exchange(counts_CE=counts, tokens=len(ids), **setup)
    wait()
    made = solver.plan(exchanged, order, rank)
    wait()
    there = destinations.destinations(made, ids, places, exchanged.first_CE, rank)
    wait()
    return exchanged, made, there


def _compare(got, given, topk, planner, order, rank):
    exchanged, made, there = got
    ranks, experts = exchanged.counts_RE.shape
    ids = [ids_of(one[0], topk)[0] if len(one) == 2 else one[0] for one in given]
    counts = torch.stack([torch.bincount(i[i >= 0], minlength=experts) for i in ids])
    equal("counts", exchanged.counts_RE, counts)
    equal("totals", exchanged.totals_2E[0], counts.sum(0))
    equal("totals of the ranks before", exchanged.totals_2E[1], counts[:rank].sum(0))
    expected = make_plan(counts, planner=planner, home_order_Rn=order)
    compare_plans(kernels, made, expected)
    wanted = reference_destinations(expected, counts, ids[rank], rank)
    for name, one, other in zip(("rank", "row"), there, wanted, strict=True):
        equal(f"{name} of rank {rank}'s entries, R={ranks}", one, other)


def _bad_input(group, device, kind):
    """Rank 1 brings bad input; the record on every rank says so, and the kernel ends."""
    memory = symmetric(group, device)
    experts, topk, most = 12, 2, 70
    setup = _setup(memory, experts, most)
    ids = torch.zeros(most, topk, dtype=torch.int32, device=device)
    record = [exchange.BAD_IDS, group.rank(), 1, LAYER, sync.EXCHANGED, 0, 3]
    if group.rank() == 1 and kind == "bad ids":
        ids[3], ids[69, 0] = experts, -2
    if kind == "tokens":
        record = [exchange.TOO_MANY_TOKENS, *record[1:5], most, most + 1]
        if group.rank() == 1:
            ids = torch.zeros(most + 1, topk, dtype=torch.int32, device=device)
    counts = counting.count(ids, experts)[2]
    if kind == "excess":
        record = [exchange.EXCESS_CHOICES, *record[1:6], 10]
        if group.rank() == 1:
            routing_map = torch.zeros(most, experts, dtype=torch.bool, device=device)
            routing_map[:5, :4] = True
            counts = compact.compact(routing_map, routing_map.float(), topk)[3]
    tokens = int(counts[:, experts].sum())
    exchange.exchange(counts_CE=counts, tokens=tokens, **setup)
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()
    assert memory.fault.tolist() == record, (memory.fault.tolist(), record)
    # The context is lost; nothing orderly can follow.
    os._exit(0)
