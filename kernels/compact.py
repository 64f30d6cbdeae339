"""Routing map to expert ids, and the counts that the exchange and the destinations start from.

Letters: s tokens, K experts a token goes to, E experts. A *chunk* is ``CHUNK`` consecutive tokens,
one block's work. Both kernels here write

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
from cutlass import Int32, Int64, Uint32, cute
from moonep_megatron.kernels import compile as kc
from moonep_megatron.kernels import ptx, warp
from torch import Tensor

MAX_EXPERTS = 1024
CHUNK = 64
HEADER = 4
TOKENS, BAD, EXCESS = range(3)

_THREADS = 512
_WARPS = _THREADS // warp.WARP
# Every warp compacts and counts its own tokens, so that no barrier is needed between the two.
_WARP_TOKENS = CHUNK // _WARPS


def chunks(tokens: int) -> int:
    """C, the blocks that ``tokens`` tokens need."""
    return -(-tokens // CHUNK)


@dataclass(frozen=True)
class CompactConfig:
    """Routing map and probabilities to ids; ``probs`` is the dtype of the probabilities."""

    experts: int
    topk: int
    probs: str

    signals = waits = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `moonep_megatron.kernels.compile.Config`."""
        experts, topk, dtype = self.experts, self.topk, self.probs

        @cute.kernel
        def kernel(
            counts: cute.Tensor,
            routing_map: Int64,
            probs: Int64,
            ids: Int64,
            chosen: Int64,
            places: Int64,
            tokens: Int32,
        ) -> None:
            first, last = _warp_tokens(tokens)
            excess = Int32(0)
            if first < last:
                excess = _compact(routing_map, ids, first, last, experts, topk)
            # The ids were stored by other lanes of this warp.
            cute.arch.sync_warp()
            _gather_probs(probs, ids, chosen, first, last, experts, topk, dtype)
            _count(counts, ids, places, first, last, tokens, excess, experts, topk)

        @cute.jit
        def launch(
            counts: cute.Tensor,
            routing_map: Int64,
            probs: Int64,
            ids: Int64,
            chosen: Int64,
            places: Int64,
            tokens: Int32,
            stream: Any,
        ) -> None:
            kernel(counts, routing_map, probs, ids, chosen, places, tokens).launch(
                grid=[(tokens + CHUNK - 1) // CHUNK, 1, 1], block=[_THREADS, 1, 1], stream=stream
            )

        example = (kc.vector(Int32), *[Int64(0)] * 5, Int32(0), kc.stream())
        return launch, example


@dataclass(frozen=True)
class CountConfig:
    """Counts of ids that a caller has; ``wide`` ids are int64 and are narrowed to int32."""

    experts: int
    topk: int
    wide: bool

    signals = waits = False

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `moonep_megatron.kernels.compile.Config`."""
        experts, topk, wide = self.experts, self.topk, self.wide

        @cute.kernel
        def kernel(
            counts: cute.Tensor, source: Int64, ids: Int64, places: Int64, tokens: Int32
        ) -> None:
            first, last = _warp_tokens(tokens)
            if cutlass.const_expr(wide):
                _narrow(source, ids, first * topk, last * topk, experts)
                cute.arch.sync_warp()
            _count(counts, ids, places, first, last, tokens, Int32(0), experts, topk)

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
                grid=[(tokens + CHUNK - 1) // CHUNK, 1, 1], block=[_THREADS, 1, 1], stream=stream
            )

        return launch, (kc.vector(Int32), *[Int64(0)] * 3, Int32(0), kc.stream())


def compact(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The chosen experts of every token, ascending, their probabilities, and counts.

    Args:
        routing_map: bool [s, E], contiguous.
        probs: [s, E], contiguous; fp32, bf16, fp16 or fp64.
        topk: K.

    Returns:
        ids int32 [s, K] (-1 for none), probabilities fp32 [s, K] (0 for none), ``place_sK`` and
        ``counts_CE``.
    """
    tokens, experts = routing_map.shape
    _check(experts, topk)
    for name, tensor in (("routing_map", routing_map), ("probs", probs)):
        if not tensor.is_contiguous() or tensor.shape != routing_map.shape:
            raise ValueError(f"{name} {list(tensor.shape)} must be contiguous [tokens, experts]")
    dtype = str(probs.dtype).removeprefix("torch.")
    if routing_map.dtype != torch.bool or dtype not in ptx.FLOAT_LOADS:
        raise ValueError(
            f"routing_map is {routing_map.dtype} and probs {probs.dtype}: "
            f"give bool and one of {', '.join(ptx.FLOAT_LOADS)}"
        )
    ids, places = routing_map.new_empty(2, tokens, topk, dtype=torch.int32)
    chosen = routing_map.new_empty(tokens, topk, dtype=torch.float32)
    counts = _counts_table(tokens, experts, routing_map.device)
    if tokens:
        kc.compiled(CompactConfig(experts, topk, dtype))(
            counts.view(-1), *_addresses(routing_map, probs, ids, chosen, places), tokens
        )
    return ids, chosen, places, counts


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
    _check(experts, topk)
    wide = ids.dtype == torch.int64
    narrow = torch.empty_like(ids, dtype=torch.int32) if wide else ids
    places = torch.empty_like(narrow)
    counts = _counts_table(tokens, experts, ids.device)
    if tokens:
        kc.compiled(CountConfig(experts, topk, wide))(
            counts.view(-1), *_addresses(ids, narrow, places), tokens
        )
    return narrow, places, counts


def configs() -> list[CompactConfig | CountConfig]:
    """Configurations that the tests compile."""
    return [
        CompactConfig(896, 8, "float32"),
        CompactConfig(256, 8, "bfloat16"),
        CompactConfig(60, 4, "float16"),
        CompactConfig(7, 2, "float64"),
        CountConfig(896, 8, False),
        CountConfig(64, 6, True),
    ]


def _check(experts: int, topk: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{experts} experts: the kernels take 1..{MAX_EXPERTS}")
    if topk < 1:
        raise ValueError(f"{topk} experts a token: at least 1 is needed")


def _counts_table(tokens: int, experts: int, device: torch.device) -> Tensor:
    # At least one row, so that there is memory to point to.
    return torch.empty(
        max(chunks(tokens), 1), experts + HEADER, dtype=torch.int32, device=device
    )


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@cute.jit
def _warp_tokens(tokens: Int32) -> tuple[Int32, Int32]:
    """First token of this warp, and the one behind its last."""
    _, own = warp.lane_and_warp()
    block, _, _ = cute.arch.block_idx()
    first = cutlass.min(block * CHUNK + own * _WARP_TOKENS, tokens)
    return first, cutlass.min(first + _WARP_TOKENS, tokens)


@cute.jit
def _compact(
    routing_map: Int64,
    ids: Int64,
    first: Int32,
    last: Int32,
    experts: cutlass.Constexpr[int],
    topk: cutlass.Constexpr[int],
) -> Int32:
    """One warp: ids of its tokens; returns the choices beyond K."""
    lane, _ = warp.lane_and_warp()
    width = 16 if experts % 16 == 0 else 4 if experts % 4 == 0 else 1
    rounds = -(-experts // (warp.WARP * width))
    tokens = _WARP_TOKENS if width == 16 else 1
    excess = Int32(0)
    for start in cutlass.range(first, last, tokens):
        # All loads first: one latency for all of them.
        chosen = []
        for i in cutlass.range_constexpr(tokens * rounds):
            token = cutlass.min(start + i // rounds, last - 1)
            at = (i % rounds * warp.WARP + lane) * width
            bits = _chosen_bits(
                routing_map + Int64(token) * experts + cutlass.min(at, experts - width), width
            )
            chosen.append(bits if at < experts else Int32(0))
        for i in cutlass.range_constexpr(tokens):
            if start + i < last:
                excess += _emit(
                    chosen[i * rounds : (i + 1) * rounds],
                    ids + Int64(start + i) * (topk * 4),
                    width,
                    topk,
                )
    return excess


@cute.jit
def _chosen_bits(address: Int64, width: cutlass.Constexpr[int]) -> Int32:
    """Bit i is byte i of ``width`` bytes that are 0 or 1."""
    if cutlass.const_expr(width == 1):
        words = (ptx.load_byte(address),)
    elif cutlass.const_expr(width == 4):
        words = (ptx.load(address, "u32"),)
    else:
        words = ptx.load16_streaming(address)
    bits = Int32(0)
    for i in cutlass.range_constexpr(len(words)):
        # Byte b of a word moves to bit 28 + b; no two products meet below, so nothing carries.
        bits |= Int32((words[i] * Uint32(0x10204080)) >> 28) << (4 * i)
    return bits


@cute.jit
def _emit(
    chosen: list[Int32], row: Int64, width: cutlass.Constexpr[int], topk: cutlass.Constexpr[int]
) -> Int32:
    """One warp stores the K ids of a token in order; returns the choices beyond K."""
    lane, _ = warp.lane_and_warp()
    before = Int32(0)
    for i in cutlass.range_constexpr(len(chosen)):
        bits = chosen[i]
        inclusive = warp.inclusive_scan(cute.arch.popc(bits))
        place = before + inclusive - cute.arch.popc(bits)
        before += cute.arch.shuffle_sync(inclusive, warp.WARP - 1)
        while bits != 0:
            if place < topk:
                expert = (i * warp.WARP + lane) * width + warp.lowest(bits)
                ptx.store(row + Int64(place) * 4, expert, "s32")
            place += 1
            bits &= bits - 1
    for place in cutlass.range(before + lane, topk, warp.WARP):
        ptx.store(row + Int64(place) * 4, Int32(-1), "s32")
    return cutlass.max(before - topk, 0)


@cute.jit
def _gather_probs(
    probs: Int64,
    ids: Int64,
    chosen: Int64,
    first: Int32,
    last: Int32,
    experts: cutlass.Constexpr[int],
    topk: cutlass.Constexpr[int],
    dtype: cutlass.Constexpr[str],
) -> None:
    """One warp: probabilities of the ids of its tokens, an entry a lane."""
    lane, _ = warp.lane_and_warp()
    for i in cutlass.range(first * topk + lane, last * topk, warp.WARP):
        expert = ptx.load(ids + Int64(i) * 4, "s32")
        value = cutlass.Float32(0.0)
        if expert >= 0:
            at = Int64(i // topk) * experts + Int64(expert)
            value = ptx.load_float(probs + at * ptx.FLOAT_BYTES[dtype], dtype)
        ptx.store(chosen + Int64(i) * 4, value, "f32")


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
def _count(
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
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane, own = warp.lane_and_warp()
    smem = cutlass.utils.SmemAllocator()
    # by (warp, expert): first the warp's own entries, then those of the warps before it
    seen = smem.allocate_tensor(Int32, cute.make_layout(_WARPS * experts), byte_alignment=16)
    heads = smem.allocate_tensor(Int32, cute.make_layout(2 * _WARPS), byte_alignment=16)
    for i in cutlass.range(thread, _WARPS * experts, _THREADS):
        seen[i] = 0
    cute.arch.sync_threads()
    bad = _walk(seen, ids, places, first * topk, last * topk, experts, False)
    bad = warp.warp_sum(bad)
    if lane == 0:
        heads[own] = bad
        heads[_WARPS + own] = excess
    cute.arch.sync_threads()
    row = block * (experts + HEADER)
    for expert in cutlass.range(thread, experts, _THREADS):
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
        if expert >= 0:
            before = seen[own * experts + expert]
            # All lanes have read before the first of them writes.
            cute.arch.sync_warp(same)
            if place == 0:
                seen[own * experts + expert] = before + cute.arch.popc(same)
            place += before
        cute.arch.sync_warp()
        if cutlass.const_expr(store):
            if i < last:  # noqa: SIM102 - a run-time condition inside a compile-time one
                ptx.store(places + Int64(i) * 4, place, "s32")
    return bad
