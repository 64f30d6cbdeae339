"""The pull adds slot gradients to their home with the same bits every time, in every wave."""

import duplicate_cases as cases
import harness
import pytest
import torch
import torch.distributed as dist
from moonep_megatron.kernels import sync
from moonep_megatron.kernels.pull_gradients import grads_ready, pull_gradients, wait_pulled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_pull_gradients(ranks):
    harness.run(ranks, _pull_shapes)


def _pull_shapes(group, device):
    for number, shape in enumerate(cases.SHAPES):
        duplicates = cases.make(group, device, shape, torch.bfloat16)
        for dtype in DTYPES if number == 2 else DTYPES[number : number + 1]:
            Pull(duplicates, device, shape, dtype, sms=(3, 12, 5)[number]).run()
        dist.barrier(group)


class Pull:
    """One shape and dtype of targets, two equal steps for each table."""

    def __init__(self, duplicates, device, shape, dtype, sms):
        self.duplicates = duplicates
        self.shape, self.dtype, self.device, self.sms = shape, dtype, device, sms
        self.rank, self.ranks = duplicates.rank, duplicates.ranks
        self.buffer, self.targets, self.addresses = cases.interleaved(shape, dtype, device)
        self.grads = [duplicates.memory.local(r) for r in duplicates.gradients]
        self.ready = [torch.empty(shape.waves, *g.shape, device=device) for g in self.grads]
        self.side = torch.cuda.Stream(priority=-1)

    def run(self):
        tables = cases.tables(self.ranks, self.shape.homes)
        for number, (name, table) in enumerate(tables.items()):
            foreign = table.to(self.device)
            results = []
            for _ in range(2):
                self.prepare(table, number)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                self.one_pass(foreign)
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                results.append(self.buffer.clone())
            what = f"{self.shape} {self.dtype} {name}: rank {self.rank}"
            assert torch.equal(*map(cases.bits, results)), f"{what}: two runs differ"
            self.check(what, table, number)

    def gradient(self, number, projection, expert, holder):
        seed = ((number * 2 + projection) * 1024 + expert) * 128 + holder
        return cases.random(seed, self.shape.weights[projection], self.device)

    def before(self, number, projection):
        """Targets before the pull, by local expert."""
        size = (self.shape.homes, *self.shape.weights[projection])
        return cases.random(10**6 + number * 2 + projection, size, self.device).to(self.dtype)

    def prepare(self, table, number):
        """Slot gradients of all waves, NaN in empty slots, and fresh targets with ones between."""
        self.buffer.fill_(1)
        for p in range(2):
            self.ready[p].fill_(float("nan"))
            for wave in range(self.shape.waves):
                for slot, expert in cases.held(table, self.shape, self.rank, wave):
                    self.ready[p][wave, slot] = self.gradient(number, p, expert, self.rank)
            for target, value in zip(self.targets[p], self.before(number, p), strict=True):
                target.copy_(value)

    def one_pass(self, foreign):
        main = torch.cuda.current_stream()
        for wave in range(self.shape.waves):
            wait_pulled(self.duplicates)
            for p in range(2):
                self.grads[p].copy_(self.ready[p][wave])
            grads_ready(self.duplicates)
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                pull_gradients(
                    self.duplicates, foreign, self.addresses, self.dtype, wave, sms=self.sms
                )
        # Poison as soon as the last wave has been pulled: a late read would show.
        wait_pulled(self.duplicates)
        for grad in self.grads:
            grad.fill_(float("nan"))
        main.wait_stream(self.side)

    def check(self, what, table, number):
        seen = [torch.stack(ts) for ts in self.targets]
        for p in range(2):
            expected = self.before(number, p)
            for wave in range(self.shape.waves):
                self.add_wave(expected, table, number, p, wave)
            for i in range(self.shape.homes):
                same = cases.bits(expected[i]) == cases.bits(seen[p][i])
                holders = (table == self.rank * self.shape.homes + i).nonzero().tolist()
                off = (expected[i].float() - seen[p][i].float()).abs().max().item()
                assert same.all(), (
                    f"{what}, FC{p + 1}, local expert {i}: {int((~same).sum())} bytes differ, "
                    f"by at most {off}; its (rank, place) {holders}"
                )
        for ts in self.targets:
            for target in ts:
                target.fill_(1)
        control = self.duplicates.memory.control
        assert not control[sync.STAGES :].any(), f"{what}: counters not zero"
        assert (self.buffer == 1).all(), f"{what}: a store between the targets"

    def add_wave(self, expected, table, number, projection, wave):
        sums = {}
        for holder in range(self.ranks):
            for _, expert in cases.held(table, self.shape, holder, wave):
                local = expert - self.rank * self.shape.homes
                if 0 <= local < self.shape.homes:
                    gradient = self.gradient(number, projection, expert, holder)
                    sums[local] = sums[local] + gradient if local in sums else gradient
        for local, total in sums.items():
            expected[local] = (expected[local].float() + total).to(self.dtype)
