"""From how many tokens a rank on does balancing pay? A prediction, layer by layer.

    python scripts/break_even.py --data DIR --ranks 8 --png break-even.png
    python scripts/break_even.py --ranks 8 --layer 1.8,3 --layer 1.2,1

Takes the routing and the cost model of simulate.py, whose flags it shares, or with ``--layer`` what
a run logged of a layer with --moe-moonep-log-maxvio: moonep_hottest_rank_without and
moonep_busiest. Says nothing to a run: whoever wants another dispatcher for a layer sets it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import simulate
from rich.console import Console
from rich.table import Table
from simulation.break_even import break_even, draw, logged_row
from simulation.data import DataError
from simulation.report import group
from simulation.times import Model

Row = dict[str, Any]


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Our own flags, and those of simulate.py."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The rest are flags of simulate.py; see its --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layer", type=_logged, action="append", default=[], metavar="HOTTEST,BUSIEST"
    )
    own, rest = parser.parse_known_args(argv)
    if own.layer:
        # Any source satisfies simulate.py; its layers are not planned.
        rest = [*rest, "--synthetic", "zipf"]
    return own, simulate.arguments(rest)


def _logged(text: str) -> tuple[float, int]:
    try:
        hottest, busiest = text.split(",")
        pair = float(hottest), int(busiest)
    except ValueError:
        pair = 0.0, -1
    if pair[0] < 1 or pair[1] < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no HOTTEST,BUSIEST: a number from 1 on and a whole one from 0 on"
        )
    return pair


def main(argv: Sequence[str] | None = None) -> int:
    own, args = arguments(sys.argv[1:] if argv is None else argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    model = Model(**{name: getattr(args, name) for name in Model.__dataclass_fields__})
    try:
        rows = _rows(own, args, console)
        for row in rows:
            row["break_even_tokens"] = break_even(model, row)
        if args.json:
            args.json.write_text(json.dumps(rows) + "\n")
        if args.png:
            draw(model, rows, args.png)
    except (DataError, OSError) as error:
        print(f"break_even.py: {error}", file=sys.stderr)
        return 2
    console.print(_table(rows))
    console.print(
        f"Predicted for H = {model.width}, F = {model.ffn}, K = {model.topk}, {model.link:g} GB/s "
        f"between ranks, {model.tflops:g} TFLOP/s.",
        highlight=False,
    )
    return 0


def _rows(own: argparse.Namespace, args: argparse.Namespace, console: Console) -> list[Row]:
    if not own.layer:
        return simulate.simulate(args, console)
    return [
        {"data": "log", "layer": number, **logged_row(ranks, args.node, *pair)}
        for ranks in args.ranks
        for number, pair in enumerate(own.layer)
    ]


def _table(rows: Sequence[Row]) -> Table:
    table = Table("data", "R", "layer", "hottest rank", "pays from S =")
    for (data, ranks), some in group(rows, "data", "ranks").items():
        for row in some:
            tokens = row["break_even_tokens"]
            table.add_row(
                *(data, str(ranks), str(row["layer"]), f"{row['hottest_rank']:.2f}"),
                "never" if tokens is None else f"{tokens:,}",
            )
    return table


if __name__ == "__main__":
    sys.exit(main())
