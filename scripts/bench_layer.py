"""Time one MoE layer under moonep and Megatron's dispatchers, beside its experts alone.

    python scripts/bench_layer.py --json layer.json --png layer.png --trace overlap.json

One process a GPU, all of them one expert-parallel group; bf16, SwiGLU, gradients added into fp32
``main_grad``. Each routing is forced: balanced; rank 0 that many times as hot as the mean, its
surplus on as few of its experts as possible (*one*) or on all of them (*even*); and one hot expert
(*maxvio*). A time is the median over passes of the slowest rank, all ranks beginning together.
The *ideal* is the experts alone, with moonep's products and activation, balanced rows in place;
*te* and *ours* say whose experts the other dispatchers ran. Every timed routing is checked against
the first dispatcher's output and gradients. Ends with 1 if anything failed or was wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from layer_bench import figure, report
from layer_bench.options import CASES, DISPATCHERS, FORMS, SHAPES, Options, Shape, importable
from layer_bench.ranks import run
from rich.console import Console

NO_SPEED = "On CPUs nothing is said about speed: this only shows that everything runs."


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="processes (default: one a GPU; 2 on CPUs)")
    parser.add_argument("--shapes", type=_words(SHAPES), help="of " + ", ".join(map(str, SHAPES)))
    parser.add_argument(
        "--shape", type=_shape, action="append", default=[], help="name:H,F,E,K,S, may be repeated"
    )
    parser.add_argument(
        "--dispatchers",
        type=_words(DISPATCHERS),
        help=f"of {','.join(DISPATCHERS)} (default: all that can run but {' and '.join(FORMS)})",
    )
    parser.add_argument(
        "--experts",
        type=_words(("te", "ours")),
        help="of Megatron's dispatchers: te, ours (default: both that can run)",
    )
    parser.add_argument("--factors", type=_numbers, default=(1.0, 1.25, 1.5, 2.0))
    parser.add_argument("--cases", type=_words(CASES), default=CASES)
    parser.add_argument("--maxvio", type=_numbers, default=(2.0, 5.0, 12.0))
    parser.add_argument("--slots", type=int, help="duplicate slots a rank of moonep (default: E/R)")
    parser.add_argument("--iterations", type=int, default=12, help="timed ones of each routing")
    parser.add_argument("--warmups", type=int, default=4)
    parser.add_argument("--no-profile", action="store_true", help="no host syncs, no exposed times")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--png", type=Path, help="write a picture of the times to this file")
    parser.add_argument(
        "--trace",
        type=Path,
        help="write Chrome traces of moonep's pass under the hottest even routing, and pictures of "
        "them, to this file (the shape's name is put in)",
    )
    args = parser.parse_args(argv)
    _complete(args)
    _check(parser, args)
    return args


def _words(known: Any) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{unknown} unknown: of {', '.join(known)}")
        return words

    return parse


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def _shape(text: str) -> Shape:
    name, _, sizes = text.partition(":")
    try:
        return Shape(name, *(int(size) for size in sizes.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not name:H,F,E,K,S") from None


def _complete(args: argparse.Namespace) -> None:
    """Fill in what depends on the machine."""
    cpu = args.device == "cpu"
    if args.ranks is None:
        args.ranks = 2 if cpu else torch.cuda.device_count()
    if args.shapes is None:
        args.shapes = () if args.shape else (("tiny",) if cpu else ("A", "B", "C"))
    args.shape = [*(SHAPES[name] for name in args.shapes), *args.shape]
    args.missing = []
    if args.experts is None:
        te = not cpu and importable("transformer_engine")
        args.experts = ("te", "ours") if te else ("ours",)
        if not te and not cpu:
            args.missing.append("transformer_engine is missing: its experts are left out")
    if args.dispatchers is None:
        flex = not cpu and importable("deep_ep")
        left_out = {*FORMS} | (set() if flex else {"flex"})
        args.dispatchers = tuple(name for name in DISPATCHERS if name not in left_out)
        if not flex and not cpu:
            args.missing.append("deep_ep is missing: flex is left out")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus == 0:
        parser.error("no GPU found: use --device cpu to see only that it runs")
    if args.device == "cpu" and gpus:
        parser.error(f"--device cpu, but there are {gpus} GPUs: set CUDA_VISIBLE_DEVICES=''")
    if args.ranks < 1 or (args.device == "cuda" and args.ranks > gpus):
        parser.error(f"--ranks {args.ranks}: from 1 to the {gpus} GPUs, one process each")
    if "moonep-redispatch" in args.dispatchers and args.device == "cpu":
        parser.error("--dispatchers moonep-redispatch: dispatching again needs the GPU's backend")
    if "te" in args.experts and (args.device == "cpu" or not importable("transformer_engine")):
        parser.error("--experts te: transformer_engine and a GPU are needed")
    _check_shapes(parser, args)
    if min((*args.factors, 1)) < 1 or max((*args.factors, 1)) > args.ranks:
        parser.error(f"--factors {args.factors}: from 1 to the {args.ranks} ranks")
    if min((*args.maxvio, 0)) < 0 or not (args.factors or args.maxvio):
        parser.error("--maxvio from 0 on; --factors and --maxvio are not both empty")
    if args.slots is not None and args.slots < 1:
        parser.error(f"--slots {args.slots}: from 1 on")
    if args.iterations < 2 or args.warmups < 0:
        parser.error("--iterations from 2 on, --warmups from 0 on")


def _check_shapes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for shape in args.shape:
        sizes = (shape.width, shape.ffn, shape.experts, shape.topk, shape.tokens)
        if min(sizes) < 1 or shape.experts % args.ranks or shape.topk > shape.experts:
            parser.error(
                f"--shape {shape}: sizes from 1 on, E a multiple of the {args.ranks} ranks, K at "
                "most E"
            )
        if shape.width % 8 or shape.ffn % 8:
            parser.error(f"--shape {shape}: H and F must be multiples of 8")
    if len({shape.name for shape in args.shape}) < len(args.shape):
        parser.error("--shape: two shapes have one name")


def options_of(args: argparse.Namespace) -> Options:
    return Options(
        device=args.device,
        ranks=args.ranks,
        shapes=tuple(args.shape),
        dispatchers=args.dispatchers,
        experts=args.experts,
        factors=args.factors,
        kinds=args.cases,
        maxvios=args.maxvio,
        slots=args.slots,
        iterations=args.iterations,
        warmups=args.warmups,
        profile=not args.no_profile,
        trace=args.trace,
    )


def write_trace(path: Path, traced: dict[str, Any]) -> None:
    """The Chrome trace, and a picture of it beside it."""
    path = path.with_name(f"{path.stem}-{traced['shape']}{path.suffix or '.json'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": traced["events"]}))
    title = f"moonep, one forward and backward of shape {traced['shape']}, {traced['case']}"
    figure.overlap(traced["events"], title, path.with_suffix(".png"))


def main() -> int:
    args = arguments()
    options = options_of(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are stopped, too
    begin, notes = time.perf_counter(), list(args.missing)
    rows: list[dict[str, Any]] = []
    profiles: list[dict[str, Any]] = []

    def on_word(kind: str, what: Any) -> None:
        if kind == "row":
            rows.append(what)
            print(report.line(what), flush=True)
        elif kind == "profile":
            profiles.append(what)
        elif kind == "trace":
            write_trace(args.trace, what)
        elif kind == "note":
            notes.append(what)
            print(what, flush=True)
        else:
            print(f"[{time.perf_counter() - begin:5.1f} s] {what}", flush=True)

    failures = run(options, on_word)
    rows = report.together(rows, profiles)
    seconds = time.perf_counter() - begin
    if args.json:
        report.write(args.json, options, rows, notes, failures, seconds)
    if args.png and rows:
        figure.draw(rows, options.shapes, args.png)
    report.show(Console(width=190, highlight=False), options, rows, notes, failures)
    if args.device == "cpu":
        print(NO_SPEED)
    print(f"{len(rows)} configurations in {seconds:.0f} s", flush=True)
    return int(bool(failures) or not rows or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
