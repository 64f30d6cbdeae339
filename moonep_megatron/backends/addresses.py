"""Tables on the device of where tensors begin, for kernels that take addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Addresses:
    """Tables by name, kept while the tensors that they name stay where they are.

    A captured graph goes on reading the table it was captured with, so only tensors that moved may
    replace a kept one; and what a capture makes is filled only by its replays, so it is not kept.

    Args:
        count: n, tensors of a table.
        device: this rank's GPU.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        # A push reads the addresses of both projections, whichever it moves.
        self._nowhere = torch.zeros(count, dtype=torch.int64, device=device)
        self._kept: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._captured: list[Tensor | None] = []

    def table(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """int64 [n] on the device, where these tensors begin; zeros for none of them.

        For the current stream, which makes it and reads it, without waiting.
        """
        if not tensors:
            return self._nowhere
        pointers = tuple(tensor.data_ptr() for tensor in tensors)
        kept = self._kept.get(name)
        if kept is not None and kept[0] == pointers:
            return kept[1]
        table, on_host = _device_table(pointers, self.device)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(on_host)  # which each replay reads
        else:
            self._kept[name] = (pointers, table)
        return table


def _device_table(pointers: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """int64 [n] on the device, without waiting for it; and its source on the host, if it has one.

    Evenly spaced addresses need none.
    """
    first, count = pointers[0], len(pointers)
    step = pointers[1] - first if count > 1 else 1
    if all(p == first + i * step for i, p in enumerate(pointers)) and step:
        table = torch.arange(first, first + count * step, step, dtype=torch.int64, device=device)
        return table, None
    on_host = torch.tensor(pointers, dtype=torch.int64).pin_memory()
    return on_host.to(device, non_blocking=True), on_host
