"""Time the grouped products of MoE layers on one GPU: tiles, rows by index, slots beside home.

    python scripts/tune_gemm.py --write         # fills the table of tiles of this repository
    python scripts/tune_gemm.py --only index,slots --json gemm.json

*tiles*: every candidate tile for every product of forward and backward; a tile enters the table
where it beats quack's default by 2 %. *index*: rows read by index inside the product, against rows
in place, and against copying them into place first. *slots*: home experts and duplicates in the
launches that the layer makes, against one launch over a single tensor with the same groups, and
against even groups in place under a static schedule. Groups are odd and uneven unless it says even.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gemm_bench import cases
from gemm_bench.cases import Operands
from gemm_bench.measure import medians_ms
from layer_bench.options import SHAPES, Shape
from rich.console import Console
from rich.table import Table

from moonep_megatron import quack_gemm
from moonep_megatron.quack_gemm import DEFAULT, Product, Tile

SECTIONS = ("tiles", "index", "slots")
CANDIDATES = (
    DEFAULT,
    Tile(128, 192, 1, pingpong=True),
    Tile(128, 256, 2),
    Tile(128, 256, 1),
    Tile(256, 128, 2),
    Tile(256, 128, 1),
    Tile(128, 128, 2, pingpong=True),
    Tile(128, 160, 2, pingpong=True),
)
GAIN = 1.02
# At a hottest-rank factor of 1.5, half of the other of two ranks' rows are those of duplicates.
SLOT_SHARE = 0.5


@contextmanager
def always(tile: Tile, seen: set[Product] | None = None) -> Iterator[None]:
    """Every product takes this tile, and is written down."""

    class Fixed(dict[Product, Tile]):
        def get(self, product: Product, default: Any = None) -> Any:
            if seen is not None:
                seen.add(product)
            return tile

    with replaced("table", Fixed):
        yield


@contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """A name of `moonep_megatron.quack_gemm` stands for something else."""
    before = getattr(quack_gemm, name)
    setattr(quack_gemm, name, value)
    try:
        yield
    finally:
        setattr(quack_gemm, name, before)


def compile_one(tile: Tile) -> str | None:
    """Compile all products with one tile, into quack's cache; what went wrong, if anything."""
    operands = Operands(Shape("small", 512, 256, 8, 2, 256), 2, torch.device("cuda"))
    groups = cases.single(operands, cases.odd_counts(512, 4, 0))
    try:
        with always(tile):
            for indexed in (True, False):
                for case in cases.products(operands, groups, indexed=indexed):
                    case()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tile}: {error}"
    return None


def tiles(shape: Shape, ranks: int, samples: int, candidates: tuple[Tile, ...]) -> list[Any]:
    """For each product the milliseconds of every tile."""
    operands = Operands(shape, ranks, torch.device("cuda"))
    counts = cases.odd_counts(shape.rows, operands.home, 0)
    found = []
    for case in cases.products(operands, cases.single(operands, counts)):
        seen: set[Product] = set()

        def under(tile: Tile, case: cases.Case = case, seen: set[Product] = seen) -> Any:
            def call() -> None:
                with always(tile, seen):
                    case()

            return call

        times = medians_ms({tile: under(tile) for tile in candidates}, samples)
        (product,) = seen
        best = min(times, key=lambda tile: times[tile])
        best = best if times[DEFAULT] > GAIN * times[best] else DEFAULT
        found.append(
            {
                "shape": shape.name,
                "name": case.name,
                "product": product,
                "best": best,
                "ms": times[best],
                "default_ms": times[DEFAULT],
                "tflops": case.flops / times[best] / 1e9,
                "all_ms": {str(tile): ms for tile, ms in times.items()},
            }
        )
    return found


