"""R processes on the GPUs at hand: one a GPU, or all on one, over gloo and symmetric memory."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_NS = 20_000_000_000


def run(ranks: int, body: Callable[..., None], *args: Any) -> None:
    """Call ``body(group, device, *args)`` on every rank; the first failure is raised here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    mp.spawn(_rank, (ranks, port, body, args), nprocs=ranks)


def _rank(rank: int, ranks: int, port: int, body: Callable[..., None], args: Any) -> None:
    try:
        torch.set_num_threads(1)
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
        body(dist.group.WORLD, device, *args)
        torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        # Not an orderly exit: the other ranks may wait for this one in a collective.
        os._exit(1)
