"""Train one GPT-MoE under several dispatchers, from one seed, and compare what they computed.

    python scripts/compare_dispatchers.py --ranks 4 --json compare.json --png compare.png

Starts the ranks itself, on GPUs where there are any. Fails (exit code 1) when losses differ, or
when moonep gave any rank another number of rows than S*K. Two runs in bf16 drift apart whatever the
dispatcher; over many steps, measure how far, and hold moonep to it and to itself, bit for bit:

    python scripts/compare_dispatchers.py --dtype bf16 --steps 200 --repeat 3
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torchrun
from gpt_moe import arguments, figure
from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).with_name("train_gpt_moe.py")
RELATIVE_LOSS = {"fp32": 1e-4, "bf16": 1e-2}
"""How far losses may differ at any step; bf16 rounds each product to 3 digits."""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are stopped too
    try:
        arguments.check(copy.copy(args), args.ranks)
        runs = {name: [run(args, name) for _ in range(args.repeat)] for name in args.dispatchers}
    except (ValueError, RuntimeError) as error:
        console.print(f"[red]error:[/red] {error}", soft_wrap=True)
        return 1
    results = {name: repeated[0] for name, repeated in runs.items()}
    balanced = results[args.dispatchers[0]]["balanced_rows"]
    repeats = repetition({name: [r["loss"] for r in each] for name, each in runs.items()})
    # Where Megatron's own runs differ, that says what equal is.
    tolerance = math.inf if repeats["spread"] else RELATIVE_LOSS[args.dtype]
    problems = check(results, balanced, tolerance) + repeats["problems"]
    write(args, results, balanced, problems, repeats)
    report(console, args, results, balanced, problems)
    if args.repeat > 1:
        report_repeats(console, repeats)
    return 1 if problems else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare MoE token dispatchers on the same model, text and seed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--dispatchers", nargs="+", choices=arguments.DISPATCHERS, default=["alltoall", "moonep"]
    )
    parser.add_argument("--ranks", type=int, help="processes: on GPUs, GPUs (default: all, or 4)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of every dispatcher")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a run may take")
    parser.add_argument("--png", type=Path, help="write a picture here")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    arguments.add_run(parser)
    arguments.add_training(parser)
    # Rows of unequal length and no balancing loss: a new router would be nearly balanced.
    # Few and small steps: rounding differs between dispatchers, and once a near tie in some
    # router falls the other way, two right runs drift apart.
    parser.set_defaults(steps=20, lr=5e-4, router_skew=1.0)
    args = parser.parse_args(argv)
    if args.ranks is None:
        args.ranks = gpus() or 4
    for flag in ("ranks", "repeat"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} {getattr(args, flag)} must be at least 1")
    args.dispatcher, args.save, args.save_interval = "moonep", None, 0  # for arguments.check
    return args


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run(args: argparse.Namespace, dispatcher: str) -> dict[str, Any]:
    """Train under one dispatcher; what train_gpt_moe.py wrote.

    Raises:
        RuntimeError: the run failed or took longer than --timeout; no rank is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run.json")
        command = [*torchrun.command(args.ranks), str(TRAIN)]
        command += ["--dispatcher", dispatcher, "--json", str(out)]
        command += options(args, dispatcher)
        process = subprocess.Popen(command, env=torchrun.environment(args.ranks))
        code = torchrun.wait(process, args.timeout)
        if code is None:
            raise RuntimeError(
                f"{dispatcher} took longer than --timeout {args.timeout:g} seconds and was stopped"
            )
        if code != 0:
            raise RuntimeError(
                f"the {dispatcher} run failed (exit code {code}); the first error stands above"
            )
        return json.loads(out.read_text())


def options(args: argparse.Namespace, dispatcher: str) -> list[str]:
    """The flags that this script shares with train_gpt_moe.py, as given."""
    shared = argparse.ArgumentParser()
    arguments.add_run(shared)
    arguments.add_training(shared)
    flags = []
    for action in shared._actions:
        value = getattr(args, action.dest, None)
        moonep_only = action.dest in ("slots", "planner") and dispatcher != "moonep"
        if value is None or value is False or moonep_only:
            continue
        flags.append(action.option_strings[0])
        if value is not True:
            flags.append(str(value))
    return flags


def relative_difference(results: dict[str, dict[str, Any]]) -> float:
    """Largest relative difference of a loss from the first dispatcher's, over all steps."""
    first, *others = (result["loss"] for result in results.values())
    differences = [
        abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True)
    ]
    return max(differences, key=lambda x: (math.isnan(x), x), default=0.0)  # a NaN is the worst


