"""Routing map to expert ids, in one pass; counts them too, see `moonep_megatron.kernels.counting`.

Letters: s tokens, K experts a token goes to, E experts.
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
from moonep_megatron.kernels.counting import (
    CHUNK,
    THREADS,
    WARP_TOKENS,
    addresses,
    check,
    count_entries,
    counts_table,
    warp_tokens,
)
from torch import Tensor


@dataclass(frozen=True)
class CompactConfig:
    """Routing map and probabilities to ids; ``probs`` is the dtype of the probabilities."""

    experts: int
    topk: int
    probs: str

    signals = waits = False
    starts_early = True

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
            cute.arch.griddepcontrol_wait()
            first, last = warp_tokens(tokens)
            excess = Int32(0)
            if first < last:
                excess = _compact(routing_map, ids, first, last, experts, topk)
            # The ids were stored by other lanes of this warp.
            cute.arch.sync_warp()
            _gather_probs(probs, ids, chosen, first, last, experts, topk, dtype)
            count_entries(counts, ids, places, first, last, tokens, excess, experts, topk)

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
                grid=[(tokens + CHUNK - 1) // CHUNK, 1, 1],
                block=[THREADS, 1, 1],
                use_pdl=True,
                stream=stream,
            )

        example = (kc.vector(Int32), *[Int64(0)] * 5, Int32(0), kc.stream())
        return launch, example


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
    check(experts, topk)
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
    counts = counts_table(tokens, experts, routing_map.device)
    if tokens:
        kc.compiled(CompactConfig(experts, topk, dtype))(
            counts.view(-1), *addresses(routing_map, probs, ids, chosen, places), tokens
        )
    return ids, chosen, places, counts


def configs() -> list[CompactConfig]:
    """Configurations that the tests compile."""
    return [
        CompactConfig(896, 8, "float32"),
        CompactConfig(256, 8, "bfloat16"),
        CompactConfig(60, 4, "float16"),
        CompactConfig(7, 2, "float64"),
    ]


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
    tokens = WARP_TOKENS if width == 16 else 1
    excess = Int32(0)
    for start in cutlass.range(first, last, tokens):
        # All loads first: one latency for all of them.
        loaded = []
        for i in cutlass.range_constexpr(tokens * rounds):
            token = cutlass.min(start + i // rounds, last - 1)
            at = cutlass.min((i % rounds * warp.WARP + lane) * width, experts - width)
            loaded.append(_load(routing_map + Int64(token) * experts + at, width))
        # Keeps the compiler from using the first words before it asks for the last.
        cute.arch.sync_warp()
        chosen = []
        for i in cutlass.range_constexpr(tokens * rounds):
            inside = (i % rounds * warp.WARP + lane) * width < experts
            chosen.append(_chosen_bits(loaded[i]) if inside else Int32(0))
        for i in cutlass.range_constexpr(tokens):
            if start + i < last:
                excess += _emit(
                    chosen[i * rounds : (i + 1) * rounds],
                    ids + Int64(start + i) * (topk * 4),
                    width,
                    topk,
                )
    return excess


def _load(address: Int64, width: int) -> tuple[Uint32, ...]:
    """Words of 16, 4 or 1 bytes."""
    if width == 16:
        return ptx.load16(address)
    return (ptx.load(address, "u32") if width == 4 else ptx.load_byte(address),)


@cute.jit
def _chosen_bits(words: tuple[Uint32, ...]) -> Int32:
    """Bit i is byte i of words whose bytes are 0 or 1."""
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
