"""Tables of foreign experts, and the symmetric memory, for the tests of push and pull."""

from dataclasses import dataclass

import harness
import torch
import torch.distributed as dist
from moonep_megatron.kernels import sync
from moonep_megatron.kernels.duplicates import Duplicates

from moonep_megatron.backends.memory import Regions, SymmetricMemory


@dataclass(frozen=True)
class Shape:
    """n home experts, B slots, H row width, F expert width; FC1 is [2F, H], FC2 [H, F]."""

    homes: int
    slots: int
    hidden: int
    ffn: int

    @property
    def weights(self):
        return (2 * self.ffn, self.hidden), (self.hidden, self.ffn)

    @property
    def waves(self):
        return -(-self.homes // self.slots)


# A tile is 64 KiB: less than one and fewer than blocks, full ones and a rest, and full ones only.
SHAPES = (
    Shape(homes=4, slots=4, hidden=8, ffn=8),
    Shape(homes=4, slots=1, hidden=264, ffn=72),
    Shape(homes=5, slots=2, hidden=512, ffn=192),
)


def tables(ranks, homes):
    """Int32 [R, n] by name. The first is empty: it warms everything up without any wait."""
    generator = torch.Generator().manual_seed(17 * ranks + homes)
    wanted = {"none": [[] for _ in range(ranks)]}
    if ranks > 1:
        wanted["one expert to all ranks"] = [[] if d == 0 else [1 % homes] for d in range(ranks)]
        others = list(range((ranks - 1) * homes))
        wanted["many experts to one rank"] = [[] for _ in range(ranks - 1)] + [others[:homes]]
        for name, least in (("random", 0), ("random, all full", homes)):
            wanted[name] = []
            for d in range(ranks):
                foreign = [e for e in range(ranks * homes) if e // homes != d]
                count = int(torch.randint(least, homes + 1, (), generator=generator))
                order = torch.randperm(len(foreign), generator=generator)[:count]
                wanted[name].append([foreign[i] for i in order.tolist()])
    result = {}
    for name, rows in wanted.items():
        table = torch.full((ranks, homes), -1, dtype=torch.int32)
        for d, experts in enumerate(rows):
            table[d, : len(experts)] = torch.tensor(sorted(experts), dtype=torch.int32)
        result[name] = table
    return result


def held(table, shape, rank, wave):
    """(slot, expert) of a rank in a wave."""
    row = table[rank].tolist()
    places = range(wave * shape.slots, min((wave + 1) * shape.slots, shape.homes))
    return [(place % shape.slots, row[place]) for place in places if row[place] >= 0]


def make(group, device, shape, dtype):
    """The symmetric memory of a shape, slots and slot gradients poisoned with NaN."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    regions = Regions()
    flags = regions.add((sync.STAGES, ranks), torch.int32)
    pushed = regions.add((2, shape.slots), torch.int32)
    weights = tuple(regions.add((shape.slots, *s), dtype) for s in shape.weights)
    gradients = tuple(regions.add((shape.slots, *s), torch.float32) for s in shape.weights)
    memory = SymmetricMemory(
        group,
        regions.nbytes,
        device,
        control_ints=sync.CONTROL_INTS,
        fault_ints=len(sync.FAULT_FIELDS),
    )
    for region in (*weights, *gradients):
        memory.local(region).fill_(float("nan"))
    torch.cuda.synchronize()
    dist.barrier(group)
    return Duplicates(
        memory=memory,
        flags=flags,
        pushed=pushed,
        weights=weights,
        gradients=gradients,
        rank=rank,
        ranks=ranks,
        timeout_ns=harness.TIMEOUT_NS,
    )


def interleaved(shape, dtype, device):
    """n tensors of either projection in one buffer, last expert first, with gaps between.

    Returns:
        the buffer, the tensors by projection and local expert, and their addresses on the device.
    """
    gap = 24
    sizes = [rows * columns + gap for rows, columns in shape.weights]
    buffer = torch.zeros(shape.homes, sum(sizes), dtype=dtype, device=device)
    tensors = []
    for begin, size, weight in zip((0, sizes[0]), sizes, shape.weights, strict=True):
        part = buffer[:, begin : begin + size - gap]
        tensors.append([part[i].view(weight) for i in reversed(range(shape.homes))])
    addresses = tuple(
        torch.tensor([t.data_ptr() for t in ts], dtype=torch.int64, device=device) for ts in tensors
    )
    return buffer, tensors, addresses


def random(seed, shape, device):
    """Fp32 values of mixed magnitude, so that the order of a sum shows; the same on all ranks."""
    generator = torch.Generator(device=device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device)
    exponents = torch.randint(-6, 7, shape, generator=generator, device=device)
    return torch.ldexp(values, exponents)


def bits(tensor):
    """To compare NaN with NaN, and -0 with 0 as different."""
    return tensor.contiguous().view(torch.uint8)