def index(shape: Shape, ranks: int, samples: int) -> list[Any]:
    """Rows by index against rows in place and copied into place, for skewed groups too."""
    operands = Operands(shape, ranks, torch.device("cuda"))
    n, home = shape.rows, operands.home
    skewed = [n - (n // 2 // (home - 1)) * (home - 1)] + [n // 2 // (home - 1)] * (home - 1)
    found = []
    for kind, counts in (("odd", cases.odd_counts(n, home, 0)), ("skewed", skewed)):
        groups = cases.single(operands, counts)
        copy = medians_ms(
            {"copy": lambda: operands.receive.index_select(0, operands.index)}, samples
        )
        pairs = (cases.products(operands, groups, indexed=indexed) for indexed in (True, False))
        for indexed, placed in zip(*pairs, strict=True):
            if indexed.name in ("FC2 forward", "FC1 data"):
                continue  # these read grouped rows in any case
            times = medians_ms({"indexed": indexed, "in place": placed}, samples)
            found.append(
                {
                    "shape": shape.name,
                    "name": indexed.name,
                    "groups": kind,
                    "indexed_ms": times["indexed"],
                    "in_place_ms": times["in place"],
                    "copy_ms": copy["copy"],
                    "ratio": times["in place"] / times["indexed"],
                }
            )
    return found


def slots(shape: Shape, ranks: int, samples: int) -> list[Any]:
    """Home and slot launches against one launch, and against even groups in place."""
    operands = Operands(shape, ranks, torch.device("cuda"))
    n, home = shape.rows, operands.home
    there = int(n * SLOT_SHARE)
    odd = cases.odd_counts(n - there, home, 1) + cases.odd_counts(there, home, 2)
    even = [n // home] * home
    made = {
        "layer": cases.products(operands, cases.home_and_slots(operands, odd)),
        "single": cases.products(operands, cases.single(operands, odd)),
        "even": cases.products(operands, cases.single(operands, even), indexed=False),
    }
    made["even"] = [statically(case) for case in made["even"]]
    found = []
    for parts in zip(*made.values(), strict=True):
        times = medians_ms(dict(zip(made, parts, strict=True)), samples)
        found.append(
            {"shape": shape.name, "name": parts[0].name, **{f"{k}_ms": v for k, v in times.items()}}
        )
    total = {f"{kind}_ms": sum(row[f"{kind}_ms"] for row in found) for kind in made}
    found.append({"shape": shape.name, "name": "together", **total})
    return [
        row
        | {
            "ratio_single": row["single_ms"] / row["layer_ms"],
            "ratio_even": row["even_ms"] / row["layer_ms"],
        }
        for row in found
    ]


def statically(case: cases.Case) -> cases.Case:
    """The same under the static schedule."""

    def call() -> None:
        with replaced("DYNAMIC", False):
            case()

    return cases.Case(case.name, [call], case.flops)


def table_of(found: list[Any]) -> list[dict[str, Any]]:
    """What enters the table: products for which some tile beats the default."""
    return [
        {"product": asdict(row["product"]), "tile": asdict(row["best"])}
        for row in found
        if row["best"] != DEFAULT
    ]


def show(section: str, found: list[Any]) -> None:
    """A table of a section's rows, nested values left out."""
    names = [name for name in found[0] if not isinstance(found[0][name], dict | Product)]
    table = Table(*names, title=section)
    for row in found:
        table.add_row(*(_cell(row[name]) for name in names))
    Console(width=150, highlight=False).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, Tile):
        turns = " pingpong" if value.pingpong else ""
        return f"{value.tile_M}x{value.tile_N}, cluster {value.cluster_M}{turns}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def plain(value: Any) -> Any:
    """For JSON."""
    return asdict(value) if isinstance(value, Tile | Product) else str(value)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections (default: all)")
    parser.add_argument("--shapes", default="A,B,C,K", help="of " + ", ".join(map(str, SHAPES)))
    parser.add_argument("--ranks", type=int, default=2, help="E/ranks experts are at home here")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--workers", type=int, default=4, help="processes that compile")
    parser.add_argument("--write", action="store_true", help="write the table of tiles")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    args = parser.parse_args()
    args.only, args.shapes = args.only.split(","), args.shapes.split(",")
    for words, known in ((args.only, SECTIONS), (args.shapes, SHAPES)):
        if unknown := [word for word in words if word not in known]:
            parser.error(f"{unknown} unknown: of {', '.join(known)}")
    if args.ranks < 2 or any(SHAPES[name].experts % args.ranks for name in args.shapes):
        parser.error(f"--ranks {args.ranks}: from 2 on, and dividing the experts of every shape")
    if not torch.cuda.is_available():
        parser.error("no GPU found: the products need a Hopper GPU")
    if args.write and "tiles" not in args.only:
        parser.error("--write: writes what the section tiles finds; leave it in --only")
    return args


def main() -> None:
    """Compile, time, show, write."""
    args = arguments()
    candidates = CANDIDATES if "tiles" in args.only else (DEFAULT,)
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        failures = list(filter(None, pool.map(compile_one, candidates)))
    for failure in failures:
        print("left out:", failure)
    candidates = tuple(t for t in candidates if not any(str(t) in f for f in failures))
    measured: dict[str, list[Any]] = {}
    functions = {"tiles": partial(tiles, candidates=candidates), "index": index, "slots": slots}
    for section in (name for name in SECTIONS if name in args.only):
        measured[section] = []
        for shape in (SHAPES[name] for name in args.shapes):
            rows = functions[section](shape, args.ranks, args.samples)
            show(f"{section}: {shape}", rows)
            measured[section] += rows
        if section == "tiles" and args.write:
            text = json.dumps(table_of(measured[section]), indent=1)
            quack_gemm.TABLE.write_text(text + "\n")
            quack_gemm.table.cache_clear()
    if args.json:
        where = {"gpu": torch.cuda.get_device_name(), "host": platform.platform()}
        when = datetime.now(UTC).isoformat(timespec="seconds")
        made = {"date": when, **where, "torch": torch.__version__, "ranks": args.ranks}
        args.json.write_text(json.dumps(made | measured, indent=1, default=plain) + "\n")


if __name__ == "__main__":
    main()
