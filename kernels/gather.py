"""Combine, second half: the sums of a token on all ranks, brought home and added.

The combine rows of a token's destinations are loaded from the peers and added in fp32 from zero, by
ascending rank, and rounded once, so the result repeats bit for bit. In backward the gradients of
the probabilities come home on the way.

A warp sums one token at a time (`rows.sum_rows`); the entries of its next are loaded before.

Ordering: nothing is read before every rank has said that its sums are there. The last block says
that they may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import ptx, rows, sync

if TYPE_CHECKING:
    from torch import Tensor


def gather(
    memory: rows.RowMemory,
    rank_sK: Tensor,
    row_sK: Tensor,
    out_sH: Tensor,
    d_probs_sK: Tensor | None = None,
    *,
    sms: int,
    layer: int = 0,
) -> None:
    """Add every token's combine rows of all ranks; collective, on the current stream.

    Args:
        rank_sK: int32 [s, K], destination rank of each entry, -1 for none.
        row_sK: int32 [s, K], its grouped row there.
        out_sH: [s, H] in the dtype of the combine rows, rows dense and 16-byte aligned; receives
            the sums, zero for tokens without entries.
        d_probs_sK: fp32 [s, K]; receives ``d_probs`` of each entry's grouped row, zero for none.
            Without it they are not read.
        sms: blocks of the launch, one an SM.
        layer: named in a fault record.
    """
    memory.check_tokens(out_sH, rank_sK, row_sK)
    tokens, topk = rank_sK.shape
    if d_probs_sK is not None:
        rows.check_dense("d_probs_sK", d_probs_sK, torch.float32, (tokens, topk))
    chunks = memory.chunks(out_sH)
    config = Gather(
        topk=topk,
        by_token=memory.ranks <= topk,
        dtype=rows.DTYPES[out_sH.dtype],
        d_probs=d_probs_sK is not None,
    )
    kernel_compile.compiled(config)(
        memory.memory.peers,
        memory.group(layer),
        _Arguments(
            rank_sK.data_ptr(),
            row_sK.data_ptr(),
            out_sH.data_ptr(),
            out_sH.stride(0) * out_sH.element_size(),
            0 if d_probs_sK is None else d_probs_sK.data_ptr(),
            memory.combine.offset,
            memory.d_probs.offset,
            tokens,
            memory.max_tokens,
            chunks,
            sms,
        ),
    )


class _Arguments(NamedTuple):
    """Addresses of a rank's own tensors, offsets in every rank's symmetric memory, and sizes."""

    rank_sK: Int64
    """Address; so are ``row_sK`` and ``out``."""
    row_sK: Int64
    out: Int64
    stride: Int64
    """Bytes from one row of ``out`` to the next."""
    d_probs_sK: Int64
    """Address, 0 where they are not wanted."""
    combine: Int64
    """Offset; so is ``d_probs``."""
    d_probs: Int64
    tokens: Int32
    """s."""
    max_tokens: Int32
    """S."""
    chunks: Int32
    """Of 16 bytes, in a row."""
    sms: Int32
    """Blocks of the launch."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Compile-time constants of `gather`.

    Attributes:
        topk: K.
        by_token: R <= K, so token t of rank r has receive row r*S + t.
        dtype: the DSL's name of the row dtype.
        d_probs: bring the gradients of the probabilities home too.
    """

    topk: int
    by_token: bool
    dtype: str
    d_probs: bool
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


def configs() -> list[Gather]:
    """Representative configurations."""
    return [
        *(
            Gather(topk=8, by_token=by_token, dtype=dtype, d_probs=d_probs)
            for by_token in (True, False)
            for dtype in rows.DTYPES.values()
            for d_probs in (True, False)
        ),
        Gather(topk=1, by_token=False, dtype="BFloat16", d_probs=True),
        Gather(topk=32, by_token=True, dtype="BFloat16", d_probs=True),
    ]


@cute.kernel
def _kernel(
    peers: cute.Tensor,
    config: cutlass.Constexpr[Gather],
    group: sync.Group,
    args: _Arguments,
) -> None:
    lane, warp = rows.place()
    warps = args.sms * rows.WARPS
    tokens = args.tokens
    epoch = sync.next_epoch(group.control, sync.GATHERED)
    next_from = rows.entry(args.rank_sK, warp, tokens, lane, config.topk)
    next_row = rows.entry(args.row_sK, warp, tokens, lane, config.topk)
    sync.wait_all(peers, group, sync.SUMMED, epoch)
    for token in cutlass.range(warp, tokens, warps, unroll=1):
        source, row = next_from, next_row
        next_from = rows.entry(args.rank_sK, token + warps, tokens, lane, config.topk)
        next_row = rows.entry(args.row_sK, token + warps, tokens, lane, config.topk)
        base = peers[cutlass.max(source, 0)]
        gradient = Float32(0.0)
        if cutlass.const_expr(config.d_probs):
            gradient = _gradient(base + args.d_probs, row, source)
        carry, first = rows.carriers(source, lane)
        m = rows.receive_row(row, first, token, group.rank, args.max_tokens, config.by_token)
        address = base + args.combine + Int64(m) * (args.chunks * rows.CHUNK)
        address = cute.arch.shuffle_sync(address, _ascending(source, carry, lane, config.topk))
        count = cute.arch.popc(carry)
        home = args.out + Int64(token) * args.stride
        rows.sum_rows(address, count, home, args.chunks, lane, config.dtype, False)
        # Only now, so that the row's loads do not wait for the gradient.
        if cutlass.const_expr(config.d_probs):
            _store_gradient(args.d_probs_sK, token, gradient, lane, config.topk)

    # The barrier and the fences in last_block keep all loads before the flag.
    if sync.last_block(sync.arrivals(group.control, sync.GATHERED), args.sms):
        sync.signal_all(peers, group, sync.GATHERED, epoch)
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            sync.finish_epoch(group.control, sync.GATHERED, epoch)


@cute.jit
def _gradient(d_probs: Int64, row: Int32, source: Int32) -> Float32:
    """Lane k's gradient from its entry's rank; 0 for none."""
    value = Float32(0.0)
    if source >= 0:
        value = ptx.load(d_probs + Int64(row) * 4, "f32")
    return value


@cute.jit
def _store_gradient(
    d_probs_sK: Int64, token: Int32, value: Float32, lane: Int32, topk: cutlass.Constexpr[int]
) -> None:
    if lane < topk:
        ptx.store(d_probs_sK + (Int64(token) * topk + lane) * 4, value, "f32")


@cute.jit
def _ascending(source: Int32, carry: Int32, lane: Int32, topk: cutlass.Constexpr[int]) -> Int32:
    """For lane i, the lane that carries for the i-th of the token's ranks in ascending order."""
    place = Int32(0)
    for k in cutlass.range_constexpr(topk):
        other = cute.arch.shuffle_sync(source, k)
        if ((carry >> k) & 1) != 0 and other < source:
            place += 1
    carries = ((carry >> lane) & 1) != 0
    found = Int32(0)
    for i in cutlass.range_constexpr(topk):
        here = cute.arch.vote_ballot_sync(carries and place == i)
        if lane == i:
            found = rows.lowest(here)
    return found


@cute.jit
def _launch(
    peers: cute.Tensor,
    config: cutlass.Constexpr[Gather],
    group: sync.Group,
    args: _Arguments,
    stream: Any,
) -> None:
    _kernel(peers, config, group, args).launch(
        grid=[args.sms, 1, 1], block=[rows.THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
    )
