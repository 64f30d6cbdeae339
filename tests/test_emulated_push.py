"""The push of duplicates, run from its sources without a GPU, with and without kept copies."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("greenlet", reason="the emulator's threads are greenlets")

import emulator

from moonep_megatron.backends.memory import Regions, part_of

HIDDEN, FFN = 24, 8
SHAPES = ((2 * FFN, HIDDEN), (HIDDEN, FFN))
LAYER = 3


@pytest.fixture(scope="module")
def k():
    kernels = emulator.load_kernels("push_weights")
    dup = kernels.duplicates
    dup.THREADS, dup.WARPS, dup.SMALL_BLOCK, dup.UNROLL = 64, 2, 32, 1
    dup.TILE_CHUNKS = dup.THREADS
    return kernels


class Ranks:
    """Memory of all ranks in one process, and what the slots must hold."""

    def __init__(self, k, ranks, homes, slots, kept):
        self.k, self.ranks, self.homes, self.slots = k, ranks, homes, slots
        regions, sync = Regions(), k.sync
        flags = regions.add((sync.STAGES, ranks), torch.int32)
        pushed = regions.add((2, slots), torch.int32)
        self.weights = tuple(regions.add((slots, *s), torch.float32) for s in SHAPES)
        tags = regions.add((2, slots, k.tags.TAG_INTS), torch.int32)
        self.memory = [torch.zeros(regions.nbytes, dtype=torch.uint8) for _ in range(ranks)]
        self.of_rank = []
        for rank in range(ranks):
            self.part(rank, tags).fill_(-1)
            memory = SimpleNamespace(
                peers=torch.tensor([memory.data_ptr() for memory in self.memory]),
                control=torch.zeros(sync.CONTROL_INTS, dtype=torch.int32),
                fault=torch.zeros(len(sync.FAULT_FIELDS), dtype=torch.int32),
            )
            held = torch.full((ranks, slots), -1, dtype=torch.int32)
            missing = torch.zeros(k.tags.MISSING_INTS, dtype=torch.int32)
            keeping = k.duplicates.Kept(tags=tags, held_RB=held, missing=missing)
            self.of_rank.append(
                k.duplicates.Duplicates(
                    memory=memory,
                    flags=flags,
                    pushed=pushed,
                    weights=self.weights,
                    gradients=(),
                    kept=keeping if kept else None,
                    rank=rank,
                    ranks=ranks,
                    timeout_ns=60 * 10**9,
                )
            )
        self.home = [
            [[torch.zeros(shape) for _ in range(homes)] for shape in SHAPES] for _ in range(ranks)
        ]
        self.versions = [1] * ranks
        self.tags = {}  # by (holder, slot, projection)
        for rank in range(ranks):
            self.change(rank)

    def part(self, rank, region):
        return part_of(self.memory[rank], region.offset, region.shape, region.dtype)

    def change(self, rank):
        """Other weights, and another version."""
        self.versions[rank] += 1
        for tensors in self.home[rank]:
            for tensor in tensors:
                tensor.copy_(torch.rand(tensor.shape))

    def one_pass(self, foreign, backward=False):
        """All waves of a plan; checks every slot, and returns how many copies were moved."""
        moved = 0
        waves = -(-self.homes // self.slots)
        order = (1, 0) if backward else (0, 1)
        if waves == 1:
            return self.push(foreign, 0, order, backward)
        for projection in order:
            for wave in range(waves):
                moved += self.push(foreign, wave, (projection,), backward)
        return moved

    def push(self, foreign, wave, projections, backward):
        expected = self.lacking(foreign, wave, projections)
        seen = {}
        with emulator.together():
            for rank, duplicates in enumerate(self.of_rank):
                self.launch(rank, duplicates, foreign, wave, projections, backward, seen)
        for holder, slot, expert in self.copies(foreign, wave):
            home, local = divmod(expert, self.homes)
            for p in projections:
                assert torch.equal(seen[holder, p][slot], self.home[home][p][local]), (
                    f"rank {holder}, slot {slot}, FC{p + 1} of expert {expert}, wave {wave}"
                )
        for rank, duplicates in enumerate(self.of_rank):
            assert not duplicates.memory.control[self.k.sync.STAGES :].any(), "counters not zero"
            kept = duplicates.kept
            if kept is not None:
                counts = kept.missing[-2:].tolist()
                assert sum(counts) == sum(e // self.homes == rank for *_, e in expected)
                assert torch.equal(kept.held_RB, self.of_rank[0].kept.held_RB)
                for holder, slot, expert in self.copies(foreign, wave):
                    assert kept.held_RB[holder, slot] == expert
        return len(expected)

    def lacking(self, foreign, wave, projections):
        """(holder, slot, projection, expert) of the copies to move; notes what the slots get."""
        found = []
        for holder, slot, expert in self.copies(foreign, wave):
            for p in projections:
                tag = LAYER, expert, self.versions[expert // self.homes]
                if self.tags.get((holder, slot, p)) != tag:
                    found.append((holder, slot, p, expert))
                self.tags[holder, slot, p] = tag
        return found

    def launch(self, rank, duplicates, foreign, wave, projections, backward, seen):
        push, homes = self.k.push_weights, self.home[rank]
        addresses = tuple(torch.tensor([t.data_ptr() for t in tensors]) for tensors in homes)
        with emulator.stream(("side", rank)):
            push.push_weights(
                duplicates.only(projections),
                foreign,
                addresses,
                wave,
                backward=backward,
                version=self.versions[rank],
                sms=3,
                layer=LAYER,
            )
        with emulator.stream(("main", rank)):
            for p in projections:
                push.wait_slots(duplicates, foreign, wave, p, 0, self.slots)

                def read(p=p):
                    seen[rank, p] = self.part(rank, self.weights[p]).clone()
                    if duplicates.kept is None:
                        self.part(rank, self.weights[p]).fill_(float("nan"))

                emulator.host(read)
            push.free_slots(duplicates)

    def copies(self, foreign, wave):
        for holder, row in enumerate(foreign.tolist()):
            for slot, expert in enumerate(row[wave * self.slots : (wave + 1) * self.slots]):
                if expert >= 0:
                    yield holder, slot, expert


def random_table(draw, ranks, homes, most):
    """int32 [R, n]: foreign experts in any places of the first wave, or ascending in several."""
    table = torch.full((ranks, homes), -1, dtype=torch.int32)
    for d in range(ranks):
        foreign = [e for e in range(ranks * homes) if e // homes != d]
        chosen = draw.sample(foreign, draw.randint(0, min(homes, len(foreign))))
        places = range(len(chosen))
        if len(chosen) <= most:
            places = draw.sample(range(most), len(chosen))
        table[d, list(places)] = torch.tensor(chosen, dtype=torch.int32)
    return table


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("ranks", "homes", "slots"), [(2, 2, 2), (3, 3, 2), (3, 4, 4), (4, 3, 1)])
def test_every_slot_holds_its_expert(k, ranks, homes, slots, kept):
    """Random tables, some twice, weights that change on one rank or on all; tags decide alone."""
    draw = random.Random(f"{ranks} {homes} {slots}")
    world = Ranks(k, ranks, homes, slots, kept)
    tables = [random_table(draw, ranks, homes, slots) for _ in range(3)]
    moved = []
    for step in range(8):
        foreign = draw.choice(tables)
        moved.append(world.one_pass(foreign, backward=step % 2 == 1))
        changed = draw.choice([[], [], [draw.randrange(ranks)], range(ranks)])
        for rank in changed:
            world.change(rank)
    if kept and slots == homes:
        assert 0 < sum(moved) < 8 * 2 * max(int((t >= 0).sum()) for t in tables)


def test_only_a_changed_version_is_seen(k):
    """Weights that change without being said are not pushed: the tag decides, nothing else."""
    world = Ranks(k, 2, 2, 2, kept=True)
    foreign = torch.tensor([[2, 3], [0, -1]], dtype=torch.int32)
    assert world.one_pass(foreign) == 6
    assert world.one_pass(foreign, backward=True) == 0
    # An expert that leaves its slot, and comes back into the other one.
    assert world.one_pass(torch.tensor([[3, 2], [0, -1]], dtype=torch.int32)) == 4
    world.home[1][0][0].add_(1)
    with pytest.raises(AssertionError, match="FC1 of expert 2"):
        world.one_pass(torch.tensor([[3, 2], [0, -1]], dtype=torch.int32))
    world.versions[1] += 1
    assert world.one_pass(torch.tensor([[3, 2], [-1, 0]], dtype=torch.int32)) == 6


def test_other_layers_tags_do_not_count(k):
    world = Ranks(k, 2, 1, 1, kept=True)
    foreign = torch.tensor([[1], [-1]], dtype=torch.int32)
    assert world.one_pass(foreign) == 2
    tags = world.part(0, world.of_rank[0].kept.tags)
    assert tags.tolist() == [[[LAYER, 1, 2, 0]], [[LAYER, 1, 2, 0]]]
    tags[1, 0, 0] = LAYER + 1
    del world.tags[0, 0, 1]
    assert world.one_pass(foreign) == 1
