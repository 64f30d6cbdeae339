"""What dispatch and combine share: where rows lie, and a token's entries spread over a warp.

A warp of 32 threads moves one token row at a time, lane i its 16-byte chunks i, i + 32, and so on.
Lane k also holds the token's entry k, so K is at most 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute
from moonep_megatron.kernels import ptx, sync

if TYPE_CHECKING:
    from torch import Tensor

    from moonep_megatron.backends.memory import Region, SymmetricMemory

LANES = 32
# Launches say min_blocks_per_mp=1. Without it the assembler saves registers for a second block, and
# to do so uses each load before it issues the next: one load in flight instead of twelve.
THREADS = 512
WARPS = THREADS // LANES  # of a block
MAX_TOPK = LANES
MAX_RANKS = 128  # one thread of a free_receive block each
CHUNK = 16  # bytes of one load or store
STRIDE = LANES * CHUNK  # bytes between two chunks of one lane

# The DSL's names of the row dtypes.
DTYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}

# `sum_rows` loads chunks of this many rows before it adds the first,
SUM_ROWS = 2
# and of each this many. A chunk takes 4 registers a row, and 8 (4 in fp32) for the sums.
SUM_UNROLL = {"BFloat16": 6, "Float16": 6, "Float32": 8}
WORDS = CHUNK // 4


@dataclass(frozen=True, kw_only=True)
class RowMemory:
    """The symmetric memory of one group's rows, as one rank sees it; N and M as in `backends.base`.

    Attributes:
        flags: int32 [STAGES, R].
        receive: [M, H] rows as their tokens' owners sent them.
        combine: [M, H] sums of the grouped rows of each receive row.
        rows_of: int32 [M, K], the grouped rows of each receive row in order of k, then -1.
        source_row: int32 [N], the receive row of each grouped row.
        probs: fp32 [N], the probability of each grouped row.
        d_probs: fp32 [N], its gradient.
        max_tokens: S.
        timeout_ns: bound on every wait.
    """

    memory: SymmetricMemory
    flags: Region
    receive: Region
    combine: Region
    rows_of: Region
    source_row: Region
    probs: Region
    d_probs: Region
    max_tokens: int
    rank: int
    ranks: int
    timeout_ns: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"{self.ranks} ranks: the kernels take 1..{MAX_RANKS}")

    def group(self, layer: int) -> sync.Group:
        """An argument of every kernel of rows."""
        return sync.Group(*self._place, layer)

    @cached_property
    def _place(self) -> tuple[int, ...]:
        return (
            self.flags.offset,
            self.memory.control.data_ptr(),
            self.memory.fault.data_ptr(),
            self.timeout_ns,
            self.rank,
            self.ranks,
        )

    def check_tokens(self, rows_sH: Tensor, rank_sK: Tensor, row_sK: Tensor) -> None:
        """Refuse tokens or destinations that the kernels would misread.

        Raises:
            ValueError: more than S tokens, or not int32 [s, K] twice with K in 1..32.
        """
        tokens, topk = rank_sK.shape
        if rows_sH.shape[0] != tokens or tokens > self.max_tokens:
            raise ValueError(
                f"{rows_sH.shape[0]} rows and destinations of {tokens} tokens: give as many of "
                f"both, at most {self.max_tokens}"
            )
        if not 1 <= topk <= MAX_TOPK:
            raise ValueError(f"{topk} experts a token: the kernels take 1..{MAX_TOPK}")
        check_dense("rank_sK", rank_sK, torch.int32, (tokens, topk))
        check_dense("row_sK", row_sK, torch.int32, (tokens, topk))

    def chunks(self, rows_H: Tensor) -> int:
        """16-byte chunks of a row, the same as in the symmetric rows.

        Raises:
            ValueError: the rows of this [rows, H] tensor cannot be moved by 16 bytes.
        """
        nbytes = rows_H.shape[1] * rows_H.element_size()
        strides = rows_H.stride()
        if rows_H.dtype not in DTYPES:
            raise ValueError(f"rows of {rows_H.dtype}: the kernels take {list(DTYPES)}")
        if nbytes != self.receive.shape[1] * self.receive.dtype.itemsize:
            raise ValueError(
                f"rows of {rows_H.shape[1]} {rows_H.dtype}: the symmetric memory has "
                f"{self.receive.shape[1]} {self.receive.dtype}"
            )
        start = rows_H.data_ptr() | strides[0] * rows_H.element_size()
        if nbytes % CHUNK or (rows_H.numel() and (start % CHUNK or strides[1] != 1)):
            raise ValueError(
                f"rows of {nbytes} bytes at {rows_H.data_ptr():#x} with strides {strides}: each "
                f"must be dense, of a multiple of {CHUNK} bytes, and start at a multiple"
            )
        return nbytes // CHUNK


def check_dense(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another dtype, shape or layout.

    Raises:
        ValueError: with its name.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}: "
            f"give dense {dtype} {list(shape)}"
        )


@cute.jit
def place() -> tuple[Int32, Int32]:
    """This thread's lane, and its warp's number in the grid."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(block * WARPS + thread // LANES)
    return thread % LANES, warp


