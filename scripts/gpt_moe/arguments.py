"""The command line of scripts/train_gpt_moe.py, and what it refuses."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

DISPATCHERS = ("alltoall", "allgather", "moonep")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_gpt_moe.py",
        description="Train a small GPT mixture-of-experts with Megatron-Core on bytes of text.",
        epilog="Start it under torchrun: torchrun --nproc-per-node 4 scripts/train_gpt_moe.py ...",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--dispatcher", choices=DISPATCHERS, default="moonep")
    add_run(parser)
    add_training(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--save", type=Path, help="folder for checkpoints")
    files.add_argument("--save-interval", type=int, default=0, help="steps; 0: at the end only")
    files.add_argument("--load", type=Path, help="resume from what --save wrote there")
    files.add_argument("--json", type=Path, help="write losses and row counts here")
    files.add_argument("--record", type=Path, help="folder for counts, read by simulate.py")
    files.add_argument("--record-interval", type=int, default=1, help="record every so many steps")
    args = parser.parse_args(argv)
    if args.record_interval < 1:
        parser.error(f"--record-interval {args.record_interval} must be at least 1")
    if args.record_interval > 1 and args.record is None:
        parser.error(f"--record-interval {args.record_interval} needs --record FOLDER")
    return args


def add_run(parser: argparse.ArgumentParser) -> None:
    """How to train, shared with compare_dispatchers.py."""
    run = parser.add_argument_group("run")
    run.add_argument("--ep", type=int, help="expert-parallel ranks (default: all ranks)")
    run.add_argument("--slots", type=int, help="moonep: duplicate slots a rank (default: E/R)")
    run.add_argument("--planner", default="best", help="moonep: best, pairs, chain or peel")
    run.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    run.add_argument("--te", action="store_true", help="Transformer Engine's layers (GPU only)")
    run.add_argument("--overlap", action="store_true", help="overlap gradients' and weights' moves")
    run.add_argument("--recompute", choices=("none", "moe", "full"), default="none")
    run.add_argument("--seed", type=int, default=1)
    # For tests of failure: STEP:RANK, that rank raises in that step.
    run.add_argument("--fail-at", help=argparse.SUPPRESS)


def add_training(parser: argparse.ArgumentParser) -> None:
    """Model and training options, shared with compare_dispatchers.py."""
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--hidden", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--ffn", type=int, default=256, help="hidden width of one expert")
    model.add_argument("--experts", type=int, default=16)
    model.add_argument("--topk", type=int, default=2, help="experts a token goes to")
    model.add_argument("--shared-ffn", type=int, default=0, help="width of a shared expert")
    model.add_argument("--aux-loss", type=float, default=0.0, help="load balancing coefficient")
    model.add_argument("--expert-bias", action="store_true", help="balance by an expert bias")
    model.add_argument(
        "--router-skew",
        type=float,
        default=0.0,
        help="start with hot experts: scale router row e by (e+1)**-SKEW",
    )
    training = parser.add_argument_group("training")
    training.add_argument("--text", type=Path, help="file to train on (default: Python's library)")
    training.add_argument("--seq", type=int, default=128, help="tokens of a sample")
    training.add_argument("--micro-batch", type=int, default=2, help="samples a rank at a time")
    training.add_argument("--global-batch", type=int, help="samples a step (default: micro*ranks)")
    training.add_argument("--steps", type=int, default=50)
    training.add_argument("--lr", type=float, default=1e-3)


def check(args: argparse.Namespace, world: int) -> None:
    """Fill in defaults that depend on the number of ranks; refuse what cannot work.

    Raises:
        ValueError: naming flag, value and remedy.
    """
    args.ep = world if args.ep is None else args.ep
    if args.global_batch is None:
        args.global_batch = args.micro_batch * world
    for flag in (
        "ep",
        "layers",
        "hidden",
        "heads",
        "ffn",
        "experts",
        "topk",
        "seq",
        "micro_batch",
        "global_batch",
        "steps",
    ):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be at least 1")
    step = args.micro_batch * world
    for wrong, message in (
        (world % args.ep, f"--ep {args.ep} does not divide the {world} ranks: choose a divisor"),
        (
            args.experts % args.ep,
            f"--experts {args.experts} is not divisible by --ep {args.ep}: change one of them",
        ),
        (
            args.hidden % (2 * args.heads),
            f"--hidden {args.hidden} must be a multiple of twice --heads {args.heads}",
        ),
        (
            args.topk > args.experts,
            f"--topk {args.topk} is above --experts {args.experts}: lower it",
        ),
        (
            args.global_batch % step,
            f"--global-batch {args.global_batch} is not a multiple of --micro-batch "
            f"{args.micro_batch} x {world} ranks: use a multiple of {step}",
        ),
        (
            args.dispatcher != "moonep" and args.slots is not None,
            f"--slots {args.slots} needs --dispatcher moonep, not {args.dispatcher}",
        ),
        (
            args.save_interval and args.save is None,
            f"--save-interval {args.save_interval} needs --save FOLDER",
        ),
    ):
        if wrong:
            raise ValueError(message)