def check(results: dict[str, dict[str, Any]], balanced: int, tolerance: float) -> list[str]:
    """What is wrong, in sentences."""
    problems = []
    difference = relative_difference(results)
    if not difference <= tolerance:  # a NaN is wrong, too
        problems.append(f"losses differ by {difference:.1e} relative, above {tolerance:.0e}")
    for step, layers in enumerate(results.get("moonep", {}).get("rows_per_rank", [])):
        for layer, rows in enumerate(layers):
            if any(count != balanced for count in rows):
                problems.append(
                    f"moonep, step {step + 1}, MoE layer {layer + 1}: rows {rows} are not all "
                    f"S*K = {balanced}"
                )
    return problems


def repetition(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """What repeated runs say, each a list of losses, by dispatcher.

    Returns ``spread``, the largest relative difference between two runs of Megatron's dispatchers
    at any step (0 for one run); ``distance``, the largest over the steps from moonep to the nearest
    of them; ``problems``, in sentences: moonep's runs differ in a bit, or it lies farther from all
    others than they do from each other.
    """
    theirs = [run for name, runs in losses.items() if name != "moonep" for run in runs]
    ours = losses.get("moonep", [])
    repeated = max(len(runs) for runs in losses.values()) > 1
    problems = []
    for number, other in enumerate(ours[1:], 2):
        differ = [s for s, (a, b) in enumerate(zip(ours[0], other, strict=True), 1) if a != b]
        if differ:
            problems.append(f"moonep, run {number}: not run 1's losses, from step {differ[0]} on")
    spread = max((_apart(a, b) for a in theirs for b in theirs), default=0.0) if repeated else 0.0
    distance = 0.0
    if theirs and ours:
        steps = zip(ours[0], *theirs, strict=True)
        distance = max(min(abs(loss - t) / abs(t) for t in at_step) for loss, *at_step in steps)
    if spread and not distance <= spread:
        problems.append(
            f"moonep is {distance:.1e} from the nearest of the other runs, which are at most "
            f"{spread:.1e} apart"
        )
    return {"spread": spread, "distance": distance, "losses": losses, "problems": problems}


def _apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def report_repeats(console: Console, repeats: dict[str, Any]) -> None:
    spread, distance = repeats["spread"], repeats["distance"]
    runs = {name: len(each) for name, each in repeats["losses"].items()}
    if spread:
        text = f"at most {spread:.1e} apart at any step"
    else:
        text = "equal bit for bit, so that they say nothing about rounding"
    console.print(
        f"Runs: {runs}. Those of Megatron's dispatchers are {text}; moonep is at most "
        f"{distance:.1e} from the nearest of them.",
        soft_wrap=True,
    )


def write(
    args: argparse.Namespace,
    results: dict[str, dict[str, Any]],
    balanced: int,
    problems: list[str],
    repeats: dict[str, Any],
) -> None:
    if args.png:
        figure.draw(results, balanced, args.png)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        summary = {
            "balanced_rows": balanced,
            "relative_loss_difference": relative_difference(results),
            "problems": problems,
        }
        if args.repeat > 1:
            summary["repeats"] = {name: repeats[name] for name in ("spread", "distance", "losses")}
        args.json.write_text(json.dumps(summary | results, indent=1))


def report(
    console: Console,
    args: argparse.Namespace,
    results: dict[str, dict[str, Any]],
    balanced: int,
    problems: list[str],
) -> None:
    table = Table(title=f"{args.ranks} ranks, {args.steps} steps, S*K = {balanced} rows a rank")
    table.add_column("dispatcher")
    for name in ("final loss", "rows, hottest rank", "x S*K", "maxvio", "copies", "tokens/s"):
        table.add_column(name, justify="right")
    for dispatcher, result in results.items():
        most = max(max(rows) for layers in result["rows_per_rank"] for rows in layers)
        duplicates = [count for layers in result["duplicates"] for count in layers]
        table.add_row(
            dispatcher,
            f"{result['loss'][-1]:.6f}",
            f"{most:,}",
            f"{most / balanced:.3f}",
            f"{max(max(layers) for layers in result['maxvio']):.2f}",
            f"{statistics.mean(duplicates):.1f}",
            f"{statistics.median(result['tokens_per_second']):,.0f}",
        )
    console.print(table)
    console.print(
        "Rows of the hottest rank and maxvio: worst of all steps and layers. copies: expert "
        "copies a layer and step, mean. On CPUs tokens/s says nothing about GPUs.\n"
        f"Skew: --router-skew {args.router_skew:g} scales the router's row e by (e+1)**-"
        f"{args.router_skew:g} at the start; --aux-loss {args.aux_loss:g}.",
        soft_wrap=True,
    )
    console.print(f"Largest relative difference of losses: {relative_difference(results):.1e}")
    for problem in problems:
        console.print(f"[red]FAILED:[/red] {problem}", soft_wrap=True)
    if not problems:
        console.print(
            "[green]passed:[/green] losses agree at every step; experts' rows equal the router's "
            "histogram" + ("; moonep gave every rank S*K rows" if "moonep" in results else ""),
            soft_wrap=True,
        )


if __name__ == "__main__":
    sys.exit(main())
