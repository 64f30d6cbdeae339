"""Draw what a training run logged of its balance.

    python scripts/plot_balance.py train.log --png balance.png
    python scripts/plot_balance.py TENSORBOARD_DIR --png balance.png

Takes the console log of Megatron's training loop, or the folder of its TensorBoard event files, of
a run with --moe-token-dispatcher-type moonep --moe-moonep-log-maxvio. Prints a table and writes a
picture: the hottest rank without and with moonep, maxvio, duplicates; and a map of layers where
--moe-per-layer-logging wrote each layer's (event files only). The console has two digits after the
point, event files all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from balance_log.figure import draw
from balance_log.read import Balance, LogError, read
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

MEANING = {
    "moonep_hottest_rank_without": "rows of the hottest rank ÷ mean, experts at home",
    "moonep_hottest_rank": "the same, as moonep computes",
    "moonep_maxvio": "rows of the hottest expert ÷ mean - 1",
    "moonep_minvio": "rows of the coldest expert ÷ mean - 1",
    "moonep_avgvio": "mean |rows of an expert ÷ mean - 1|",
    "moonep_duplicates": "copies of experts a layer, all ranks",
    "moonep_busiest": "most copies that one rank sends or receives",
    "moonep_busiest_sent": "most copies that one rank sends",
    "moonep_busiest_received": "most copies that one rank receives",
    "moonep_pushed_mb": "MB of weights copied a layer, all ranks",
}
# A layer's columns: those that break_even.py --layer takes, and what is drawn.
OF_LAYERS = {
    "moonep_hottest_rank_without": "hottest without",
    "moonep_hottest_rank": "hottest with",
    "moonep_maxvio": "maxvio",
    "moonep_duplicates": "duplicates",
    "moonep_busiest": "busiest",
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, help="console log, or folder of event files")
    parser.add_argument(
        "--png", type=Path, default=Path("balance.png"), help="the picture (default balance.png)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    try:
        balance = read(args.log)
        draw(balance, args.png)
    except (LogError, ImportError, OSError) as error:
        print(f"plot_balance.py: {error}", file=sys.stderr)
        return 2
    console.print(table(balance))
    if balance.layers:
        console.print(layer_table(balance))
    if balance.skipped:
        console.print(f"[yellow]Iterations left out, a value not there: {balance.skipped}[/yellow]")
    console.print(f"Wrote {args.png}", markup=False, soft_wrap=True)
    return 0


def table(balance: Balance) -> Table:
    first, last = balance.iterations[0], balance.iterations[-1]
    title = f"{len(balance.iterations)} iterations, {first} to {last}; means over MoE layers"
    found = _table(title, "value", "first", "last", "mean", "least", "most", "at")
    found.add_column("meaning")
    for name in sorted(balance.means, key=lambda name: [*MEANING, name].index(name)):
        values = np.array(balance.means[name])
        most = int(np.nanargmax(values))
        numbers = (values[0], values[-1], np.nanmean(values), np.nanmin(values), values[most])
        found.add_row(
            *(name, *(f"{number:.2f}" for number in numbers)),
            *(str(balance.iterations[most]), MEANING.get(name, "")),
        )
    return found


def layer_table(balance: Balance) -> Table:
    """Means over iterations of each layer; of the hottest rank without moonep also the worst."""
    columns = {name: text for name, text in OF_LAYERS.items() if name in balance.layer_values}
    found = _table("means over iterations", "layer", *columns.values(), "most without")
    worst = balance.layer_values["moonep_hottest_rank_without"]
    for row, layer in enumerate(balance.layers):
        means = (np.nanmean(balance.layer_values[name][:, row]) for name in columns)
        cells = [f"{value:.2f}" for value in (*means, np.nanmax(worst[:, row]))]
        found.add_row(str(layer), *cells)
    return found


def _table(title: str, *names: str) -> Table:
    found = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for number, name in enumerate(names):
        found.add_column(name, justify="right" if number else "left")
    return found


if __name__ == "__main__":
    sys.exit(main())
