"""The push fills exactly the right slots, in every wave and epoch, beside other work."""

import duplicate_cases as cases
import harness
import pytest
import torch
import torch.distributed as dist
from moonep_megatron.kernels import sync
from moonep_megatron.kernels.push_weights import free_slots, push_weights, wait_slots

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_push_weights(ranks):
    harness.run(ranks, _push_shapes)


def _push_shapes(group, device):
    for number, (shape, dtype) in enumerate(zip(cases.SHAPES, DTYPES, strict=True)):
        Push(group, device, shape, dtype, sms=(3, 8, 5)[number]).run()
        dist.barrier(group)


class Push:
    """One shape, a step for each table and direction."""

    def __init__(self, group, device, shape, dtype, sms):
        self.shape, self.dtype, self.device, self.sms = shape, dtype, device, sms
        self.duplicates = cases.make(group, device, shape, dtype)
        self.rank, self.ranks = self.duplicates.rank, self.duplicates.ranks
        _, self.homes, self.addresses = cases.interleaved(shape, dtype, device)
        self.slots = [self.duplicates.memory.local(r) for r in self.duplicates.weights]
        # What the consumer found in its slots, by projection and wave.
        self.seen = [
            torch.empty(shape.waves, *s.shape, dtype=dtype, device=device) for s in self.slots
        ]
        self.side = torch.cuda.Stream(priority=-1)
        self.work = torch.randn(512, 512, device=device)
        self.product = torch.empty_like(self.work)

    def run(self):
        tables = cases.tables(self.ranks, self.shape.homes)
        step = 0
        for name, table in tables.items():
            foreign = table.to(self.device)
            for backward in (False, True):
                step += 1
                for p in range(2):
                    for i, home in enumerate(self.homes[p]):
                        home.copy_(self.weight(step, p, self.rank * self.shape.homes + i))
                # The first step runs alone: what is loaded at a first launch may wait for kernels.
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                self.one_pass(foreign, backward, ahead=step // 2 % 2)
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                self.check(f"{self.shape} {name}, backward={backward}", table, step)

    def weight(self, step, projection, expert):
        seed = (step * 2 + projection) * 1024 + expert
        return cases.random(seed, self.shape.weights[projection], self.device).to(self.dtype)

    def one_pass(self, foreign, backward, ahead):
        """All waves; pushes on the side stream, each queued ``ahead`` waves before its use."""
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        waves = self.shape.waves
        for step in range(waves + ahead):
            if step < waves:
                self.push(foreign, step, backward)
            if step >= ahead:
                torch.mm(self.work, self.work, out=self.product)
                self.use(foreign, step - ahead, backward)
        main.wait_stream(self.side)

    def push(self, foreign, wave, backward):
        with torch.cuda.stream(self.side):
            push_weights(
                self.duplicates, foreign, self.addresses, wave, backward=backward, sms=self.sms
            )

    def use(self, foreign, wave, backward):
        slots = self.shape.slots
        half = (slots + 1) // 2
        for p in (1, 0) if backward else (0, 1):
            for a, b in ((0, half), (half, slots)):
                wait_slots(self.duplicates, foreign, wave, p, a, b)
                self.seen[p][wave, a:b].copy_(self.slots[p][a:b])
        for slot in self.slots:
            slot.fill_(float("nan"))
        free_slots(self.duplicates)

    def check(self, what, table, step):
        for p in range(2):
            for wave in range(self.shape.waves):
                expected = torch.full_like(self.seen[p][wave], float("nan"))
                for slot, expert in cases.held(table, self.shape, self.rank, wave):
                    expected[slot] = self.weight(step, p, expert)
                same = cases.bits(expected) == cases.bits(self.seen[p][wave])
                bad = [s for s in range(self.shape.slots) if not same[s].all()]
                assert not bad, (
                    f"{what}: rank {self.rank}, wave {wave}, FC{p + 1}: wrong slots {bad} of "
                    f"{cases.held(table, self.shape, self.rank, wave)}, "
                    f"{int((~same).sum())} bytes differ, "
                    f"{int(self.seen[p][wave].isnan().sum())} values are NaN"
                )
        control = self.duplicates.memory.control
        assert not control[sync.STAGES :].any(), f"{what}: counters not zero"
