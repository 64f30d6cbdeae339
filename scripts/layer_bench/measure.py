"""One rank's measurements of a layer: times, memory, and whether it computed what others did."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layer_bench.model import Layer
from layer_bench.options import Options

# Relative L2 distance of two dispatchers in bf16 is 3e-3 at K = 8; a lost duplicate is far above.
TOLERANCE = 2e-2
# Rows, and values of each gradient, that are compared.
EVERY_ROW, VALUES = 8, 4096
MB = 1e6


@dataclass
class Results:
    """What a pass computed, in samples, to be compared over variants."""

    tensors: dict[str, Tensor]

    def wrong(self, other: Results) -> list[str]:
        """Which tensors differ from another variant's, in words."""
        found = []
        for name, tensor in self.tensors.items():
            reference = other.tensors[name]
            distance = float((tensor - reference).norm() / reference.norm().clamp(min=1e-30))
            if not distance <= TOLERANCE:  # a NaN is wrong, too
                found.append(f"{name} differs by {distance:.1e} relative")
        return found


class Bench:
    """One rank's hands."""

    def __init__(self, options: Options, device: torch.device, pipe: Connection) -> None:
        self.options, self.device, self._pipe = options, device, pipe
        self.cuda = device.type == "cuda"
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._word = torch.zeros(1, device=device)
        self._connect()

    def say(self, kind: str, what: Any) -> None:
        """Rank 0 tells the process that started it."""
        if self.rank == 0:
            self._pipe.send((kind, what))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def worst(self, value: float) -> float:
        """The highest of all ranks."""
        return max(self.gather(value))

    def align(self) -> None:
        """The streams of all ranks begin what follows together."""
        dist.all_reduce(self._word)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def step(self, layer: Layer) -> None:
        """One forward and backward."""
        layer.backward(layer.forward())
        layer.clear()

    def times(self, layer: Layer) -> tuple[list[float], list[float]]:
        """Milliseconds of forward and of forward with backward, each of the slowest rank."""
        passes = [self._timed(layer) for _ in range(self.options.iterations)]
        self.synchronize()
        own = [(self._ms(a, b), self._ms(a, c)) for a, b, c in passes]
        slowest = torch.tensor(self.gather(own), dtype=torch.float64).amax(0)
        return slowest[:, 0].tolist(), slowest[:, 1].tolist()

    def first_pass(self, layer: Layer) -> float:
        """A pass of a routing not seen before; MB that it left behind, such as slots."""
        before = self._allocated()
        self.step(layer)
        return (self._allocated() - before) / MB

    def memory(self, layer: Layer) -> dict[str, float] | None:
        """MB that a pass takes at its peak and that it keeps for backward, of the worst rank."""
        if not self.cuda:
            return None
        before = self._allocated()
        torch.cuda.reset_peak_memory_stats()
        output = layer.forward()
        kept = self._allocated() - before - output.nbytes
        layer.backward(output)
        self.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del output
        layer.clear()
        return {"pass_mb": self.worst(peak / MB), "kept_mb": self.worst(kept / MB)}

    def outside(self) -> float:
        """MB of the GPU that torch's allocator does not hold: symmetric memory, NCCL, code."""
        if not self.cuda:
            return 0.0
        self.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / MB

    def results(self, layer: Layer) -> Results:
        """What one pass gives, gradients from zero."""
        layer.zero_gradients()
        output = layer.forward()
        layer.backward(output)
        hidden, router = layer.hidden, layer.moe.router
        tensors = {
            "output": _sample(output.detach()),
            "input gradient": _sample(hidden.grad),
            "probability gradient": _sample(router.probs.grad * router.map),
            "weight gradient": torch.cat([_values(g) for g in layer.gradients()]),
        }
        layer.clear()
        return Results(tensors)

    def _timed(self, layer: Layer) -> tuple[Any, Any, Any]:
        self.align()
        begin = self._now()
        output = layer.forward()
        middle = self._now()
        layer.backward(output)
        end = self._now()
        layer.clear()
        return begin, middle, end

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else 0

    def _connect(self) -> None:
        """Let the collectives of all dispatchers take their memory before any is measured."""
        word = torch.zeros(self.ranks, device=self.device)
        all_words = torch.zeros(self.ranks * self.ranks, device=self.device)
        dist.all_reduce(word)
        dist.all_gather_into_tensor(all_words, word)
        dist.all_to_all_single(torch.empty_like(word), word)
        if self.cuda:
            dist.reduce_scatter_tensor(word, all_words)
        self.gather(0)
        self.synchronize()


def _sample(tensor: Tensor) -> Tensor:
    return tensor.flatten(end_dim=-2)[::EVERY_ROW].float()


def _values(gradient: Tensor) -> Tensor:
    """Some values of a gradient, spread over it; an odd stride visits all columns."""
    flat = gradient.flatten()
    return flat[:: max(1, len(flat) // VALUES) | 1].clone()
