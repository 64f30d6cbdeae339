"""Compile every listed kernel configuration into the cache on disk, on all cores; needs no GPU.

    python scripts/warm_kernels.py

A first step compiles what it needs, one kernel after the other, while the other ranks wait. Run
this once on a machine before a job, or in an image: ``MOONEP_KERNEL_CACHE`` says where to.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from moonep_megatron.kernels import compile as kernel_compile

from moonep_megatron import kernels


def places() -> list[tuple[str, int]]:
    """Module and number of every configuration that a kernel lists."""
    found = []
    for module in pkgutil.iter_modules(kernels.__path__):
        name = f"{kernels.__name__}.{module.name}"
        configs = getattr(importlib.import_module(name), "configs", list)
        found += [(name, number) for number in range(len(configs()))]
    return found


def compile_one(place: tuple[str, int]) -> None:
    """Fill the cache with one configuration."""
    name, number = place
    kernel_compile.compiled(importlib.import_module(name).configs()[number])


def main() -> None:
    """All of them, in as many processes as asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    begin, all_places = time.perf_counter(), places()
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, all_places))
    folder, seconds = kernel_compile.cache_folder(), time.perf_counter() - begin
    print(f"{len(all_places)} kernels in {folder}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
