"""Rank and row of each of this rank's entries, bit for bit `moonep_megatron.plan.destinations`.

Letters: s tokens, K experts a token goes to, E experts, R ranks. Every thread takes an entry; the
order within an expert is already known (`moonep_megatron.kernels.counting`), so that nothing is
sorted. The same launch writes the dense ``rows_RE`` of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import compile as kc
from moonep_megatron.kernels import ptx
from moonep_megatron.kernels.counting import CHUNK, HEADER
from moonep_megatron.kernels.layout import DevicePlan, offsets
from torch import Tensor

_THREADS = 512


@dataclass(frozen=True)
class DestinationsConfig:
    """Compile-time constants of the destinations."""

    ranks: int
    experts: int
    topk: int

    signals = waits = False
    starts_early = True

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `moonep_megatron.kernels.compile.Config`."""
        ranks, experts, topk = self.ranks, self.experts, self.topk

        @cute.kernel
        def kernel(plan: cute.Tensor, args: _Arguments) -> None:
            cute.arch.griddepcontrol_wait()
            thread, _, _ = cute.arch.thread_idx()
            block, _, _ = cute.arch.block_idx()
            blocks, _, _ = cute.arch.grid_dim()
            first = block * _THREADS + thread
            memory = plan.iterator.toint()
            for i in cutlass.range(first, args.entries, blocks * _THREADS):
                to, row = Int32(-1), Int32(-1)
                expert = ptx.load(args.ids + Int64(i) * 4, "s32")
                if expert >= 0 and expert < experts:
                    chunk = i // (CHUNK * topk)
                    before = (Int64(chunk) * (experts + HEADER) + expert) * 4
                    place = ptx.load(args.places + Int64(i) * 4, "s32")
                    place += ptx.load(args.chunk_first + before, "s32")
                    to, row = _destination(memory, expert, place, args.rank, ranks, experts)
                ptx.store(args.out_rank + Int64(i) * 4, to, "s32")
                ptx.store(args.out_row + Int64(i) * 4, row, "s32")
            for d in cutlass.range(block, ranks, blocks):
                _write_rows(memory, d, ranks, experts)

        @cute.jit
        def launch(plan: cute.Tensor, args: _Arguments, stream: Any) -> None:
            kernel(plan, args).launch(
                grid=[args.blocks, 1, 1], block=[_THREADS, 1, 1], use_pdl=True, stream=stream
            )

        return launch, (kc.vector(Int32), kc.scalars(_Arguments), kc.stream())


class _Arguments(NamedTuple):
    """Addresses of int32 tensors, and sizes."""

    ids: Int64
    """Address of [s, K]; so is ``places``."""
    places: Int64
    chunk_first: Int64
    """Address of ``first_CE``."""
    entries: Int32
    """s * K."""
    out_rank: Int64
    """Address of ``rank_sK``; the next is that of ``row_sK``."""
    out_row: Int64
    rank: Int32
    blocks: Int32
    """Of the launch."""


def destinations(
    plan: DevicePlan, ids: Tensor, places: Tensor, first_CE: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Rank and grouped row of every entry, and ``plan.rows_RE``. Not collective.

    Args:
        plan: made for this rank.
        ids, places: int32 [s, K], from `moonep_megatron.kernels.counting`.
        first_CE: from the exchange.
        rank: this rank.

    Returns:
        (rank_sK, row_sK), int32, -1 where the id is -1.
    """
    ranks, experts = plan.rows_RE.shape
    entries = ids.numel()
    there = torch.empty(2, *ids.shape, dtype=torch.int32, device=ids.device)
    kc.compiled(DestinationsConfig(ranks, experts, ids.shape[1]))(
        plan.memory,
        _Arguments(
            ids.data_ptr(),
            places.data_ptr(),
            first_CE.data_ptr(),
            entries,
            there[0].data_ptr(),
            there[1].data_ptr(),
            rank,
            max(-(-entries // _THREADS), ranks),
        ),
    )
    return there[0], there[1]


def configs() -> list[DestinationsConfig]:
    """Configurations that the tests compile."""
    return [
        DestinationsConfig(8, 896, 8),
        DestinationsConfig(1, 7, 2),
        DestinationsConfig(128, 1024, 6),
    ]


@cute.jit
def _destination(
    memory: Int64,
    expert: Int32,
    place: Int32,
    rank: Int32,
    ranks: cutlass.Constexpr[int],
    experts: cutlass.Constexpr[int],
) -> tuple[Int32, Int32]:
    """Where this rank's entry number ``place`` of an expert goes."""
    at = offsets(ranks, experts)
    words = ptx.load16(memory + (at.expert + expert * 4) * 4)
    stay, row, shift, shares = (Int32(word) for word in words)
    to, row = rank, row + place
    if place >= stay:
        number = place + shift
        # the first share that is filled beyond this number
        low, high = shares & 0xFFFF, (shares & 0xFFFF) + (shares >> 16) - 1
        while low < high:
            middle = (low + high) // 2
            if number < ptx.load(memory + (at.share + middle * 4) * 4, "s32"):
                high = middle
            else:
                low = middle + 1
        share = memory + (at.share + low * 4) * 4
        to = ptx.load(share + 4, "s32")
        row = ptx.load(share + 8, "s32") + number
    return to, row


@cute.jit
def _write_rows(
    memory: Int64, d: Int32, ranks: cutlass.Constexpr[int], experts: cutlass.Constexpr[int]
) -> None:
    """All threads: rank d's row of ``rows_RE``, from its groups."""
    thread, _, _ = cute.arch.thread_idx()
    at, groups = offsets(ranks, experts), 2 * experts // ranks
    row = memory + Int64(at.rows + d * experts) * 4
    for e in cutlass.range(thread, experts, _THREADS):
        ptx.store(row + e * 4, Int32(0), "s32")
    cute.arch.sync_threads()
    for group in cutlass.range(thread, groups, _THREADS):
        expert = ptx.load(memory + (at.group_expert + d * groups + group) * 4, "s32")
        start = memory + (at.group_start + d * (groups + 1) + group) * 4
        if expert >= 0:
            rows = ptx.load(start + 4, "s32") - ptx.load(start, "s32")
            ptx.store(row + Int64(expert) * 4, rows, "s32")
