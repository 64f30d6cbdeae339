"""R processes a shape that measure one variant after the other, and one that listens to them.

A shape has processes of its own, so that no memory of the last is left; a variant that fails ends
its processes, and those behind it run in new ones.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from bench_ranks import Listener, Say

from layer_bench.options import Options, Shape, Variant, variants

# Seconds without a word until all are ended: kernels may have to be compiled.
SILENCE = 240


def run(options: Options, on_word: Say) -> dict[str, str]:
    """Measure every shape; what became of those variants that failed, by name.

    ``on_word`` gets ("start", text), ("note", text), ("row", dict), ("profile", dict) and
    ("trace", dict) as soon as they are known.
    """
    # Neither is needed, and some machines refuse multicast memory.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    failures: dict[str, str] = {}
    for shape in options.shapes:
        todo = variants(options.dispatchers, options.experts)
        while todo:
            listener = Listener(options.ranks, _rank, (options, shape, todo), on_word, SILENCE)
            listener.listen()
            if not listener.errors:
                break
            failures[f"{shape.name} {listener.current or 'start'}"] = "\n".join(listener.errors)
            if listener.current not in todo:  # at the start, or when all had been timed
                break
            todo = todo[todo.index(listener.current) + 1 :]
    return failures


def _rank(
    rank: int,
    port: int,
    options: Options,
    shape: Shape,
    todo: Sequence[Variant],
    pipe: Connection,
) -> None:
    try:
        device = _join(rank, port, options)
        # Megatron may be imported now.
        from layer_bench.bench import bench_shape
        from layer_bench.measure import Bench

        bench = Bench(options, device, pipe)
        bench_shape(bench, shape, todo)
        dist.barrier()
        pipe.send(("end", None))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        # Not an orderly exit: the other ranks may wait for this one in a collective.
        os._exit(1)
    if device.type == "cpu":
        dist.destroy_process_group()
    else:
        # Layers still hold symmetric memory and NCCL's buffers; the driver takes it all.
        torch.cuda.synchronize()
        os._exit(0)


def _join(rank: int, port: int, options: Options) -> torch.device:
    """Become a rank: device, stand-ins on the CPU, process groups."""
    if options.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.set_num_threads(4)
    else:
        from moonep_megatron import cpu

        device = torch.device("cpu")
        torch.set_num_threads(1)
        torch._dynamo.config.disable = True  # compiling takes longer than all the rest
        cpu.enable()
    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=SILENCE),
        device_id=device if options.device == "cuda" else None,
    )
    _quiet()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=options.ranks, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1234)
    return device


def _quiet() -> None:
    """Without what Megatron says in every process about what it runs without."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron|torch\.distributed")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
