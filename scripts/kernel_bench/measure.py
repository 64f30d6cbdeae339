"""What every section uses: memory, compilation, checks and times, the same on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from moonep_megatron.kernels import compile as kernel_compile
from moonep_megatron.kernels import sync
from torch import Tensor

from kernel_bench.ranks import Options
from moonep_megatron.backends.memory import Regions, SymmetricMemory

TIMEOUT_NS = 20_000_000_000
# Passes before the timed ones.
WARM = 3
# The stream sleeps before each pass, so that it is queued as a whole before it starts. About 1 ms
# at first, doubled so often where that was not enough.
SLEEP_CYCLES, DOUBLINGS = 2_000_000, 4


def _nothing() -> None:
    pass


class Bench:
    """One rank's hands.

    Attributes:
        all_sms: SMs of the GPU.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, options: Options, pipe: Connection
    ) -> None:
        self.group, self.device, self.options = group, device, options
        self.rank, self.ranks = group.rank(), group.size()
        self.all_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._pipe = pipe
        self._section = ""
        self._memories: list[SymmetricMemory] = []
        self._sleep = SLEEP_CYCLES
        self._meeting = symm_mem.empty(256, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._meeting, group)
        # Its first launch loads it.
        self._handle.barrier()
        self.align()

    def start(self, section: str) -> None:
        """Rows from here on belong to a section."""
        self._section = section
        self._memories.clear()
        if self.rank == 0:
            self._pipe.send(("start", section))

    def memory(self, regions: Regions) -> SymmetricMemory:
        """Symmetric memory of these regions, zero."""
        memory = SymmetricMemory(
            self.group,
            regions.nbytes,
            self.device,
            control_ints=sync.CONTROL_INTS,
            fault_ints=len(sync.FAULT_FIELDS),
        )
        self._memories.append(memory)
        return memory

    def faults(self) -> str:
        """What waits that ran out left, in words."""
        records = [m.fault.tolist() for m in self._memories]
        found = [dict(zip(sync.FAULT_FIELDS, r, strict=True)) for r in records if r[0]]
        return "".join(f"fault record {f}, stages {sync.STAGE_NAMES}\n" for f in found)

    def warm(self, configs: Sequence[Any]) -> None:
        """Compile or load kernels; each rank begins elsewhere, so that they share the work."""
        turn = self.rank * len(configs) // self.ranks
        for config in (*configs[turn:], *configs[:turn]):
            kernel_compile.compiled(config)
        self.align()

    def align(self) -> None:
        """All ranks' kernels have ended."""
        torch.cuda.synchronize()
        dist.barrier(self.group)

    def noise(self, shape: Sequence[int], seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal numbers, the same for the same seed on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def measure(
        self,
        row: dict[str, Any],
        nbytes: int | None,
        step: Callable[[], object],
        *,
        check: Callable[[], str],
        before: Callable[[], object] = _nothing,
        after: Callable[[], object] = _nothing,
        launches: int = 1,
    ) -> None:
        """Check and time one configuration; collective.

        Args:
            row: what it is.
            nbytes: that must cross the busiest link, or move in memory; none where time counts.
            step: the launch to time.
            check: poison, run a pass (before, step, after) and say what is wrong, or nothing.
            before, after: launches that each pass needs and that are not timed.
            launches: steps of one pass; their mean counts.
        """
        wrong = check()
        everywhere = [f"rank {r}: {w}" for r, w in enumerate(self._gather(wrong)) if w]
        times, queued = self._times(before, step, after, launches)
        low, middle, high = statistics.quantiles(times, n=4)
        if self.rank == 0:
            result = {
                "section": self._section,
                "seconds": middle,
                "seconds_quartiles": [low, high],
                "samples": len(times),
                "bytes": nbytes,
                "gbps": None if nbytes is None else nbytes / middle / 1e9,
                "wrong": everywhere,
                "queued_ahead": queued,
            }
            self._pipe.send(("row", row | result))

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _times(
        self,
        before: Callable[[], object],
        step: Callable[[], object],
        after: Callable[[], object],
        launches: int,
    ) -> tuple[list[float], bool]:
        """Seconds of a step in every pass, of the slowest rank; whether no launch came late."""
        for _ in range(DOUBLINGS):
            events, late = [], False
            for number in range(WARM + self.options.samples):
                gate, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                torch.cuda._sleep(self._sleep)
                gate.record()
                before()
                self._handle.barrier()
                begin.record()
                for _ in range(launches):
                    step()
                end.record()
                # The sleep is over already: a launch may have come late.
                late |= number >= WARM and gate.query()
                after()
                events.append((begin, end))
            torch.cuda.synchronize()
            own = [begin.elapsed_time(end) for begin, end in events[WARM:]]
            everyone = self._gather((own, late))
            late = any(gap for _, gap in everyone)
            if not late:
                break
            self._sleep *= 2
        slowest = [max(times) for times in zip(*(t for t, _ in everyone), strict=True)]
        return [t / launches / 1e3 for t in slowest], not late
