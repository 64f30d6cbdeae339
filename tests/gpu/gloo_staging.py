"""What gloo lacks for tensors of a GPU: sends, receives and coalesced collectives, by the host.

Several ranks on one GPU cannot use NCCL. With these, Megatron's DDP and distributed optimizer and
the collective backend run over gloo there. Nothing overlaps: each call ends when its data is there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from torch.distributed import distributed_c10d

_isend_irecv = dist.batch_isend_irecv


def enable() -> None:
    dist.batch_isend_irecv = _send_and_receive
    param_and_grad_buffer._coalescing_manager = _one_by_one


def _send_and_receive(transfers: list[dist.P2POp]) -> list[dist.Work]:
    copies = [transfer.tensor.cpu() for transfer in transfers]
    works = _isend_irecv(
        [
            dist.P2POp(t.op, copy, group=t.group, tag=t.tag, group_peer=t.group_peer)
            for t, copy in zip(transfers, copies, strict=True)
        ]
    )
    for work in works:
        work.wait()
    for transfer, copy in zip(transfers, copies, strict=True):
        if transfer.op is dist.irecv:
            transfer.tensor.copy_(copy)
    return []


@contextmanager
def _one_by_one(
    group: dist.ProcessGroup, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Any]:
    """In the place of torch's manager, on whose list the collectives called within wait."""
    state = distributed_c10d._world.pg_coalesce_state
    state[group] = []
    yield distributed_c10d._CoalescingManager()
    for call in state.pop(group):
        source = call.tensor.cpu()
        if call.op is dist.all_reduce:
            dist.all_reduce(source, op=call.redop, group=group)
            call.tensor.copy_(source)
            continue
        target = torch.empty_like(call.dst_tensor, device="cpu")
        options = {} if call.redop is None else {"op": call.redop}
        call.op(target, source, group=group, **options)
        call.dst_tensor.copy_(target)
