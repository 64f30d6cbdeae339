"""Prints the time of each part from routing map to destinations; run on one GPU."""

import torch
from moonep_megatron.kernels import compact, counting, destinations, exchange, plan, sync
from plan_kernels import random_map
from routings import random_counts


def microseconds(call, rounds=50):
    """Median device time of a call, from a captured graph of twenty."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 20)
    return sorted(times)[rounds // 2]


def main(tokens=8192, topk=8, experts=896):
    device = torch.device("cuda")
    routing_map, probs = (x.to(device) for x in random_map(tokens, experts, topk, 0))
    ids, _, places, counts = compact.compact(routing_map, probs, topk)
    print(f"compact {microseconds(lambda: compact.compact(routing_map, probs, topk)):.1f} us")
    print(f"count {microseconds(lambda: counting.count(ids, experts)):.1f} us")
    offset = 256
    memory = torch.zeros(offset + 2 * (experts + counting.HEADER), dtype=torch.int32, device=device)
    control = torch.zeros(sync.CONTROL_INTS, dtype=torch.int32, device=device)
    setup = {
        "peers": torch.tensor([memory.data_ptr()], device=device),
        "tokens": tokens,
        "max_tokens": tokens,
        "rank": 0,
        "layer": 0,
        "counts_offset": offset * 4,
        "flags_offset": 0,
        "control": control,
        "fault": torch.zeros(len(sync.FAULT_FIELDS), dtype=torch.int32, pin_memory=True),
        "timeout_ns": 10**9,
    }
    alone = microseconds(lambda: exchange.exchange(counts_CE=counts, **setup))
    print(f"exchange, R=1: {alone:.1f} us")
    first = exchange.exchange(counts_CE=counts, **setup).first_CE
    for ranks in (8, 64):
        for planner in plan.PLANNERS:
            for load in ("zipf", "heavy", "hot rank"):
                _time_plan(ranks, experts, planner, load, (ids, places, first, counts))


def _time_plan(ranks, experts, planner, load, own):
    ids, places, first, counts_CE = own
    device = ids.device
    counts_RE = random_counts(load, ranks, experts, ids.numel(), 1).to(device)
    counts_RE[0] = counts_CE[:, :experts].sum(0)
    totals = torch.stack([counts_RE.sum(0), torch.zeros_like(counts_RE[0])]).int()
    given = exchange.Exchanged(first_CE=first, counts_RE=counts_RE.int(), totals_2E=totals)
    homes = experts // ranks
    order = torch.arange(experts, dtype=torch.int32, device=device).view(ranks, homes)
    solver = plan.Planner(ranks, experts, planner=planner, slots=homes, most_rows=1, device=device)
    made = solver.plan(given, order, 0)
    solving = microseconds(lambda: solver.plan(given, order, 0))
    placing = microseconds(lambda: destinations.destinations(made, ids, places, first, 0))
    print(
        f"R={ranks} {planner} {load} ({plan.RULES[int(made.rule)]}): "
        f"plan {solving:.1f} us, destinations {placing:.1f} us"
    )


if __name__ == "__main__":
    main()