@cute.jit
def lowest(mask: Int32) -> Int32:
    """Index of the lowest set bit; 32 when there is none."""
    return cute.arch.popc((mask & (0 - mask)) - 1)


@cute.jit
def entry(
    address: Int64, token: Int32, tokens: Int32, lane: Int32, topk: cutlass.Constexpr[int]
) -> Int32:
    """Lane k's element [token, k] of an int32 [tokens, K]; -1 beyond either bound."""
    value = Int32(-1)
    if lane < topk and token < tokens:
        value = ptx.load(address + (Int64(token) * topk + lane) * 4, "s32")
    return value


@cute.jit
def carriers(rank: Int32, lane: Int32) -> tuple[Int32, Int32]:
    """Which entries of a token carry its row: the first of each destination.

    Args:
        rank: lane k's destination, -1 for none.

    Returns:
        the mask of those lanes, and for each lane the one that carries for its destination.
    """
    first = lowest(Int32(cute.arch.match_sync(0xFFFFFFFF, rank, "any")))
    return cute.arch.vote_ballot_sync(rank >= 0 and lane == first), first


@cute.jit
def stretches(chunks: Int32, unroll: cutlass.Constexpr[int]) -> tuple[Int32, Int32]:
    """A row in equal stretches of at most ``unroll`` chunks a lane: how many, and chunks of each.

    Only the last stretch may be shorter.
    """
    each = (chunks + LANES - 1) // LANES
    number = (each + unroll - 1) // unroll
    return number, (each + number - 1) // number * LANES


@cute.jit
def receive_row(
    row: Int32,
    first: Int32,
    token: Int32,
    rank: Int32,
    max_tokens: Int32,
    by_token: cutlass.Constexpr[bool],
) -> Int32:
    """Lane k's receive row on its destination (see `backends.base.receive_rows`)."""
    value = rank * max_tokens + token
    if cutlass.const_expr(not by_token):
        value = cute.arch.shuffle_sync(row, first)
    return value


@cute.jit
def sum_rows(
    address: Int64,
    count: Int32,
    out: Int64,
    chunks: Int32,
    lane: Int32,
    dtype_name: cutlass.Constexpr[str],
    streaming: cutlass.Constexpr[bool],
) -> None:
    """Store the fp32 sum of ``count`` rows, rounded once; lane i has the i-th row's address.

    Args:
        streaming: nobody writes these rows while the kernel runs.
    """
    dtype = getattr(cutlass, dtype_name)
    unroll = SUM_UNROLL[dtype_name]
    per_word = 32 // dtype.width
    for start in cutlass.range(0, chunks, LANES * unroll, unroll=1):
        chunk = start + lane
        offset = Int64(chunk) * CHUNK
        # Sums begin at +0 and never become -0: the zeros of an absent row change nothing.
        sums = [Float32(0.0) for _ in range(unroll * WORDS * per_word)]
        for i in cutlass.range(0, count, SUM_ROWS, unroll=1):
            words = []
            for j in cutlass.range_constexpr(SUM_ROWS):
                # Beyond count the lane wraps around and its address is not used.
                row = cute.arch.shuffle_sync(address, i + j) + offset
                for u in cutlass.range_constexpr(unroll):
                    wanted = both(i + j < count, chunk + u * LANES < chunks)
                    words += ptx.load16_if(wanted, row + u * STRIDE, streaming=streaming)
            for j in cutlass.range_constexpr(SUM_ROWS):
                here = words[j * unroll * WORDS : (j + 1) * unroll * WORDS]
                values = [value for word in here for value in ptx.unpack(word, dtype)]
                sums = [a + b for a, b in zip(sums, values, strict=True)]
        packed = [
            ptx.pack(tuple(sums[at : at + per_word]), dtype) for at in range(0, len(sums), per_word)
        ]
        for u in cutlass.range_constexpr(unroll):
            ptx.store16_if(
                chunk + u * LANES < chunks,
                out + offset + u * STRIDE,
                tuple(packed[u * WORDS : (u + 1) * WORDS]),
            )


def both(first: cutlass.Boolean, second: cutlass.Boolean) -> cutlass.Boolean:
    """Both, without a branch."""
    return cutlass.Boolean(first & second)
