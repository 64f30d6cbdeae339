"""Combine, first half: the rows of one token on this rank, summed.

The sum of each receive row's grouped rows is added in fp32 from zero, in order of k, rounded once
to the row dtype and written to the combine row of the same number, where `gather` fetches it. It
serves forward and, with the gradients of the grouped rows, backward.

A warp sums one row at a time (`rows.sum_rows`); the indices of its next are loaded before.

Ordering: no sum is stored before every rank has gathered the last ones. The last block says that
this rank's sums, and what earlier kernels of the stream wrote (``d_probs``), may be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import torch
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import ptx, rows, sync

if TYPE_CHECKING:
    from torch import Tensor


def presum(
    memory: rows.RowMemory,
    rows_NH: Tensor,
    rows_of_MK: Tensor,
    source_row_N: Tensor,
    cap: Tensor,
    *,
    sms: int,
    layer: int = 0,
) -> None:
    """Sum the grouped rows of every receive row into the combine rows, on the current stream.

    No communication but flags; combine rows without a token are not written.

    Args:
        rows_NH: [N, H], bf16, fp16 or fp32, rows dense and 16-byte aligned, any row stride.
        rows_of_MK: int32 [M, K], as `dispatch` left it on this rank.
        source_row_N: int32 [N], likewise.
        cap: int32 scalar on the device, the grouped rows of this rank (ignored with R <= K).
        sms: blocks of the launch, one an SM.
        layer: named in a fault record.
    """
    (most, topk), dtype = rows_of_MK.shape, rows_NH.dtype
    chunks = memory.chunks(rows_NH)
    if most > memory.combine.shape[0] or not 1 <= topk <= rows.MAX_TOPK:
        raise ValueError(
            f"rows_of_MK {list(rows_of_MK.shape)}: give at most {memory.combine.shape[0]} rows and "
            f"{rows.MAX_TOPK} columns"
        )
    rows.check_dense("rows_of_MK", rows_of_MK, torch.int32, (most, topk))
    rows.check_dense("source_row_N", source_row_N, torch.int32, (rows_NH.shape[0],))
    rows.check_dense("cap", cap, torch.int32, ())
    config = Presum(topk=topk, by_token=memory.ranks <= topk, dtype=rows.DTYPES[dtype])
    kernel_compile.compiled(config)(
        memory.memory.peers,
        memory.group(layer),
        _Arguments(
            rows_NH.data_ptr(),
            rows_NH.stride(0) * rows_NH.element_size(),
            rows_of_MK.data_ptr(),
            source_row_N.data_ptr(),
            cap.data_ptr(),
            memory.combine.offset,
            most,
            chunks,
            sms,
        ),
    )


class _Arguments(NamedTuple):
    """Addresses of this rank's tensors, and sizes."""

    grouped: Int64
    """Address of the grouped rows."""
    stride: Int64
    """Bytes from one of them to the next."""
    rows_of: Int64
    """Address; so are ``source_row`` and ``cap``."""
    source_row: Int64
    cap: Int64
    combine: Int64
    """Offset in the symmetric memory."""
    most: Int32
    """M."""
    chunks: Int32
    """Of 16 bytes, in a row."""
    sms: Int32
    """Blocks of the launch."""


@dataclass(frozen=True, kw_only=True)
class Presum:
    """Compile-time constants of `presum`.

    Attributes:
        topk: K.
        by_token: R <= K, so that ``rows_of`` says of every receive row whether it has rows.
        dtype: the DSL's name of the row dtype.
    """

    topk: int
    by_token: bool
    dtype: str
    moves_rows: ClassVar[bool] = True

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch, (
            kernel_compile.vector(Int64),
            self,
            kernel_compile.scalars(sync.Group),
            kernel_compile.scalars(_Arguments),
            kernel_compile.stream(),
        )


def configs() -> list[Presum]:
    """Representative configurations."""
    return [
        Presum(topk=topk, by_token=by_token, dtype=dtype)
        for topk, by_token in ((8, True), (8, False), (1, False))
        for dtype in rows.DTYPES.values()
    ]


@cute.kernel
def _kernel(
    peers: cute.Tensor,
    config: cutlass.Constexpr[Presum],
    group: sync.Group,
    args: _Arguments,
) -> None:
    lane, warp = rows.place()
    warps = args.sms * rows.WARPS
    epoch = sync.next_epoch(group.control, sync.SUMMED)
    last = args.most
    if cutlass.const_expr(not config.by_token):
        # Grouped rows behind the cap hold what an earlier pass left.
        last = cutlass.min(last, ptx.load(args.cap, "s32"))
    next_row = rows.entry(args.rows_of, warp, last, lane, config.topk)
    next_carrier = _carrier(args.source_row, warp, last, config)
    sums = peers[group.rank] + args.combine
    sync.wait_all(peers, group, sync.GATHERED, epoch - 1)
    for m in cutlass.range(warp, last, warps, unroll=1):
        row, carrier = next_row, next_carrier
        next_row = rows.entry(args.rows_of, m + warps, last, lane, config.topk)
        next_carrier = _carrier(args.source_row, m + warps, last, config)
        # The rows stand in front, so lane i has the i-th.
        count = cute.arch.popc(cute.arch.vote_ballot_sync(row >= 0))
        # A grouped row that carries no token keeps an old rows_of.
        if count > 0 and carrier == m:
            out = sums + Int64(m) * (args.chunks * rows.CHUNK)
            address = args.grouped + Int64(row) * args.stride
            rows.sum_rows(address, count, out, args.chunks, lane, config.dtype, True)

    if sync.last_block(sync.arrivals(group.control, sync.SUMMED), args.sms):
        sync.signal_all(peers, group, sync.SUMMED, epoch)
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            sync.finish_epoch(group.control, sync.SUMMED, epoch)


@cute.jit
def _carrier(source_row: Int64, m: Int32, last: Int32, config: cutlass.Constexpr[Presum]) -> Int32:
    """The receive row of grouped row m, which is m itself where it carries a token."""
    carrier = m
    if cutlass.const_expr(not config.by_token):
        carrier = Int32(-1)
        if m < last:
            carrier = ptx.load(source_row + Int64(m) * 4, "s32")
    return carrier


@cute.jit
def _launch(
    peers: cute.Tensor,
    config: cutlass.Constexpr[Presum],
    group: sync.Group,
    args: _Arguments,
    stream: Any,
) -> None:
    _kernel(peers, config, group, args).launch(
        grid=[args.sms, 1, 1], block=[rows.THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
    )
