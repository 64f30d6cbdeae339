"""Time every kernel against its ceiling, measured in the same run.

    python scripts/bench_kernels.py [--only dispatch,gather] [--json FILE]

One process a GPU; the GPUs must reach each other's memory. A rate is the bytes that must cross
the busiest link in one direction (or, for presum, that memory must read and write) over the time
of the slowest rank, median of all passes; all ranks begin together. The ceiling is a plain copy
over the same link, by number of SMs, and for presum also torch's copy within a GPU. Every timed
configuration is checked as well. Ends with 1 if anything failed or was wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kernel_bench import report
from kernel_bench.ranks import SECTIONS, Options, Shape, run
from rich.console import Console

NO_BANDWIDTHS = "All ranks share one GPU: the numbers say nothing about bandwidth."


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names, help=f"sections, of {','.join(SECTIONS)}")
    parser.add_argument("--ranks", type=int, help="processes (default: one a GPU)")
    parser.add_argument("--same-gpu", action="store_true", help="all on one GPU; no bandwidths")
    parser.add_argument("--sms", type=_integers, default=(8, 12, 16), help="default 8,12,16")
    parser.add_argument(
        "--maxvio",
        type=lambda text: tuple(float(part) for part in text.split(",")),
        default=(0.0, 1.0, 3.0, 6.0, 12.0),
        help="loads of the hottest expert over the mean, less 1 (default 0,1,3,6,12)",
    )
    parser.add_argument(
        "--shape",
        type=lambda text: Shape(*_integers(text)),
        action="append",
        help="S,H,K,E of rows, may be repeated (default 8192,7168,8,64)",
    )
    parser.add_argument(
        "--expert", type=_integers, default=(7168, 2048), help="H,F of weights (7168,2048)"
    )
    parser.add_argument("--routed-experts", type=int, default=896, help="E of the plan (896)")
    parser.add_argument("--samples", type=int, help="timed passes (default 21; 3 on one GPU)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args(argv)
    _check(parser, args)
    return args


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted({*names} - {*SECTIONS})
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown} unknown: of {', '.join(SECTIONS)}")
    return names


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count()
    if gpus == 0:
        parser.error("no GPU found: the kernels need Hopper GPUs")
    if args.ranks is None:
        args.ranks = max(2, gpus) if not args.same_gpu else 2
    if args.ranks < 2:
        parser.error(f"--ranks {args.ranks}: a link has two ends, give at least 2")
    if args.ranks > gpus and not args.same_gpu:
        parser.error(
            f"{args.ranks} ranks on {gpus} GPU(s): give --ranks {gpus} or less, or --same-gpu to "
            "run them all on one GPU, without bandwidths"
        )
    args.shape = args.shape or [Shape(8192, 7168, 8, 64)]
    for shape in args.shape:
        if shape.experts % args.ranks or shape.topk >= shape.experts or shape.width % 8:
            parser.error(
                f"--shape {shape}: E must be a multiple of {args.ranks} ranks and above K, and H a "
                "multiple of 8"
            )
        if max(args.maxvio) > shape.experts - 1:
            parser.error(f"--maxvio {max(args.maxvio)}: {shape.experts} experts reach E-1 at most")
    if min(args.maxvio) < 0 or min(args.sms) < 1 or len(args.expert) != 2:
        parser.error("--maxvio from 0 on, --sms from 1 on, --expert H,F")
    args.samples = args.samples or (3 if args.same_gpu else 21)
    if args.samples < 2:
        parser.error("--samples from 2 on")


def main() -> int:
    args = arguments()
    options = Options(
        ranks=args.ranks,
        same_gpu=args.same_gpu,
        sms=tuple(sorted({*args.sms})),
        loads=args.maxvio,
        shapes=tuple(args.shape),
        expert=args.expert,
        routed_experts=args.routed_experts,
        samples=args.samples,
    )
    # Without the copies there would be no ceilings.
    sections = [name for name in SECTIONS if not args.only or name in ("copy", *args.only)]
    console, begin, rows = Console(width=150), time.perf_counter(), []

    def on_start(section: str) -> None:
        print(f"[{time.perf_counter() - begin:5.1f} s] {section}", flush=True)

    def on_row(row: dict[str, Any]) -> None:
        rows.append(row)

    if args.same_gpu:
        print(NO_BANDWIDTHS, flush=True)
    failures = run(options, sections, on_start, on_row)
    report.add_ratios(rows)
    seconds = time.perf_counter() - begin
    if args.json:
        report.write(args.json, options, rows, failures, seconds)
    report.show(console, rows, failures)
    if args.same_gpu:
        print(NO_BANDWIDTHS)
    print(f"{len(rows)} configurations in {seconds:.0f} s", flush=True)
    return int(bool(failures) or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
