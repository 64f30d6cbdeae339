"""Memory that every rank of an NVLink domain can address, and what kernels need beside it."""

from __future__ import annotations

import math
import weakref

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

_ALIGNMENT = 256  # bytes, of every region


class Regions:
    """Byte offsets of named regions in one allocation, the same on every rank.

    Example: ``regions = Regions(); receive = regions.add((M, H), torch.bfloat16)``.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, shape: tuple[int, ...], dtype: torch.dtype) -> Region:
        """Reserve room; regions start at multiples of 256 bytes."""
        region = Region(self.nbytes, shape, dtype)
        used = math.prod(shape) * dtype.itemsize
        self.nbytes += -(-used // _ALIGNMENT) * _ALIGNMENT
        return region


class Region:
    """A part of the symmetric allocation: ``offset`` in bytes, ``shape`` and ``dtype``."""

    def __init__(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.offset = offset
        self.shape = shape
        self.dtype = dtype


class SymmetricMemory:
    """One allocation a rank, mapped into every rank of the group. Collective to create.

    Args:
        group: an expert-parallel group inside one NVLink domain.
        nbytes: size, the same on all ranks.
        device: this rank's GPU.

    Attributes:
        peers: int64 [R] on the device, the address of every rank's allocation as mapped here.
        control: int32 [ints] on the device, this rank's own counters, zero at first.
        fault: int32 [ints] in pinned host memory, zero until a wait runs out.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        nbytes: int,
        device: torch.device,
        *,
        control_ints: int,
        fault_ints: int,
    ) -> None:
        self._group = weakref.ref(group)
        self.bytes = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        # Flags must be zero on every rank before anyone may write into them.
        self.bytes.zero_()
        torch.cuda.synchronize(device)
        self._handle = symm_mem.rendezvous(self.bytes, group)
        dist.barrier(group)
        self.peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        self.control = torch.zeros(control_ints, dtype=torch.int32, device=device)
        self.fault = torch.zeros(fault_ints, dtype=torch.int32, pin_memory=True)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, as long as somebody else keeps it: this memory must not."""
        return self._group()

    def local(self, region: Region) -> Tensor:
        """This rank's own part of a region."""
        return part_of(self.bytes, region.offset, region.shape, region.dtype)


def part_of(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in other memory that autograd does not take for a view of it.

    Args:
        memory: uint8.
        offset: bytes, a multiple of the dtype's size.
    """
    start = (memory.storage_offset() + offset) // dtype.itemsize
    part = torch.empty(0, dtype=dtype, device=memory.device)
    with torch.no_grad():
        return part.set_(memory.untyped_storage(), start, shape)  # type: ignore[call-overload]
