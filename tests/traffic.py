"""What a rank sends to others while something runs, by watching torch.distributed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def collectives(run: Callable[[], object]) -> list[str]:
    """Names of the collectives, sends and receives that start while ``run()`` runs."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    names = [event.name for event in profiler.events()]
    return [name for name in names if name.startswith(("c10d::", "nccl:", "gloo:"))]


@contextmanager
def all_to_all_bytes() -> Iterator[list[int]]:
    """One number for each `all_to_all_single` within: the bytes that this rank put in."""
    plain, sent = dist.all_to_all_single, []

    def counted(target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(source.nbytes)
        return plain(target, source, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        yield sent
    finally:
        dist.all_to_all_single = plain
