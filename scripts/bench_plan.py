"""Time the reference planner on one CPU core.

    python scripts/bench_plan.py [--planner RULE] [--json FILE]

Time is that of ``make_plan`` from the counts to the finished plan, and of ``destinations`` for one
rank's entries; it is CPU time, so that waiting for a busy machine does not count. How good plans
are is what ``simulate.py`` says.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moonep_megatron.plan import PLANNERS, destinations, make_plan

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


def bench_time(planner: str, repeat: int, tokens: int, choices: int) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    print(f"{'R':>4} {'E':>5} {'load':>6} {'plan ms':>8} {'dest ms':>8} {'D':>4} {'U':>5}  rule")
    for ranks, experts in SIZES:
        for load in ("even", "zipf", "heavy", "ranks", "one"):
            ids = synthetic_ids(load, (ranks, experts, tokens, choices))
            counts = torch.stack([torch.bincount(x.view(-1), minlength=experts) for x in ids])
            plan = make_plan(counts, planner=planner)
            row: dict[str, object] = {
                "ranks": ranks,
                "experts": experts,
                "load": load,
                "plan_ms": cpu_milliseconds(lambda c=counts: make_plan(c, planner=planner), repeat),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--planner", choices=PLANNERS, default="best")
    parser.add_argument("--repeat", type=int, default=7, help="calls timed; the median counts")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a rank")
    parser.add_argument("--choices", type=int, default=8, help="experts a token")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = bench_time(args.planner, args.repeat, args.tokens, args.choices)
    if args.json:
        args.json.write_text(
            json.dumps({"planner": args.planner, "time": results}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
