"""Push of weights and pull of gradients, each rank to and from the next one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from moonep_megatron.kernels import duplicates as dup
from moonep_megatron.kernels import pull_gradients as pull
from moonep_megatron.kernels import push_weights as push
from moonep_megatron.kernels import sync
from torch import Tensor

from kernel_bench.measure import TIMEOUT_NS, Bench
from moonep_megatron.backends.memory import Regions

# Home experts of a rank, its slots, and how many of them the next rank holds.
HOMES = 4
COUNTS = (1, HOMES)
WEIGHTS = torch.bfloat16
# Kinds of noise: seeds of the first rank's FC1.
_WEIGHT, _GRADIENT, _TARGET = 5000, 6000, 7000


class Experts:
    """Slots or slot gradients in symmetric memory, and this rank's ordinary tensors.

    Attributes:
        row: what a result says about them.
        slots: [HOMES, ...] of either projection.
        homes: [HOMES, ...] of either projection, weights or targets.
        addresses: int64 [HOMES] of either.
        expert_bytes: of both projections of one expert in the slots.
    """

    def __init__(self, bench: Bench, dtype: torch.dtype, home_seed: int) -> None:
        self.bench, self.dtype = bench, dtype
        hidden, ffn = bench.options.expert
        self.row = {"shape": f"H={hidden} F={ffn} {str(dtype).removeprefix('torch.')}"}
        self.shapes = (2 * ffn, hidden), (hidden, ffn)
        self.expert_bytes = 3 * hidden * ffn * dtype.itemsize
        regions = Regions()
        flags = regions.add((sync.STAGES, bench.ranks), torch.int32)
        pushed = regions.add((2, HOMES), torch.int32)
        places = tuple(regions.add((HOMES, *shape), dtype) for shape in self.shapes)
        memory = bench.memory(regions)
        # Only one of the two kinds of slots is ever used here.
        self.duplicates = dup.Duplicates(
            memory=memory,
            flags=flags,
            pushed=pushed,
            weights=places,
            gradients=places,
            rank=bench.rank,
            ranks=bench.ranks,
            timeout_ns=TIMEOUT_NS,
        )
        self.slots = [memory.local(place) for place in places]
        self.homes = [self.noise(home_seed, bench.rank, p) for p in range(2)]
        self.addresses = tuple(
            torch.tensor([e.data_ptr() for e in home], dtype=torch.int64, device=bench.device)
            for home in self.homes
        )

    def noise(self, kind: int, rank: int, projection: int) -> Tensor:
        """[HOMES, ...] of a projection, by kind and rank."""
        shape = (HOMES, *self.shapes[projection])
        return self.bench.noise(shape, kind + 2 * rank + projection, self.dtype)

    def foreign(self, count: int) -> Tensor:
        """Int32 [R, HOMES], every rank holds the first experts of the rank before it."""
        ranks = self.bench.ranks
        table = torch.full((ranks, HOMES), -1, dtype=torch.int32)
        for d in range(ranks):
            table[d, :count] = (d - 1) % ranks * HOMES + torch.arange(count)
        return table.to(self.bench.device)


def _name(count: int) -> str:
    return f"{count} expert{'s' if count > 1 else ''}"


def bench_push(bench: Bench) -> None:
    """Weights of the experts, one and several of them."""
    experts = Experts(bench, WEIGHTS, _WEIGHT)
    bench.warm([push.PushConfig(), push.WaitConfig(), dup.SignalConfig(sync.SLOTS_FREE)])
    previous = (bench.rank - 1) % bench.ranks
    expected = [experts.noise(_WEIGHT, previous, p) for p in range(2)]
    free = partial(push.free_slots, experts.duplicates)
    for count in COUNTS:
        foreign = experts.foreign(count)
        for sms in bench.options.sms:
            step = partial(
                push.push_weights, experts.duplicates, foreign, experts.addresses, 0, sms=sms
            )
            bench.measure(
                experts.row | {"form": _name(count), "link": "push", "sms": sms},
                count * experts.expert_bytes,
                step,
                check=partial(_check_push, experts, foreign, expected, step, free),
                after=free,
            )


def _check_push(
    experts: Experts,
    foreign: Tensor,
    expected: list[Tensor],
    step: Callable[[], object],
    free: Callable[[], object],
) -> str:
    bench, wrong = experts.bench, []
    count = int((foreign[bench.rank] >= 0).sum())
    for slots in experts.slots:
        slots.fill_(float("nan"))
    bench.align()
    step()
    for p, slots in enumerate(experts.slots):
        push.wait_slots(experts.duplicates, foreign, 0, p, 0, HOMES)
        if not torch.equal(slots[:count], expected[p][:count]):
            wrong.append(f"slots of FC{p + 1}")
        if not slots[count:].isnan().all():
            wrong.append(f"empty slots of FC{p + 1} written")
    free()
    bench.align()
    return ", ".join(wrong)


def bench_pull(bench: Bench) -> None:
    """Fp32 gradients of the experts, added to fp32 targets, one and several of them."""
    experts = Experts(bench, torch.float32, _TARGET)
    bench.warm([pull.PullConfig(str(torch.float32)), dup.SignalConfig(sync.GRADS_READY)])
    following = (bench.rank + 1) % bench.ranks
    for p, slots in enumerate(experts.slots):
        slots.copy_(experts.noise(_GRADIENT, bench.rank, p))
    far = [experts.noise(_GRADIENT, following, p) for p in range(2)]
    ready = partial(pull.grads_ready, experts.duplicates)
    for count in COUNTS:
        foreign = experts.foreign(count)
        for sms in bench.options.sms:
            step = partial(
                pull.pull_gradients,
                experts.duplicates,
                foreign,
                experts.addresses,
                torch.float32,
                0,
                sms=sms,
            )
            bench.measure(
                experts.row | {"form": _name(count), "link": "pull", "sms": sms},
                count * experts.expert_bytes,
                step,
                check=partial(_check_pull, experts, far, count, (ready, step)),
                before=ready,
            )


def _check_pull(
    experts: Experts, far: list[Tensor], count: int, launches: tuple[Callable[[], object], ...]
) -> str:
    bench, wrong = experts.bench, []
    for p, home in enumerate(experts.homes):
        home.copy_(experts.noise(_TARGET, bench.rank, p))
    bench.align()
    for launch in launches:
        launch()
    for p, home in enumerate(experts.homes):
        expected = experts.noise(_TARGET, bench.rank, p)
        expected[:count] += far[p][:count]
        if not torch.equal(home, expected):
            wrong.append(f"targets of FC{p + 1}")
    bench.align()
    return ", ".join(wrong)
