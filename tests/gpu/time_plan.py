"""Prints the time of each part from routing map to destinations; one process on one GPU.

    PYTHONPATH=tests python tests/gpu/time_plan.py [--ranks 8,16,32,64,128] [--experts 896]
                                  [--planners best,trees] [--json FILE]

Every planner on drawn counts, and ``best`` on recorded routing (E = 64) where there is some.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from moonep_megatron.kernels import compact, counting, destinations, exchange, plan, sync
from plan_kernels import exchanged, random_map
from routings import random_counts

from moonep_megatron import kernels

CUDA = torch.device("cuda")
ROUTING = Path(__file__).parents[3] / "shared" / "routing"
TOKENS, TOPK = 8192, 8


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


def time_counting(experts):
    """Compaction, counting and the exchange of one rank with itself."""
    routing_map, probs = (x.to(CUDA) for x in random_map(TOKENS, experts, TOPK, 0))
    ids, _, _, counts = compact.compact(routing_map, probs, TOPK)
    compacting = microseconds(lambda: compact.compact(routing_map, probs, TOPK))
    alone = microseconds(lambda: counting.count(ids, experts))
    print(f"E={experts}: compact {compacting:.1f} us, count {alone:.1f} us")
    offset = 256
    memory = torch.zeros(offset + 2 * (experts + counting.HEADER), dtype=torch.int32, device=CUDA)
    setup = {
        "peers": torch.tensor([memory.data_ptr()], device=CUDA),
        "tokens": TOKENS,
        "max_tokens": TOKENS,
        "rank": 0,
        "layer": 0,
        "counts_offset": offset * 4,
        "flags_offset": 0,
        "control": torch.zeros(sync.CONTROL_INTS, dtype=torch.int32, device=CUDA),
        "fault": torch.zeros(len(sync.FAULT_FIELDS), dtype=torch.int32, pin_memory=True),
        "timeout_ns": 10**9,
    }
    alone = microseconds(lambda: exchange.exchange(counts_CE=counts, **setup))
    print(f"E={experts}: exchange of one rank {alone:.1f} us")


def recorded(ranks):
    """(name, counts [R, E]) of a few layers of recorded routing."""
    for path in sorted(ROUTING.glob("*_topk.npy")):
        ids = np.load(path, mmap_mode="r")
        for layer in (2, len(ids) // 2, len(ids) - 1):
            parts = np.array_split(np.asarray(ids[layer]), ranks)
            counts = np.stack([np.bincount(part.ravel(), minlength=64) for part in parts])
            yield f"{path.stem.removesuffix('_topk')} {layer}", torch.from_numpy(counts)


def time_plan(ranks, load, counts_RE, planner):
    """One row: the plan of rank 0, and its destinations."""
    experts = counts_RE.shape[1]
    own = counts_RE[0]
    flat = torch.repeat_interleave(torch.arange(experts), own).int()
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % TOPK), value=-1)
    ids, places, counts_CE = counting.count(flat.view(-1, TOPK).to(CUDA), experts)
    given = exchanged(kernels, counts_RE, 0, CUDA, counts_CE)
    homes = experts // ranks
    order = torch.arange(experts, dtype=torch.int32, device=CUDA).view(ranks, homes)
    solver = plan.Planner(ranks, experts, planner=planner, slots=homes, most_rows=1, device=CUDA)
    made = solver.plan(given, order, 0)
    row = {
        "ranks": ranks,
        "experts": experts,
        "load": load,
        "planner": planner,
        "rule": plan.RULES[int(made.rule)],
        "plan_us": microseconds(lambda: solver.plan(given, order, 0)),
        "destinations_us": microseconds(
            lambda: destinations.destinations(made, ids, places, given.first_CE, 0)
        ),
    }
    print(
        f"R={ranks} E={experts} {load}: {planner} ({row['rule']}) plan {row['plan_us']:.1f} us, "
        f"destinations {row['destinations_us']:.1f} us",
        flush=True,
    )
    return row


def numbers(text):
    return [int(word) for word in text.split(",")]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=numbers, default=[8, 16, 32, 64, 128])
    parser.add_argument("--experts", type=numbers, default=[896])
    parser.add_argument("--planners", type=lambda text: text.split(","), default=plan.PLANNERS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for experts in args.experts:
        time_counting(experts)
        for ranks in args.ranks:
            for load in ("zipf", "heavy", "hot rank", "hot half"):
                counts_RE = random_counts(load, ranks, experts, TOKENS * TOPK, 1)
                rows += [time_plan(ranks, load, counts_RE, planner) for planner in args.planners]
    for ranks in args.ranks:
        if 64 % ranks == 0:
            rows += [time_plan(ranks, *layer, "best") for layer in recorded(ranks)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
