"""Soak MoE layers: thousands of passes with random routing, ragged tokens and late ranks.

    python scripts/soak.py --json soak.json                       # 4 gloo ranks on CPUs
    python scripts/soak.py --backend symmetric --seconds 240      # 4 processes on the GPUs at hand

Every so many steps outputs and all gradients are compared with a dense reference in fp64; the plans
of all passes are compared across ranks; memory must not grow after the warm-up. Ends with 1 if
anything was wrong, and names a rank that hangs. On the symmetric backend ranks may share a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The reference, and the layers with forced routing, are those of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from bench_ranks import Listener
from rich.console import Console
from soaking import report
from soaking.ranks import SILENCE, run_rank
from soaking.settings import Settings

SIZES = {"collective": {"hidden": 32, "ffn": 32}, "symmetric": {"hidden": 256, "ffn": 128}}


def arguments(argv: Sequence[str] | None = None) -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=tuple(SIZES), default="collective")
    for name, default, text in (
        ("ranks", 4, "processes"),
        ("passes", 2000, "forwards with their backwards"),
        ("tokens", 64, "S, most tokens of a rank"),
        ("experts", 16, "E"),
        ("topk", 2, "K, experts a token"),
        ("slots", 2, "duplicate slots of a rank"),
        ("layers", 2, "layers, which share their memory"),
        ("seed", 1, "of everything that is drawn"),
        ("check-every", 20, "steps between comparisons with the reference"),
        ("block", 20, "steps between looks at plans and memory"),
        ("warmup", 200, "steps after which memory must not grow"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--hidden", type=int, help="H (collective 32, symmetric 256)")
    parser.add_argument("--ffn", type=int, help="F (collective 32, symmetric 128)")
    parser.add_argument("--delay", type=float, default=0.02, help="most seconds late (0.02)")
    parser.add_argument("--seconds", type=float, help="end after so long, at the end of a block")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args(argv)
    _check(parser, args)
    values = {name: value for name, value in vars(args).items() if name != "json"}
    sizes = {name: values[name] or SIZES[args.backend][name] for name in ("hidden", "ffn")}
    return Settings(**(values | sizes)), args.json


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        least = 0 if name in ("seed", "warmup", "delay") else 1
        if isinstance(value, int | float) and value < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if args.experts % args.ranks:
        parser.error(f"--experts {args.experts} is not divisible by --ranks {args.ranks}")
    if args.topk > args.experts:
        parser.error(f"--topk {args.topk} is above --experts {args.experts}")
    if args.slots > args.experts // args.ranks:
        parser.error(f"--slots {args.slots} is above --experts ÷ --ranks")
    if args.backend == "symmetric":
        import torch

        if not torch.cuda.is_available():
            parser.error("--backend symmetric needs a Hopper GPU: use --backend collective")


def main(argv: Sequence[str] | None = None) -> int:
    settings, path = arguments(argv)
    console, results = Console(highlight=False, width=None if sys.stdout.isatty() else 140), []
    _environment()

    def on_word(kind: str, what: dict[str, Any]) -> None:
        if kind == "result":
            results.append(what)
        elif what["rank"] == 0:
            console.print(
                f"{what['passes']:>6} passes in {what['seconds']:.0f} s, "
                f"{what['memory']['rss'] / 2**20:.0f} MiB resident",
                soft_wrap=True,
            )

    listener = Listener(settings.ranks, run_rank, (settings,), on_word, SILENCE)
    listener.listen()
    results.sort(key=lambda result: result["rank"])
    wrong = [*report.problems(results, settings), *listener.errors]
    console.print(report.table(results, settings))
    for problem in wrong:
        console.print(f"FAILED: {problem}", markup=False, soft_wrap=True)
    if not wrong:
        console.print("passed: every tensor compared, every plan agreed, memory flat")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        summary = {"settings": asdict(settings), "problems": wrong, "ranks": results}
        path.write_text(json.dumps(summary, indent=1) + "\n")
    return int(bool(wrong))


def _environment() -> None:
    """What the ranks inherit: one thread each, and symmetric memory on a GPU that they share."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


if __name__ == "__main__":
    sys.exit(main())
