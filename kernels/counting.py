"""Counts of the routed entries, which the exchange and the destinations start from.

Letters: s tokens, K experts a token goes to, E experts. A *chunk* is ``CHUNK`` consecutive tokens,
one block's work. Counting writes

- ``counts_CE``: int32 [C, E + HEADER], one row a chunk: its entries of every expert, then the
  header TOKENS, BAD (ids outside -1..E-1), EXCESS (choices beyond K) and a zero;
- ``place_sK``: int32, the number of earlier entries of the same expert in the same chunk, in
  (token, k) order.

So an entry's place among all of this rank's is its chunk's running count plus its own place, and
nothing has to be sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import compile as kc
from moonep_megatron.kernels import ptx, warp
from torch import Tensor

MAX_EXPERTS = 1024
CHUNK = 64
HEADER = 4
TOKENS, BAD, EXCESS = range(3)

THREADS = 512
_WARPS = THREADS // warp.WARP
# Every warp compacts and counts its own tokens, so that no barrier is needed between the two.
WARP_TOKENS = CHUNK // _WARPS


def chunks(tokens: int) -> int:
    """C, the blocks that ``tokens`` tokens need."""
    return -(-tokens // CHUNK)


@dataclass(frozen=True)
class CountConfig:
    """Counts of ids that a caller has; ``wide`` ids are int64 and are narrowed to int32."""

    experts: int
    topk: int
    wide: bool

    signals = waits = False
    starts_early = True

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `moonep_megatron.kernels.compile.Config`."""
        experts, topk, wide = self.experts, self.topk, self.wide

        @cute.kernel
        def kernel(
            counts: cute.Tensor, source: Int64, ids: Int64, places: Int64, tokens: Int32
        ) -> None:
            cute.arch.griddepcontrol_wait()
            first, last = warp_tokens(tokens)
            if cutlass.const_expr(wide):
                _narrow(source, ids, first * topk, last * topk, experts)
                cute.arch.sync_warp()
            count_entries(counts, ids, places, first, last, tokens, Int32(0), experts, topk)

        @cute.jit
        def launch(
            counts: cute.Tensor,
            source: Int64,
            ids: Int64,
            places: Int64,
            tokens: Int32,
            stream: Any,
        ) -> None:
            kernel(counts, source, ids, places, tokens).launch(
                grid=[(tokens + CHUNK - 1) // CHUNK, 1, 1],
                block=[THREADS, 1, 1],
                use_pdl=True,
                stream=stream,
            )

        return launch, (kc.vector(Int32), *[Int64(0)] * 3, Int32(0), kc.stream())


def count(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts of given ids.

    Args:
        ids: int32 or int64 [s, K], contiguous; -1 for none, repeats are legal. Other ids outside
            0..E-1 are counted as bad, and go nowhere.
        experts: E.

    Returns:
        ids int32 [s, K], ``place_sK`` and ``counts_CE``.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2 or not ids.is_contiguous():
        raise ValueError(
            f"ids are {ids.dtype} {list(ids.shape)}: give contiguous int32 or int64 [tokens, K]"
        )
    tokens, topk = ids.shape
    check(experts, topk)
    wide = ids.dtype == torch.int64
    narrow = torch.empty_like(ids, dtype=torch.int32) if wide else ids
    places = torch.empty_like(narrow)
    counts = counts_table(tokens, experts, ids.device)
    if tokens:
        kc.compiled(CountConfig(experts, topk, wide))(
            counts.view(-1), *addresses(ids, narrow, places), tokens
        )
    return narrow, places, counts


def configs() -> list[CountConfig]:
    """Configurations that the tests compile."""
    return [CountConfig(896, 8, False), CountConfig(64, 6, True)]


def check(experts: int, topk: int) -> None:
    """Refuse what the kernels cannot count."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} experts: the kernels take 1..{MAX_EXPERTS}")
    if topk < 1:
        raise ValueError(f"{topk} experts a token: at least 1 is needed")


def counts_table(tokens: int, experts: int, device: torch.device) -> Tensor:
    """Memory of ``counts_CE``."""
    # At least one row, so that there is memory to point to.
    return torch.empty(max(chunks(tokens), 1), experts + HEADER, dtype=torch.int32, device=device)


def addresses(*tensors: Tensor) -> list[int]:
    """Where tensors begin."""
    return [tensor.data_ptr() for tensor in tensors]


@cute.jit
def warp_tokens(tokens: Int32) -> tuple[Int32, Int32]:
    """First token of this warp, and the one behind its last."""
    _, own = warp.lane_and_warp()
    block, _, _ = cute.arch.block_idx()
    first = cutlass.min(block * CHUNK + own * WARP_TOKENS, tokens)
    return first, cutlass.min(first + WARP_TOKENS, tokens)


@cute.jit
def _narrow(
    source: Int64, ids: Int64, first: Int32, last: Int32, experts: cutlass.Constexpr[int]
) -> None:
    """One warp: int64 ids to int32, those out of range to -2."""
    lane, _ = warp.lane_and_warp()
    for i in cutlass.range(first + lane, last, warp.WARP):
        wide = ptx.load(source + Int64(i) * 8, "s64")
        narrow = Int32(-2)
        if wide >= -1 and wide < experts:
            narrow = Int32(wide)
        ptx.store(ids + Int64(i) * 4, narrow, "s32")


@cute.jit
def count_entries(
    counts: cute.Tensor,
    ids: Int64,
    places: Int64,
    first: Int32,
    last: Int32,
    tokens: Int32,
    excess: Int32,
    experts: cutlass.Constexpr[int],
    topk: cutlass.Constexpr[int],
) -> None:
    """All threads of a block: its chunk's row of counts and the places of its entries."""
    # The exchange's few blocks may take their places.
    cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, own = warp.lane_and_warp()
    smem = cutlass.utils.SmemAllocator()
    # by (warp, expert): first the warp's own entries, then those of the warps before it
    seen = smem.allocate_tensor(Int32, cute.make_layout(_WARPS * experts), byte_alignment=16)
    heads = smem.allocate_tensor(Int32, cute.make_layout(2 * _WARPS), byte_alignment=16)
    for i in cutlass.range(thread, _WARPS * experts, THREADS):
        seen[i] = 0
    cute.arch.sync_threads()
    bad = _walk(seen, ids, places, first * topk, last * topk, experts, False)
    bad = warp.warp_sum(bad)
    if lane == 0:
        heads[own] = bad
        heads[_WARPS + own] = excess
    cute.arch.sync_threads()
    row = block * (experts + HEADER)
    for expert in cutlass.range(thread, experts, THREADS):
        running = Int32(0)
        for w in cutlass.range_constexpr(_WARPS):
            mine = seen[w * experts + expert]
            seen[w * experts + expert] = running
            running += mine
        counts[row + expert] = running
    if thread == 0:
        all_bad, all_excess = Int32(0), Int32(0)
        for w in cutlass.range_constexpr(_WARPS):
            all_bad += heads[w]
            all_excess += heads[_WARPS + w]
        counts[row + experts + TOKENS] = cutlass.min(tokens - block * CHUNK, CHUNK)
        counts[row + experts + BAD] = all_bad
        counts[row + experts + EXCESS] = all_excess
        counts[row + experts + 3] = 0
    cute.arch.sync_threads()
    _walk(seen, ids, places, first * topk, last * topk, experts, True)


@cute.jit
def _walk(
    seen: cute.Tensor,
    ids: Int64,
    places: Int64,
    first: Int32,
    last: Int32,
    experts: cutlass.Constexpr[int],
    store: cutlass.Constexpr[bool],
) -> Int32:
    """One warp goes through its entries in order, counting; returns this lane's bad ids."""
    lane, own = warp.lane_and_warp()
    bad = Int32(0)
    for start in cutlass.range(first, last, warp.WARP):
        i = start + lane
        expert = Int32(-1)
        if i < last:
            expert = ptx.load(ids + Int64(i) * 4, "s32")
        if expert < -1 or expert >= experts:
            bad += 1
            expert = Int32(-1)
        same = warp.same_value(expert)
        place = cute.arch.popc(same & warp.lower_lanes())
        before = Int32(0)
        if expert >= 0:
            before = seen[own * experts + expert]
        # All lanes have read before the first of them writes.
        cute.arch.sync_warp()
        if expert >= 0 and place == 0:
            seen[own * experts + expert] = before + cute.arch.popc(same)
        place += before
        cute.arch.sync_warp()
        if cutlass.const_expr(store):  # noqa: SIM102 - run time inside compile time
            if i < last:
                ptx.store(places + Int64(i) * 4, place, "s32")
    return bad
