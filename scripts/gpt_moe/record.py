"""Records what the routers of a run chose, for scripts/simulate.py.

Letters: L MoE layers, E experts, R expert-parallel ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpt_moe.model import moe_layers
from gpt_moe.rows import is_recompute


class Recorder:
    """Writes a JSON file for every microbatch of every ``interval``-th step.

    ``step_<step>_microbatch_<number>.json`` holds ``rank_count`` [L][R][E], the rows that each rank
    of the first expert-parallel group routed to each expert, and ``logical_count`` [L][E], their
    sum over the ranks, which is what simulate.py plans. Every dispatcher has routers, so any can be
    recorded. All ranks must enter `step`.
    """

    def __init__(self, model: torch.nn.Module, folder: Path, interval: int) -> None:
        self._folder, self._interval = folder, interval
        layers = moe_layers(model)
        self._group = layers[0].ep_group
        self._counts: list[list[torch.Tensor]] = [[] for _ in layers]
        self._active = False
        for number, layer in enumerate(layers):
            layer.router.register_forward_hook(self._hook(number))

    def _hook(self, layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if self._active and not is_recompute():
                self._counts[layer].append(output[1].sum(0))

        return hook

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the forward passes inside, if it is this step's turn."""
        self._active = step % self._interval == 0
        yield
        if self._active:
            self._write(step)
        self._active = False

    def _write(self, step: int) -> None:
        counts_mLE = torch.stack([torch.stack(counts) for counts in self._counts], dim=1)
        for counts in self._counts:
            counts.clear()
        everyone = [torch.empty_like(counts_mLE) for _ in range(self._group.size())]
        dist.all_gather(everyone, counts_mLE, group=self._group)
        if dist.get_rank() != 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, counts_LRE in enumerate(torch.stack(everyone, dim=2).cpu()):
            content = {
                "step": step,
                "microbatch": number,
                "rank_count": counts_LRE.tolist(),
                "logical_count": counts_LRE.sum(1).tolist(),
            }
            path = self._folder / f"step_{step:06}_microbatch_{number:03}.json"
            path.write_text(json.dumps(content))
