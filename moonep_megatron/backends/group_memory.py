"""The symmetric memory of one expert-parallel group, made at first use and shared by its layers.

Letters as in `moonep_megatron.backends.base`. Everything here is collective: all ranks make the
same memory in the same order, which their layers' first passes do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from moonep_megatron.backends import faults
from moonep_megatron.backends.base import row_counts
from moonep_megatron.backends.memory import Region, Regions, SymmetricMemory, part_of
from moonep_megatron.backends.turns import Turns
from moonep_megatron.kernels import pull_gradients as pull
from moonep_megatron.kernels import push_weights as push
from moonep_megatron.kernels import sync, tags
from moonep_megatron.kernels.counting import HEADER
from moonep_megatron.kernels.dispatch import dispatch, free_receive
from moonep_megatron.kernels.duplicates import Duplicates, Kept
from moonep_megatron.kernels.gather import gather
from moonep_megatron.kernels.presum import presum
from moonep_megatron.kernels.rows import RowMemory
from moonep_megatron.slots import SlotPool, SlotShape


@dataclass(frozen=True)
class RowShape:
    """What rows a layer moves: S, K, slack in parts, H and their dtype."""

    max_tokens: int
    topk: int
    slack: int
    width: int
    dtype: torch.dtype

    def rows(self, ranks: int) -> tuple[int, int]:
        """(N, M)."""
        return row_counts(self.max_tokens, self.topk, ranks, self.slack)


@dataclass(frozen=True, kw_only=True)
class CountMemory:
    """Where the counts of all ranks arrive: int32 [2, R, E + HEADER], two halves by epoch."""

    memory: SymmetricMemory
    flags: Region
    counts: Region


@dataclass(frozen=True, kw_only=True)
class SymmetricSlots(SlotPool):
    """Slots that other ranks push into and pull from, the same memory or, where kept, two."""

    pushed: Duplicates
    pulled: Duplicates


class Tables:
    """Copies of what a dispatch leaves beside its rows on this rank, kept by the route of a pass.

    Attributes:
        rows_of_MK, source_row_N: as in `RowMemory`.
    """

    def __init__(self, shape: RowShape, ranks: int, device: torch.device) -> None:
        regions = Regions()
        parts = _table_regions(regions, shape, ranks)
        self._memory = torch.empty(regions.nbytes, dtype=torch.uint8, device=device)
        self.rows_of_MK, self.source_row_N = (self._part(region) for region in parts[:2])
        self._probs = parts[2]

    def probs_N(self) -> Tensor:
        """The probabilities, as in `RowMemory`: a new tensor each time over the same memory.

        Autograd gives the tensor a history, which keeps the route of the pass: the route must not
        in turn keep the tensor.
        """
        return self._part(self._probs)

    def _part(self, region: Region) -> Tensor:
        return part_of(self._memory, region.offset, region.shape, region.dtype)

    def take(self, rows: RowMemory) -> None:
        """Copy what the last dispatch with probabilities left; one copy, no wait."""
        there = Region(rows.rows_of.offset, self._memory.shape, torch.uint8)
        self._memory.copy_(rows.memory.local(there))


def _projections(
    regions: Regions, count: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[Region, Region]:
    """B slots of FC1 and of FC2."""
    first, second = (regions.add((count, *shape), dtype) for shape in shapes)
    return first, second


def _table_regions(regions: Regions, shape: RowShape, ranks: int) -> tuple[Region, Region, Region]:
    """``rows_of``, ``source_row`` and ``probs``: neighbours, so that one copy takes them all."""
    grouped, received = shape.rows(ranks)
    return (
        regions.add((received, shape.topk), torch.int32),
        regions.add((grouped,), torch.int32),
        regions.add((grouped,), torch.float32),
    )


class GroupMemory:
    """All symmetric memory of a group on this rank, and the stream of its pushes and pulls."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self._group, self.device = weakref.ref(group), device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_ns = int(timeout * 1e9)
        # Before the GEMMs, so that a push gets its few SMs when both are waiting.
        self.side = torch.cuda.Stream(device, priority=-1)
        self.turns = Turns()
        self._counts: dict[int, CountMemory] = {}
        self._rows: dict[RowShape, RowMemory] = {}
        self._warm_kept = False

    def counts(self, experts: int) -> CountMemory:
        """The memory of exchanges over E experts."""
        if experts not in self._counts:
            regions, flags = self._regions()
            counts = regions.add((2, self.ranks, experts + HEADER), torch.int32)
            memory = self._allocate(regions, num_experts=experts)
            self._counts[experts] = CountMemory(memory=memory, flags=flags, counts=counts)
        return self._counts[experts]

    def rows(self, shape: RowShape) -> RowMemory:
        """The memory of dispatch and combine."""
        if shape not in self._rows:
            regions, flags = self._regions()
            grouped, received = shape.rows(self.ranks)
            receive, combine = (regions.add((received, shape.width), shape.dtype) for _ in range(2))
            rows_of, source_row, probs = _table_regions(regions, shape, self.ranks)
            d_probs = regions.add((grouped,), torch.float32)
            self._rows[shape] = RowMemory(
                memory=self._allocate(regions),
                flags=flags,
                receive=receive,
                combine=combine,
                rows_of=rows_of,
                source_row=source_row,
                probs=probs,
                d_probs=d_probs,
                max_tokens=shape.max_tokens,
                rank=self.rank,
                ranks=self.ranks,
                timeout_ns=self.timeout_ns,
            )
            self._warm_rows(self._rows[shape], shape)
        return self._rows[shape]

    def slots(self, count: int, shape: SlotShape) -> SymmetricSlots:
        """The memory of B slots, weights and gradients."""
        regions, flags = self._regions()
        pushed = regions.add((2, count), torch.int32)
        weights = _projections(regions, count, (shape.fc1, shape.fc2), shape.dtype)
        grads = _projections(regions, count, (shape.fc1, shape.fc2), shape.grad_dtype)
        memory = self._allocate(regions)
        duplicates = Duplicates(
            memory=memory,
            flags=flags,
            pushed=pushed,
            weights=weights,
            gradients=grads,
            rank=self.rank,
            ranks=self.ranks,
            timeout_ns=self.timeout_ns,
        )
        self._warm_slots(duplicates)
        fc1, fc2, grad1, grad2 = (memory.local(region) for region in (*weights, *grads))
        return SymmetricSlots(
            count=count,
            fc1=fc1,
            fc2=fc2,
            grad1=grad1,
            grad2=grad2,
            pushed=duplicates,
            pulled=duplicates,
        )

    def kept_slots(self, shared: SymmetricSlots, held_RB: Tensor) -> SymmetricSlots:
        """As many slots with weights and tags of their own, and the gradients of ``shared``.

        Args:
            held_RB: see `moonep_megatron.kernels.duplicates.Kept`.
        """
        regions, flags = self._regions()
        pushed = regions.add((2, shared.count), torch.int32)
        shapes = (shared.fc1.shape[1:], shared.fc2.shape[1:])
        weights = _projections(regions, shared.count, shapes, shared.fc1.dtype)
        tag_table = regions.add((2, shared.count, tags.TAG_INTS), torch.int32)
        memory = self._allocate(regions)
        memory.local(tag_table).fill_(-1)
        missing = torch.zeros(tags.MISSING_INTS, dtype=torch.int32, device=self.device)
        # No rank may write tags before all have been cleared.
        torch.cuda.synchronize(self.device)
        dist.barrier(self._alive_group)
        duplicates = replace(
            shared.pulled,
            memory=memory,
            flags=flags,
            pushed=pushed,
            weights=weights,
            gradients=(),
            kept=Kept(tags=tag_table, held_RB=held_RB, missing=missing),
        )
        if not self._warm_kept:
            self._warm_pushes(duplicates)
            self._warm_kept = True
        fc1, fc2 = (memory.local(region) for region in weights)
        return replace(shared, fc1=fc1, fc2=fc2, pushed=duplicates)

    def _regions(self) -> tuple[Regions, Region]:
        regions = Regions()
        return regions, regions.add((sync.STAGES, self.ranks), torch.int32)

    @property
    def _alive_group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None
        return group

    def _allocate(self, regions: Regions, **known: Any) -> SymmetricMemory:
        """Memory of these regions, watched for faults; ``known`` makes their messages fuller."""
        # The first pass may be an evaluation, whose tensors could never be trained with.
        with torch.inference_mode(False):
            memory = SymmetricMemory(
                self._alive_group,
                regions.nbytes,
                self.device,
                control_ints=sync.CONTROL_INTS,
                fault_ints=len(sync.FAULT_FIELDS),
            )
        timeout = self.timeout_ns / 1e9
        describe = partial(faults.describe, stages=sync.STAGE_NAMES, timeout=timeout, **known)
        faults.watch(memory.fault, describe=describe, rank=dist.get_rank())
        return memory

    def _warm_rows(self, rows: RowMemory, shape: RowShape) -> None:
        """Launch every kernel of rows once, with no tokens."""
        none = torch.empty(0, shape.topk, dtype=torch.int32, device=self.device)
        nothing = torch.empty(0, shape.width, dtype=shape.dtype, device=self.device)
        no_probs = torch.empty(0, shape.topk, device=self.device)
        # One row, which is no token's.
        rows_of = torch.full((1, shape.topk), -1, dtype=torch.int32, device=self.device)
        source_row = torch.full((1,), -1, dtype=torch.int32, device=self.device)
        grouped_rows = torch.empty(1, shape.width, dtype=shape.dtype, device=self.device)
        cap = torch.zeros((), dtype=torch.int32, device=self.device)
        self._one_by_one(
            [
                lambda: dispatch(rows, nothing, none, none, no_probs, sms=1),
                lambda: free_receive(rows),
                lambda: dispatch(rows, nothing, none, none, sms=1),
                lambda: free_receive(rows),
                lambda: presum(rows, grouped_rows, rows_of, source_row, cap, sms=1),
                lambda: gather(rows, none, none, nothing, no_probs, sms=1),
                lambda: presum(rows, grouped_rows, rows_of, source_row, cap, sms=1),
                lambda: gather(rows, none, none, nothing, sms=1),
            ]
        )

    def _warm_slots(self, duplicates: Duplicates) -> None:
        """Launch every kernel of duplicates once, for a plan without any."""
        self._warm_pushes(duplicates)
        foreign, homes = self._no_copies()
        pulls = [
            launch
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for launch in (
                lambda: pull.grads_ready(duplicates),
                partial(pull.pull_gradients, duplicates, foreign, homes, dtype, 0, sms=1),
            )
        ]
        self._one_by_one([*pulls, lambda: pull.wait_pulled(duplicates)])

    def _warm_pushes(self, duplicates: Duplicates) -> None:
        foreign, homes = self._no_copies()
        self._one_by_one(
            [
                lambda: push.push_weights(duplicates, foreign, homes, 0, sms=1),
                lambda: push.wait_slots(duplicates, foreign, 0, 0, 0, 1),
                lambda: push.free_slots(duplicates),
            ]
        )

    def _no_copies(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A plan's foreign experts, none, and addresses of home weights or gradients."""
        # One expert a rank is enough: a table of -1 has no copies.
        foreign = torch.full((self.ranks, 1), -1, dtype=torch.int32, device=self.device)
        nowhere = torch.zeros(1, dtype=torch.int64, device=self.device)
        return foreign, (nowhere, nowhere)

    def _one_by_one(self, launches: list[Callable[[], Any]]) -> None:
        """Run launches with all ranks in step.

        A kernel's code is loaded at its first launch, which may have to wait for whatever runs on
        the device; so none may first be launched while another waits for a peer.
        """
        for launch in launches:
            launch()
            torch.cuda.synchronize(self.device)
            dist.barrier(self._alive_group)


# Weak in the group, so that a destroyed group does not keep its memory.
_groups: WeakKeyDictionary[dist.ProcessGroup, GroupMemory] = WeakKeyDictionary()


def group_memory(group: dist.ProcessGroup, device: torch.device, timeout: float) -> GroupMemory:
    """The memory of a group, the same for all its layers."""
    if group not in _groups:
        _groups[group] = GroupMemory(group, device, timeout)
    return _groups[group]
