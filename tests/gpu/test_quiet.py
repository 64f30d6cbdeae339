"""After warm-up a layer's passes neither make the host wait nor ask the driver for memory."""

import re
from types import SimpleNamespace

import pytest
import torch
from cases import Case
from layer_ranks import StaticPass, layer_case, ranks
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.timeout(900)  # a first run compiles every kernel

SKEWS = ("uniform", "hot_expert", "hot_rank", "last_rank", "two_thirds_idle", "zipf", "balanced")
PASSES = 20
MARK = "passes under test"
# Host waits, copies that wait, and calls for memory, of the CUDA runtime and of the driver.
LOUD = re.compile(
    r"(cuda|cu)(Stream|Event|Device|Ctx)Synchronize"
    r"|cudaMemcpy$|cudaMemcpy2D$|cuMemcpy(DtoH|HtoD|DtoD)(_v2)?$"
    r"|cuda(Malloc|Free)|cudaHost(Alloc|Register)|cuMem(Alloc|Create|Map|HostAlloc)"
    r"|Memcpy DtoH|Memcpy HtoD|Memcpy.*Pageable"
)
LAUNCH = re.compile(r"(cuda|cu)Launch")


def quiet_case(size: int) -> Case:
    return layer_case(
        "quiet",
        size,
        experts=4 * size,
        form="grouped",
        routing=SKEWS,
        tokens=((256,) * size,) * len(SKEWS),
        moonep=(("max_tokens", 256), ("slots", 2)),
    )


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["returned", "fused"])
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


@FUSED
@SIZES
def test_nothing_waits(size: int, fused: bool) -> None:
    """torch's own check raises in a pass; the profiler sees what that check does not know of."""
    for rank, seen in enumerate(ranks(size).call(_profiled, quiet_case(size), fused)):
        launches = [name for name in seen if LAUNCH.match(name)]
        assert launches, f"rank {rank}: the profiler saw no launch, so it would see no wait either"
        loud = sorted({name for name in seen if LOUD.match(name)})
        assert not loud, f"rank {rank}: {loud}"


def _profiled(case: Case, fused: bool) -> list[str]:
    """Names of all events, of host and device, in one pass of every skew."""
    static = _warm(case, fused)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for m in range(len(case.routing)):
            static.load(m)
            static.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(MARK):
            for m in range(len(case.routing)):
                static.load(m)
                static.run()
        torch.cuda.synchronize()
    events = profiler.events()
    mark = next(event for event in events if event.name == MARK).time_range
    # The device's events may end after the host's mark: their names tell copies to the host.
    return [
        event.name
        for event in events
        if event.name.startswith("Mem") or mark.start <= event.time_range.start <= mark.end
    ]


@FUSED
@SIZES
def test_memory_does_not_change_with_skew(size: int, fused: bool) -> None:
    """Warmed up with even routing alone, 20 passes of every skew find all memory in place."""
    for rank, memory in enumerate(ranks(size).call(_memory, quiet_case(size), fused)):
        where = f"rank {rank}: {memory}"
        assert memory.allocations[0] == memory.allocations[1], where
        assert memory.reserved[0] == memory.reserved[1], where
        assert memory.kept[0] == memory.kept[1], where
        assert max(memory.peaks) <= 1.01 * min(memory.peaks), where


def _memory(case: Case, fused: bool) -> SimpleNamespace:
    static = _warm(case, fused)
    before, peaks = _state(), []
    for i in range(PASSES):
        static.load(i % len(SKEWS))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        static.run()
        peaks.append(torch.cuda.max_memory_allocated())
    after = _state()
    return SimpleNamespace(peaks=peaks, **{k: (before[k], after[k]) for k in before})


def _state() -> dict[str, int]:
    """Calls to the driver for memory, bytes taken from it, and bytes that tensors hold."""
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    return {
        "allocations": statistics["num_device_alloc"],
        "reserved": torch.cuda.memory_reserved(),
        "kept": torch.cuda.memory_allocated(),
    }


def _warm(case: Case, fused: bool) -> StaticPass:
    """Three passes, all with the routing of the first microbatch."""
    static = StaticPass(case, fused=fused)
    static.load(0)
    for _ in range(3):
        static.run()
    torch.cuda.synchronize()
    return static
