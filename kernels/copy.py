"""A plain copy between two ranks: the ceiling that the other kernels are measured against.

It says nothing to anyone: no flags, no epochs. Sources and targets must not overlap, and whoever
launches it knows that the bytes are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import ptx
from torch import Tensor

THREADS = 512
CHUNK = 16
# Chunks that a thread loads before it stores the first. Which is faster depends on the link.
UNROLLS = (8, 16)
# Copies are of a multiple of so many bytes, so that the loop has no last part.
GRAIN = THREADS * CHUNK * max(UNROLLS)


def copy(
    peers: Tensor,
    source: tuple[int, int],
    target: tuple[int, int],
    nbytes: int,
    unroll: int,
    *,
    sms: int,
) -> None:
    """Copy bytes from one rank's symmetric memory to another's, on the current stream.

    Args:
        peers: int64 [R] on the device, addresses of all ranks' allocations.
        source, target: rank and offset of either end; one of the ranks may be any other.
        nbytes: a multiple of ``GRAIN``.
        unroll: one of ``UNROLLS``.
        sms: blocks of the launch, one an SM.

    Raises:
        ValueError: for other sizes.
    """
    if nbytes <= 0 or nbytes % GRAIN or unroll not in UNROLLS:
        raise ValueError(
            f"a copy of {nbytes} bytes, {unroll} chunks at a time: give a multiple of {GRAIN} "
            f"bytes and one of {UNROLLS}"
        )
    kernel_compile.compiled(Copy(unroll))(peers, _Arguments(*source, *target, nbytes, sms))


class _Arguments(NamedTuple):
    """Ranks of both ends and offsets in their allocations, and sizes."""

    source_rank: Int32
    source: Int64
    target_rank: Int32
    target: Int64
    nbytes: Int64
    sms: Int32
    """Blocks of the launch."""


@dataclass(frozen=True)
class Copy:
    """Compile-time constants of `copy`."""

    unroll: int
    signals: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    moves_rows: ClassVar[bool] = True

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """See `compile.Config`."""
        return _launch, (
            kernel_compile.vector(Int64, align=8),
            kernel_compile.scalars(_Arguments),
            self.unroll,
            kernel_compile.stream(),
        )


def configs() -> list[Copy]:
    """Every configuration."""
    return [Copy(unroll) for unroll in UNROLLS]


@cute.kernel
def _kernel(peers: cute.Tensor, args: _Arguments, unroll: cutlass.Constexpr[int]) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    step = THREADS * CHUNK
    start = Int64(thread) * CHUNK
    load_from = peers[args.source_rank] + args.source + start
    store_to = peers[args.target_rank] + args.target + start
    tiles = Int32(args.nbytes // (step * unroll))
    for tile in cutlass.range(block, tiles, args.sms, unroll=1):
        offset = Int64(tile) * (step * unroll)
        words = [ptx.load16(load_from + offset + i * step) for i in range(unroll)]
        for i in cutlass.range_constexpr(unroll):
            ptx.store16(store_to + offset + i * step, words[i])
    ptx.fence_sys()


@cute.jit
def _launch(
    peers: cute.Tensor, args: _Arguments, unroll: cutlass.Constexpr[int], stream: Any
) -> None:
    _kernel(peers, args, unroll).launch(
        grid=[args.sms, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
    )
