"""The grouped products of one MoE layer on one rank, as calls that can be timed.

Letters: n home experts, s duplicates, N rows grouped by expert, M receive rows, H row width,
F expert FFN width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from layer_bench.options import Shape
from torch import Tensor

from moonep_megatron import quack_gemm

BF16 = torch.bfloat16
# A rank's foreign experts are computed in launches of so many slots, then the rest.
CHUNKS = (1, 3)
Call = Callable[[], None]


@dataclass
class Case:
    """One product of the layer: ``calls`` in order, all of them one product of every row.

    Attributes:
        name: projection and kind, as a table shows it.
        flops: multiplications and additions of every call together.
    """

    name: str
    calls: list[Call]
    flops: float

    def __call__(self) -> None:
        for call in self.calls:
            call()


class Operands:
    """Rows, weights and gradients of a layer on one rank, for any grouping of its rows."""

    def __init__(self, shape: Shape, ranks: int, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.home = shape.experts // ranks
        n, h, f = shape.rows, shape.width, shape.ffn
        receive = min(shape.topk, ranks) * shape.tokens

        def random(*size: int) -> Tensor:
            return torch.randn(size, dtype=BF16, device=device) / 8

        self.receive, self.d_sums = random(receive, h), random(receive, h)
        self.rows, self.d_out = random(n, h), random(n, h)
        self.pre, self.act, self.d_act = random(n, 2 * f), random(n, f), random(n, f)
        self.index = torch.randint(receive, (n,), dtype=torch.int32, device=device).sort()[0]
        self.index = self.index[torch.randperm(n, device=device)].contiguous()

    def weights(self, count: int) -> tuple[Tensor, Tensor]:
        """FC1 [count, 2F, H] and FC2 [count, H, F]."""
        h, f = self.shape.width, self.shape.ffn
        sizes = ((count, 2 * f, h), (count, h, f))
        one, two = (torch.randn(size, dtype=BF16, device=self.device) / 32 for size in sizes)
        return one, two

    def gradients(self, count: int) -> tuple[Tensor, Tensor]:
        """The same in fp32, zero."""
        h, f = self.shape.width, self.shape.ffn
        one, two = (
            torch.zeros(size, device=self.device) for size in ((count, 2 * f, h), (count, h, f))
        )
        return one, two


@dataclass
class Group:
    """Experts of one launch: weights, gradients, bounds; gradients of slots are overwritten."""

    weights: tuple[Tensor, Tensor]
    grads: tuple[Tensor, Tensor]
    bounds: Tensor
    slots: bool = False


def bounds_of(counts: Sequence[int], device: torch.device, first: int = 0) -> Tensor:
    """int32 [groups + 1], absolute rows."""
    rows = [first + end for end in accumulate(counts, initial=0)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def odd_counts(rows: int, groups: int, seed: int) -> list[int]:
    """Group sizes around the mean, within a tenth, that no tile divides."""
    random = torch.Generator().manual_seed(seed)
    mean = rows // groups
    around = torch.randint(-(mean // 10), mean // 10 + 1, (groups,), generator=random)
    counts = (mean + around - around.float().mean().long()).tolist()
    counts[-1] += rows - sum(counts)
    return counts


def products(operands: Operands, groups: Sequence[Group], *, indexed: bool = True) -> list[Case]:
    """The six products of forward and backward over ``groups``, one launch each."""
    o, shape = operands, operands.shape
    index = o.index if indexed else None
    rows, d_sums = (o.receive, o.d_sums) if indexed else (o.rows, o.d_out)
    flops = 2.0 * shape.rows * shape.width * shape.ffn

    def multiply(operand: Tensor, projection: int, out: Tensor, by: Tensor | None, back: bool):
        def call(group: Group) -> None:
            weights = group.weights[projection]
            weights = weights.mT if back else weights
            quack_gemm.rows_times_weights(operand, weights, out, group.bounds, by)

        return call

    def weigh(d_out: Tensor, operand: Tensor, projection: int, **which: Tensor | None):
        def call(group: Group) -> None:
            grads, slots = group.grads[projection], group.slots
            quack_gemm.add_weight_gradients(
                d_out, operand, grads, group.bounds, accumulate=not slots, **which
            )

        return call

    table = [
        ("FC1 forward", multiply(rows, 0, o.pre, index, False), 2 * flops),
        ("FC2 forward", multiply(o.act, 1, o.rows, None, False), flops),
        ("FC2 data", multiply(d_sums, 1, o.d_act, index, True), flops),
        ("FC1 data", multiply(o.pre, 0, o.d_out, None, True), 2 * flops),
        ("FC2 weight", weigh(d_sums, o.act, 1, out_index=index), flops),
        ("FC1 weight", weigh(o.pre, rows, 0, row_index=index), 2 * flops),
    ]
    return [
        Case(name, [lambda call=call, group=group: call(group) for group in groups], amount)
        for name, call, amount in table
    ]


def single(operands: Operands, counts: Sequence[int]) -> list[Group]:
    """All groups in one launch over one tensor."""
    weights, grads = operands.weights(len(counts)), operands.gradients(len(counts))
    return [Group(weights, grads, bounds_of(counts, operands.device))]


def home_and_slots(operands: Operands, counts: Sequence[int]) -> list[Group]:
    """The first n groups as home experts, the others as slots in chunks, as the layer does."""
    device, home = operands.device, operands.home
    groups = single(operands, counts[:home])
    first, row = home, sum(counts[:home])
    slots = len(counts) - home
    chunks = [*CHUNKS, slots - sum(CHUNKS)] if slots > sum(CHUNKS) else [slots]
    weights, grads = operands.weights(slots), operands.gradients(slots)
    for size in chunks:
        part = slice(first - home, first - home + size)
        own = counts[first : first + size]
        bounds = bounds_of(own, device, row)
        one = (weights[0][part], weights[1][part])
        two = (grads[0][part], grads[1][part])
        groups.append(Group(one, two, bounds, slots=True))
        first, row = first + size, row + sum(own)
    return groups
