"""The pool of duplicate slots: weights in, gradients out, shared by the layers of one group.

Slots are scratch memory. They are never parameters, buffers or state-dict entries: a slot holds a
copy only between the push of one wave and its last use in the same pass. Where copies are reused,
every layer has slots of its own, and each slot a *tag* that says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class SlotShape:
    """What one slot holds: shapes [out, in] of both projections, weight dtype and device."""

    fc1: tuple[int, int]
    fc2: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def grad_dtype(self) -> torch.dtype:
        """fp32, or fp64 for an fp64 model."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of one slot."""
        return self._elements * self.dtype.itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients of one slot."""
        return self._elements * self.grad_dtype.itemsize

    @property
    def _elements(self) -> int:
        return self.fc1[0] * self.fc1[1] + self.fc2[0] * self.fc2[1]


@dataclass(frozen=True, kw_only=True)
class SlotPool:
    """B slots: ``fc1`` [B, out1, H] and ``fc2`` [B, H, F], with gradients of the same shapes.

    ``tags``, where copies are reused: int64 [B, 2, 3] on the host, the (layer, expert, weight
    version) whose FC1 and FC2 each slot holds, -1 for nothing. Written by the rank that holds the
    slots, after the copy has arrived.
    """

    count: int
    fc1: Tensor
    fc2: Tensor
    grad1: Tensor
    grad2: Tensor
    tags: Tensor | None = None

    @staticmethod
    def empty(count: int, shape: SlotShape) -> SlotPool:
        """Slots in ordinary memory, without values."""
        weight = partial(torch.empty, count, dtype=shape.dtype, device=shape.device)
        grad = partial(torch.empty, count, dtype=shape.grad_dtype, device=shape.device)
        return SlotPool(
            count=count,
            fc1=weight(*shape.fc1),
            fc2=weight(*shape.fc2),
            grad1=grad(*shape.fc1),
            grad2=grad(*shape.fc2),
        )

    def tagged(self) -> SlotPool:
        """As many slots with weights and tags of their own, and these gradients."""
        with torch.inference_mode(False):
            fc1, fc2 = torch.empty_like(self.fc1), torch.empty_like(self.fc2)
        tags = torch.full((self.count, 2, 3), -1, dtype=torch.int64)
        return replace(self, fc1=fc1, fc2=fc2, tags=tags)

    def weights(self, projection: int) -> Tensor:
        """Slots of FC1 (0) or FC2 (1)."""
        return (self.fc1, self.fc2)[projection]


# Weak in the group, so that a destroyed group does not keep its slots alive.
_pools: WeakKeyDictionary[ProcessGroup, dict[tuple[str, int, SlotShape], SlotPool]] = (
    WeakKeyDictionary()
)


def slot_pool(
    group: ProcessGroup,
    count: int,
    shape: SlotShape,
    make: Callable[[int, SlotShape], SlotPool],
) -> SlotPool:
    """The pool of ``count`` slots for this group and shape, made at its first use.

    Layers of one shape share a pool: expert computes of two layers never overlap on one stream.
    """
    pools = _pools.setdefault(group, {})
    # A layer of another backend needs slots of another kind.
    key = (make.__qualname__, count, shape)
    if key not in pools:
        # The first pass may be an evaluation, whose tensors could never be trained with.
        with torch.inference_mode(False):
            pools[key] = make(count, shape)
    return pools[key]
