"""Time the planner on one CPU core, and its quality on recorded routing.

    python scripts/bench_plan.py [--data DIR] [--json FILE]

Time is that of ``make_plan`` from the counts to the finished plan, and of ``destinations`` for one
rank's entries; it is CPU time, so that a busy machine does not count. Quality is D, the most
experts that a rank sends or receives, summed over the layers of every file in DIR, against a lower
bound that holds for any plan with exact balance. DIR holds ``*_topk.npy``, ids [layer, token, k],
and ``*.json`` with ``logical_count`` [layer][expert].
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from moonep_megatron.plan import PLANNERS, destinations, make_plan

KEYS = ["bound", *PLANNERS, "U"]
SIZES = [(8, 64), (8, 896), (16, 256), (32, 256), (64, 256), (64, 1024), (128, 1024)]


def synthetic_ids(load: str, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """int32 ids [R, S, K] of a named load."""
    ranks, experts, tokens, choices = shape
    weight_E = {
        "even": torch.ones(experts),
        "zipf": 1 / torch.arange(1, experts + 1),
        "heavy": torch.randn(experts).mul(2).exp(),
        # half of the ranks nearly twice as hot as the mean: no chain fits until most are peeled
        "ranks": torch.rand(ranks).lt(0.5).mul(1.8).add(0.1).repeat_interleave(experts // ranks),
        "one": torch.arange(experts).eq(0).float(),
    }[load]
    if load == "zipf":
        weight_E = weight_E[torch.randperm(experts)]
    ids = torch.multinomial(weight_E, ranks * tokens * choices, replacement=True)
    return ids.view(ranks, tokens, choices).int()


def cpu_milliseconds(call: Callable[[], object], repeat: int) -> float:
    call()
    times = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def bench_time(repeat: int, tokens: int, choices: int) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    print(f"{'R':>4} {'E':>5} {'load':>6} {'plan ms':>8} {'dest ms':>8} {'D':>4} {'U':>5}  rule")
    for ranks, experts in SIZES:
        for load in ("even", "zipf", "heavy", "ranks", "one"):
            ids = synthetic_ids(load, (ranks, experts, tokens, choices))
            counts = torch.stack([torch.bincount(x.view(-1), minlength=experts) for x in ids])
            plan = make_plan(counts)
            row: dict[str, object] = {
                "ranks": ranks,
                "experts": experts,
                "load": load,
                "plan_ms": cpu_milliseconds(lambda c=counts: make_plan(c), repeat),
                "destinations_ms": cpu_milliseconds(
                    lambda p=plan, c=counts, i=ids: destinations(p, c, i[0], 0), repeat
                ),
                "D": plan.busiest,
                "U": plan.duplicates,
                "rule": plan.rule,
            }
            results.append(row)
            print(
                f"{ranks:4} {experts:5} {load:>6} {row['plan_ms']:8.2f} "
                f"{row['destinations_ms']:8.2f} {plan.busiest:4} {plan.duplicates:5}  {plan.rule}",
                flush=True,
            )
    return results


def recorded(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(file name, counts [layer, expert]) of every file that has them."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith("_topk.npy"):
            layers = np.load(path)
            experts = int(layers.max()) + 1
            yield path.name, np.stack([np.bincount(x.ravel(), minlength=experts) for x in layers])
        elif path.suffix == ".json":
            yield path.name, np.array(json.loads(path.read_text())["logical_count"])


def bound(total_E: list[int], ranks: int) -> int:
    """A lower bound on D: a rank too full must send, and one with room receive, that many experts.

    Largest first is the best either can do; an expert larger than a cap leaves in several parts.
    """
    homes, total = len(total_E) // ranks, sum(total_E)
    cap = -(-total // ranks)
    least = 0
    for rank in range(ranks):
        own = total_E[rank * homes : (rank + 1) * homes]
        surplus = sum(own) - (total // ranks + (rank < total % ranks))
        if surplus > 0:
            sizes = [min(cap, t - done) for t in own for done in range(0, t, cap)]
        else:
            sizes = total_E[: rank * homes] + total_E[(rank + 1) * homes :]
        needed, experts = abs(surplus), 0
        for size in sorted(sizes, reverse=True):
            if needed <= 0:
                break
            needed, experts = needed - size, experts + 1
        least = max(least, experts)
    return least


def bench_quality(folder: Path, ranks: int) -> dict[str, object]:
    """Sums of D per file and planner, of U of ``best``, and the layers where best > pairs."""
    files: dict[str, dict[str, int]] = {}
    worse = 0
    for name, layers in recorded(folder):
        if layers.shape[1] % ranks:
            continue
        sums = dict.fromkeys(["layers", *KEYS], 0)
        for total_E in layers:
            counts = torch.zeros(ranks, len(total_E), dtype=torch.int64)
            counts[0] = torch.from_numpy(total_E)
            plans = {planner: make_plan(counts, planner=planner) for planner in PLANNERS}
            sums["layers"] += 1
            sums["bound"] += bound(total_E.tolist(), ranks)
            for planner, plan in plans.items():
                sums[planner] += plan.busiest
            sums["U"] += plans["best"].duplicates
            worse += plans["best"].busiest > plans["pairs"].busiest
        files[name] = sums
    total = {key: sum(sums[key] for sums in files.values()) for key in ["layers", *KEYS]}
    return {"ranks": ranks, "files": files, "total": total, "layers_above_pairs": worse}


def print_quality(result: dict[str, object]) -> None:
    print(f"\nR={result['ranks']}: D summed over layers, and U of best")
    print(f"{'file':>28} {'layers':>6} " + " ".join(f"{key:>6}" for key in KEYS))
    for name, sums in [*result["files"].items(), ("total", result["total"])]:
        print(f"{name:>28} {sums['layers']:6} " + " ".join(f"{sums[key]:6}" for key in KEYS))
    total = result["total"]
    print(
        f"best / bound = {total['best'] / max(total['bound'], 1):.3f}, "
        f"layers with best above pairs: {result['layers_above_pairs']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of recorded routing; prints quality")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32], help="R of quality")
    parser.add_argument("--repeat", type=int, default=7, help="calls timed; the median counts")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a rank")
    parser.add_argument("--choices", type=int, default=8, help="experts a token")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.data is not None and not args.data.is_dir():
        parser.error(f"--data {args.data} is not a folder")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, object] = {"time": bench_time(args.repeat, args.tokens, args.choices)}
    quality = [bench_quality(args.data, ranks) for ranks in args.ranks] if args.data else []
    for result in quality:
        print_quality(result)
    if args.json:
        args.json.write_text(json.dumps(results | {"quality": quality}, indent=1) + "\n")
    return int(any(result["layers_above_pairs"] for result in quality))


if __name__ == "__main__":
    sys.exit(main())
