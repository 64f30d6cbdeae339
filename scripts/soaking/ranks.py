"""One rank of a soak: joins, steps, compares plans with the others, looks at its memory."""

from __future__ import annotations

import gc
import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from soaking.settings import Settings

# Seconds without a word from any rank until all are ended: kernels may have to be compiled.
SILENCE = 240.0
PAGE = os.sysconf("SC_PAGE_SIZE")


def run_rank(rank: int, port: int, settings: Settings, pipe: Connection) -> None:
    """Say ("block", dict) after every block, and ("result", dict) at the end."""
    try:
        device = _join(rank, port, settings)
        pipe.send(("result", _soak(settings, rank, device, pipe)))
        dist.barrier()
        pipe.send(("end", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    # Not an orderly exit: after a failure the others may wait for this rank in a collective, and
    # layers still hold memory that they have mapped.
    os._exit(0)


def _join(rank: int, port: int, settings: Settings) -> torch.device:
    import logging
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron|torch\.distributed")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # compiling takes longer than all the rest
    if settings.on_gpu:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        from moonep_megatron import cpu

        device = torch.device("cpu")
        cpu.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=SILENCE),
    )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=settings.ranks,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)
    return device


def _soak(settings: Settings, rank: int, device: torch.device, pipe: Connection) -> dict[str, Any]:
    from soaking.passes import Soak

    soak, memory = Soak(settings, rank, device), []
    began = time.monotonic()
    done = steps = plans = 0
    seconds, go_on = 0.0, True
    while go_on:
        for _ in range(settings.block):
            done += soak.step(steps)
            steps += 1
        plans += len(soak.plans)
        seconds = _agree(soak, rank, began)
        memory.append({"steps": steps, **_memory(device)})
        block = {"passes": done, "seconds": seconds, "memory": memory[-1]}
        pipe.send(("block", {"rank": rank, "problems": len(soak.problems), **block}))
        in_time = settings.seconds is None or seconds < settings.seconds
        go_on = done < settings.passes and in_time
    return {
        "rank": rank,
        "passes": done,
        "steps": steps,
        "seconds": seconds,
        "plans": plans,
        "compared": soak.compared,
        "worst": soak.worst,
        "problems": soak.problems,
        "memory": memory,
    }


def _agree(soak: Any, rank: int, began: float) -> float:
    """All ranks made the same plans; the seconds of the slowest, by which all decide alike."""
    from moonep_megatron.plan import plan_hash

    mine = [plan_hash(plan) for plan in soak.plans], time.monotonic() - began
    soak.plans.clear()
    everyone: list[Any] = [None] * soak.settings.ranks
    dist.all_gather_object(everyone, mine)
    for other, (hashes, _) in enumerate(everyone):
        differ = sum(a != b for a, b in zip(hashes, mine[0], strict=True))
        if differ:
            soak.problems.append(f"ranks {rank} and {other}: {differ} plans of a block differ")
    return max(seconds for _, seconds in everyone)


def _memory(device: torch.device) -> dict[str, int]:
    """Bytes: resident, and of the GPU what tensors hold and what torch has taken."""
    gc.collect()
    found = {"rss": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE}
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["cuda_allocated"] = torch.cuda.memory_allocated()
        found["cuda_reserved"] = torch.cuda.memory_reserved()
    return found
