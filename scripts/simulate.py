"""How good plans are on recorded or drawn routing, and what a layer would take.

    python scripts/simulate.py --data DIR --ranks 8,16,32,64 --json quality.json --png quality.png
    python scripts/simulate.py --synthetic zipf,dirichlet --experts 256,896 --ranks 64,128
    python scripts/simulate.py --data DIR --slack 0,0.005,0.01,0.02,0.05
    python scripts/simulate.py --data DIR --reuse --microbatches 4

Every layer is planned on every number of ranks and compared with the pairs rule and with lower
bounds that hold for any exactly balanced plan. DIR (or one file) holds ``.npy``, expert ids [layer,
token, choice] or counts [layer, expert], ``.json`` with ``logical_count`` [layer][expert] (which
``train_gpt_moe.py --record`` writes), and Megatron's router trace, ``router_trace_rank*.jsonl``.
Times are a model with the constants given by flags, not a measurement. Ends with 1 if some layer's
busiest rank is above that of the pairs rule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from simulation import report, reuse
from simulation.data import DataError, DataSet, read, together
from simulation.quality import judge
from simulation.synthetic import KINDS, Synthetic
from simulation.times import Model

from moonep_megatron.caps import slack_parts
from moonep_megatron.rules import PLANNERS

MOST_RANKS = 128
Row = dict[str, Any]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_argument_group("routing")
    source.add_argument("--data", type=Path, help="folder or file of recorded routing")
    source.add_argument(
        "--together",
        type=lambda text: text.split(","),
        action="append",
        default=[],
        help="file names in --data whose rows are added to one more data set; may be repeated",
    )
    source.add_argument("--synthetic", type=_kinds, default=[], help=f"of {','.join(KINDS)}")
    source.add_argument(
        "--experts", type=_numbers, help="E: of --synthetic (default 256,896); of files with ids"
    )
    source.add_argument("--layers", type=_positive(int), default=16, help="of --synthetic")
    source.add_argument("--seed", type=int, default=2026, help="of --synthetic")
    source.add_argument("--exponent", type=_positive(float), default=0.8, help="of zipf")
    source.add_argument("--concentration", type=_positive(float), default=1.0, help="of dirichlet")
    parser.add_argument("--ranks", type=_numbers, default=[8, 16, 32, 64], help="R, each 1..128")
    parser.add_argument("--planner", choices=PLANNERS, default="best")
    parser.add_argument(
        "--slack", type=_slacks, default=[0], help="--moe-moonep-slack, one or several (default 0)"
    )
    parser.add_argument("--reuse", action="store_true", help="what --moe-moonep-reuse saves")
    parser.add_argument(
        "--microbatches", type=_positive(int), default=1, help="of --reuse: cut files with ids so"
    )
    parser.add_argument(
        "--slots", type=_positive(int), help="of --reuse: --moe-moonep-slots (default: E/R)"
    )
    model = parser.add_argument_group("cost model")
    for name, kind, text in (
        ("width", int, "H, row width"),
        ("ffn", int, "F, FFN width of an expert"),
        ("topk", int, "K, experts a token"),
        ("tokens", int, "S, tokens a rank"),
        ("node", int, "ranks that share a link; beyond them is the network"),
        ("link", float, "GB/s a rank and direction between ranks of a node (measured on H200)"),
        ("network", float, "GB/s a rank and direction to other nodes (a 400 Gb/s adapter)"),
        ("tflops", float, "TFLOP/s of the grouped GEMMs (measured on H200)"),
        ("launch", float, "µs of a launch"),
    ):
        default = getattr(Model, name)
        help_text = f"{text} (default {default})"
        model.add_argument(f"--{name}", type=_positive(kind), default=default, help=help_text)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--png", type=Path, help="write a picture to this file")
    args = parser.parse_args(argv)
    if args.data is None and not args.synthetic:
        parser.error("give --data or --synthetic")
    if args.reuse and args.data is None:
        parser.error("--reuse needs --data")
    if max(args.ranks) > MOST_RANKS:
        parser.error(f"--ranks {max(args.ranks)}: at most {MOST_RANKS}")
    return args


def _positive(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    convert.__name__ = kind.__name__  # what argparse calls it
    return convert


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0")
    return numbers


def _slacks(text: str) -> list[int]:
    """In parts."""
    try:
        return [slack_parts(float(word)) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of slacks: {error}") from None


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if not set(kinds) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(KINDS)}")
    return kinds


def data_sets(
    args: argparse.Namespace, say: Callable[[str], None]
) -> Iterator[tuple[int, DataSet]]:
    """(R, data set) of all that can be planned; what cannot is said, or refused as a whole."""
    if args.data is not None:
        single = args.experts[0] if args.experts and len(args.experts) == 1 else None
        sets = read(args.data, single)
        sets += [together(sets, names) for names in args.together]
        unfit = []
        for one in sets:
            yield from ((ranks, one) for ranks in args.ranks if one.experts % ranks == 0)
            others = [str(ranks) for ranks in args.ranks if one.experts % ranks]
            if others:
                what = f"{one.name} has {one.experts} experts, no multiple of {', '.join(others)}"
                say(f"{what}: skipped there")
                unfit += [what] * (len(others) == len(args.ranks))
        if len(unfit) == len(sets):
            raise DataError(f"{args.data}: {unfit[0]} (--ranks)")
    for kind in args.synthetic:
        for experts in args.experts or [256, 896]:
            drawn = Synthetic(
                kind, experts, args.layers, args.seed, args.exponent, args.concentration
            )
            for ranks in args.ranks:
                if experts % ranks:
                    raise DataError(f"--experts {experts} is no multiple of --ranks {ranks}")
                rows = ranks * args.tokens * args.topk
                yield ranks, DataSet(drawn.name, drawn.total_LE(rows))


def simulate(args: argparse.Namespace, console: Console) -> list[Row]:
    model = Model(**{name: getattr(args, name) for name in Model.__dataclass_fields__})
    planned = list(data_sets(args, console.print))
    rows: list[Row] = []
    empty: dict[tuple[str, int], None] = {}
    with Progress(console=console, transient=True) as progress:
        runs = [(slack, *one) for one in planned for slack in args.slack]
        task = progress.add_task("planning", total=sum(len(one.total_LE) for *_, one in runs))
        for slack, ranks, one in runs:
            for layer, total_E in enumerate(one.total_LE):
                progress.advance(task)
                if not np.any(total_E):
                    empty[one.name, layer] = None
                    continue
                row = judge(total_E.tolist(), ranks, args.planner, args.node, slack)
                row |= {"pushed_mb": model.pushed_mb(row["duplicates"]), **model.times(row)}
                rows.append({"data": one.name, "layer": layer, **row})
    for name, layer in empty:
        console.print(f"{name}: layer {layer} has no routed rows: skipped")
    if not rows:
        raise DataError(f"{args.data}: no layer has routed rows")
    return rows


def simulate_reuse(args: argparse.Namespace) -> list[Row]:
    """A row for every layer of every step of several microbatches, R and slack."""
    single = args.experts[0] if args.experts and len(args.experts) == 1 else None
    rows: list[Row] = []
    for name, sets in reuse.steps(read(args.data, single, args.microbatches)):
        shapes = {one.total_LE.shape for one in sets}
        if len(shapes) > 1:
            raise DataError(f"{name}: the shapes of its microbatches differ: {sorted(shapes)}")
        total_LmE = np.stack([one.total_LE for one in sets], axis=1)
        for ranks, slack in itertools.product(args.ranks, args.slack):
            if sets[0].experts % ranks:
                raise DataError(f"{name} has {sets[0].experts} experts, no multiple of {ranks}")
            homes = sets[0].experts // ranks
            slots = min(args.slots or homes, homes)
            for layer, total_mE in enumerate(total_LmE):
                row = reuse.judge_reuse(total_mE, ranks, args.planner, slack, slots)
                rows.append({"data": name, "layer": layer, "microbatches": len(sets), **row})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        rows = simulate_reuse(args) if args.reuse else simulate(args, console)
        if args.json:
            args.json.write_text(json.dumps(rows) + "\n")
        if args.reuse:
            reuse.table(rows, console)
            return 0
        if args.png:
            report.draw(rows, args.planner, args.png)
    except (DataError, OSError) as error:
        print(f"simulate.py: {error}", file=sys.stderr)
        return 2
    report.tables(rows, args.planner, console)
    return int(report.above_pairs(rows) > 0)


if __name__ == "__main__":
    sys.exit(main())
