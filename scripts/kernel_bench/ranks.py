"""R processes that run the sections one after the other, and one that listens to them.

A section that fails on any rank ends all of them, for a lost kernel takes its CUDA context along;
the sections behind it run in new processes. What was measured before the failure is kept.
"""

from __future__ import annotations

import gc
import importlib
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from bench_ranks import Listener

# Section and the module that has its bench_<section>; imported late, so that a broken kernel costs
# its own section only.
SECTIONS = {
    "copy": "ceilings",
    "dispatch": "rows",
    "gather": "rows",
    "presum": "rows",
    "push": "weights",
    "pull": "weights",
    "plan": "plan",
}
# Seconds without a word from any rank until they are ended.
SILENCE = 75


@dataclass(frozen=True, order=True)
class Shape:
    """S tokens of a rank, H row width, K experts of a token, E experts."""

    tokens: int
    width: int
    topk: int
    experts: int

    def __str__(self) -> str:
        return f"S={self.tokens} H={self.width} K={self.topk} E={self.experts}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all ranks have to know.

    Attributes:
        sms: of the kernels that move rows or weights over a link.
        loads: maxvio of the routings.
        expert: H and F of the experts pushed and pulled.
        routed_experts: E of the section plan.
        samples: timed passes of every configuration.
    """

    ranks: int
    same_gpu: bool
    sms: tuple[int, ...]
    loads: tuple[float, ...]
    shapes: tuple[Shape, ...]
    expert: tuple[int, int]
    routed_experts: int
    samples: int


def run(
    options: Options,
    sections: Sequence[str],
    on_start: Callable[[str], None],
    on_row: Callable[[dict[str, Any]], None],
) -> dict[str, str]:
    """Run the sections; what became of those that failed, by name."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if options.same_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    listeners = {"start": on_start, "row": on_row}

    def on_word(kind: str, what: Any) -> None:
        listeners[kind](what)

    failures: dict[str, str] = {}
    todo = list(sections)
    while todo:
        listener = Listener(options.ranks, _rank, (options, todo), on_word, SILENCE)
        listener.listen()
        if not listener.errors:
            break
        failures[listener.current or "start"] = "\n".join(listener.errors)
        if listener.current is None:  # the ranks did not even come up
            break
        todo = todo[todo.index(listener.current) + 1 :]
    return failures


def _rank(rank: int, port: int, options: Options, sections: list[str], pipe: Connection) -> None:
    from kernel_bench.measure import Bench

    bench = None
    try:
        torch.set_num_threads(4)
        device = torch.device("cuda", 0 if options.same_gpu else rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=options.ranks,
            timeout=timedelta(seconds=SILENCE),
        )
        bench = Bench(dist.group.WORLD, device, options, pipe)
        for name in sections:
            bench.start(name)
            module = importlib.import_module(f"kernel_bench.{SECTIONS[name]}")
            getattr(module, f"bench_{name}")(bench)
            gc.collect()
            torch.cuda.empty_cache()
        bench.align()
        pipe.send(("end", None))
    except BaseException:
        faults = bench.faults() if bench else ""
        pipe.send(("failed", traceback.format_exc() + faults))
        # Not an orderly exit: the other ranks may wait for this one in a collective.
        os._exit(1)
    dist.destroy_process_group()
