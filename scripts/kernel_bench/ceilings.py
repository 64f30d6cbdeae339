"""The ceilings: a plain copy over each link by number of SMs, and the device's own copy."""

from __future__ import annotations

from functools import partial

import torch
from moonep_megatron.kernels import copy
from torch import Tensor

from kernel_bench.measure import Bench
from moonep_megatron.backends.memory import Regions

# About what a dispatch sends, and what a presum reads or more than the cache holds.
LINK_BYTES = 128 << 20
LOCAL_BYTES = 512 << 20
SMS = (4, 8, 12, 16, 32)


def presum_sms(all_sms: int) -> tuple[int, int]:
    """Numbers of SMs for the work that stays on a GPU."""
    return all_sms // 2, all_sms


def bench_copy(bench: Bench) -> None:
    """Push (local load, peer store), pull (peer load, local store), local, and ``copy_``."""
    regions = Regions()
    source, target = (regions.add((LOCAL_BYTES,), torch.uint8) for _ in range(2))
    memory = bench.memory(regions)
    memory.local(source).copy_(_bytes(bench, bench.rank, LOCAL_BYTES))
    bench.warm(copy.configs())
    me, ranks = bench.rank, bench.ranks
    following, previous = (me + 1) % ranks, (me - 1) % ranks
    links = {
        # link: source rank, target rank, whose bytes arrive here, bytes, moved for each byte, SMs
        "push": (me, following, previous, LINK_BYTES, 1, {*SMS, bench.all_sms}),
        "pull": (following, me, following, LINK_BYTES, 1, {*SMS, bench.all_sms}),
        "local": (me, me, me, LOCAL_BYTES, 2, {*presum_sms(bench.all_sms)}),
    }
    for link, (begin, end, whose, nbytes, moved, counts) in links.items():
        expected, seen = _bytes(bench, whose, nbytes), memory.local(target)[:nbytes]
        for sms in sorted(counts if moved > 1 else counts | {*bench.options.sms}):
            for unroll in copy.UNROLLS:
                step = partial(
                    copy.copy,
                    memory.peers,
                    (begin, source.offset),
                    (end, target.offset),
                    nbytes,
                    unroll,
                    sms=sms,
                )
                bench.measure(
                    {"form": f"{unroll} loads a thread", "link": link, "sms": sms},
                    nbytes * moved,
                    step,
                    check=partial(_check, bench, step, seen, expected),
                )
    here = _bytes(bench, me, LOCAL_BYTES)
    there = torch.empty_like(here)
    step = partial(there.copy_, here)
    bench.measure(
        {"form": "torch copy_", "link": "device", "sms": bench.all_sms},
        2 * LOCAL_BYTES,
        step,
        check=partial(_check, bench, step, there, here),
    )


def _bytes(bench: Bench, rank: int, nbytes: int) -> Tensor:
    """A rank's random bytes; fewer are the first of more."""
    generator = torch.Generator(bench.device).manual_seed(rank)
    every = torch.randint(
        -(2**62), 2**62, (LOCAL_BYTES // 8,), generator=generator, device=bench.device
    )
    return every.view(torch.uint8)[:nbytes]


def _check(bench: Bench, step: partial, seen: Tensor, expected: Tensor) -> str:
    seen.fill_(0xA5)
    bench.align()
    step()
    bench.align()
    differ = int((seen != expected).sum())
    return f"{differ} bytes differ" if differ else ""
