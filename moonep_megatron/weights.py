"""Finds the home weights inside Megatron's expert modules, as evenly strided runs.

The parameters stay Megatron's own objects. At construction the n weights of a projection are
pointed into one tensor, last expert first, because DDP lays ``main_grad`` out in reverse even where
it leaves the weights alone. A *run* is a longest stretch of experts whose weights and
``main_grad``s are both evenly strided in the same order; one grouped GEMM launch serves a run.

Letters: n home experts, H row width, F expert FFN width, F1 = 2F with a gated activation, else F.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

# Expert linears whose forward we know to be a plain product with `weight`. Anything else (LoRA,
# quantisers) may add to it, so bypassing it would silently change the model.
PLAIN_LINEARS = frozenset(
    {
        "ColumnParallelLinear",
        "RowParallelLinear",
        "TEColumnParallelLinear",
        "TERowParallelLinear",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    }
)
# The only hook that may sit on an expert module: DDP's parameter all-gather, which we replay.
DDP_PRE_HOOK = "DistributedDataParallel._make_forward_pre_hook"
# Transformer Engine hooks every module while it warms up a CUDA graph, only to see which of its own
# modules run; nothing is lost where it sees none.
WATCHING = "transformer_engine.pytorch.graph"


@dataclass(frozen=True, kw_only=True)
class Run:
    """``g`` home experts that are neighbours in memory.

    Attributes:
        first: position of the first one in the home order.
        fc1 [g, F1, H], fc2 [g, H, F]: strided views of the weights.
        grad1, grad2: views of the same shapes of ``main_grad``, or None without one.
    """

    first: int
    fc1: Tensor
    fc2: Tensor
    grad1: Tensor | None
    grad2: Tensor | None

    @property
    def count(self) -> int:
        """How many experts the run holds."""
        return self.fc1.shape[0]


class Projection:
    """The n weights of one projection, whichever way Megatron keeps them.

    Args:
        experts: Megatron's expert module.
        name: ``linear_fc1`` or ``linear_fc2``.
        count: n.
    """

    def __init__(self, experts: nn.Module, name: str, count: int) -> None:
        self.experts = experts
        self.name = name
        self.count = count

    @property
    def parameters(self) -> list[nn.Parameter]:
        """N parameters [out, in], or a single grouped one [n, out, in].

        Asked of the modules each time: leaving the meta device makes new parameter objects.
        """
        return _parameters(self.experts, self.name, self.count)

    @property
    def bias_parameters(self) -> list[nn.Parameter]:
        """N parameters [out], or a single grouped one [n, out], or none."""
        return _parameters(self.experts, self.name, self.count, "bias")

    @property
    def grouped(self) -> bool:
        """Whether all experts share one parameter."""
        return self.parameters[0].dim() == 3

    def weights(self) -> list[Tensor]:
        """N tensors [out, in] by local expert index, sharing the parameters' memory."""
        return self._experts([p.data for p in self.parameters])

    def main_grads(self) -> list[Tensor] | None:
        """The same of ``main_grad``, or None unless every weight is trained and has one."""
        parameters = self.parameters
        grads = [getattr(p, "main_grad", None) if p.requires_grad else None for p in parameters]
        present = [g for g in grads if g is not None]
        if len(present) < len(parameters):
            return None
        return self._experts([g.view(p.shape) for g, p in zip(present, parameters, strict=True)])

    def biases(self) -> Tensor:
        """[n, out], a copy or the parameter's memory."""
        biases = [p.data for p in self.bias_parameters]
        return torch.stack(biases) if biases[0].dim() == 1 else biases[0]

    def per_parameter(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Turn n gradients [out, in] into one for each parameter."""
        return [torch.stack(list(gradients))] if self.grouped else list(gradients)

    def point_into_one_tensor(self) -> None:
        """Move the weights next to each other, last expert first, keeping the parameter objects."""
        parameters = self.parameters
        if parameters[0].dim() == 3:
            return
        first = parameters[0]
        # The first pass may be an evaluation, whose tensors could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            big = torch.empty(len(parameters), *first.shape, dtype=first.dtype, device=first.device)
            for place, parameter in zip(big, reversed(parameters), strict=True):
                place.copy_(parameter.data)
                parameter.data = place

    def _experts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors[0].unbind(0)) if tensors[0].dim() == 3 else list(tensors)


_changes = 0
_counting = False


def weights_changed() -> None:
    """Say that weights may have changed in a way that nobody can see, as writes to ``.data`` do.

    Only ``--moe-moonep-reuse`` needs to know; optimizer steps and loaded state dicts are seen.
    """
    global _changes
    _changes += 1


def _count_steps() -> None:
    """From now on an optimizer step of any kind is a change of weights."""
    global _counting
    if not _counting:
        register_optimizer_step_post_hook(_step_done)
        _counting = True


def _step_done(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    weights_changed()


class HomeWeights:
    """The expert weights of one MoE layer on this rank.

    Args:
        experts: Megatron's ``SequentialMLP`` or ``TEGroupedMLP`` (either weight form).
        count: n.

    Raises:
        TypeError: for an expert module, or an expert linear, that is not known to be plain.
    """

    def __init__(self, experts: nn.Module, count: int) -> None:
        self.experts = experts
        self.count = count
        self.fc1 = Projection(experts, "linear_fc1", count)
        self.fc2 = Projection(experts, "linear_fc2", count)
        self._order: list[int] | None = None
        self._seen: tuple[Any, ...] | None = None
        self._version = 0
        self._versioned: tuple[Any, ...] = ()
        self._stretches: list[tuple[int, int]] = []
        # Weights on the meta device have no memory yet; the first forward points them.
        if not any(p.is_meta for p in self.parameters):
            self.fc1.point_into_one_tensor()
            self.fc2.point_into_one_tensor()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All weights, FC1's before FC2's, then all biases."""
        weights = self.fc1.parameters + self.fc2.parameters
        return weights + self.fc1.bias_parameters + self.fc2.bias_parameters

    @property
    def biased(self) -> bool:
        """Whether the experts have biases."""
        return bool(self.fc1.bias_parameters)

    def order(self) -> list[int]:
        """Local expert indices in memory order: the order of this rank's home row groups."""
        return self._current_order()

    def runs(self) -> list[Run]:
        """The runs, in home order; together they cover all n experts.

        Pointers are compared at every call, so weights that moved are seen, never read stale.

        Raises:
            RuntimeError: when the weights lie in memory in a way that gives no runs, or in another
                order than at the first forward.
        """
        order = self._current_order()
        # Views are made anew: kept ones would keep weights alive that the model has let go.
        columns = _columns(self.fc1, self.fc2, order)
        return [_run(columns, a, b) for a, b in self._stretches]

    def _current_order(self) -> list[int]:
        """The order, after looking at the weights again where they have moved."""
        if self._addresses() != self._seen:
            self._find_stretches()
            self._seen = self._addresses()
        assert self._order is not None
        return self._order

    def version(self) -> int:
        """A number that is another one whenever the weights may have changed since the last call.

        Seen are steps of any torch optimizer in this process, in-place changes of the parameters
        (loading a state dict is one) and parameters that moved. What writes through ``.data`` or a
        view outside an optimizer step must say so: see `weights_changed`.
        """
        _count_steps()
        seen = (
            _changes,
            *((p.data_ptr(), None if p.is_inference() else p._version) for p in self.parameters),
        )
        # Nobody counts changes of an inference tensor.
        if seen != self._versioned or any(p.is_inference() for p in self.parameters):
            self._versioned = seen
            self._version += 1
        return self._version

    def replay_pre_hooks(self) -> None:
        """Run DDP's parameter all-gather hooks, which fire on modules that we do not call.

        Raises:
            TypeError: for any other hook on an expert module, which would be bypassed.
        """
        for name, module in self.experts.named_modules():
            for hook in module._forward_pre_hooks.values():
                if not getattr(hook, "__qualname__", "").startswith(DDP_PRE_HOOK):
                    raise _bypassed(name, f"forward pre-hook {hook!r}")
                hook(module, None)
            hooks = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
            others = [hook for some in hooks for hook in some.values()]
            if any(getattr(hook, "__module__", None) != WATCHING for hook in others):
                raise _bypassed(name, "forward or backward hooks")

    def _addresses(self) -> tuple[Any, ...]:
        parameters = self.parameters
        grads = (getattr(p, "main_grad", None) for p in parameters)
        tensors = (*parameters, *grads)
        where = (None if t is None else (t.data_ptr(), t.dtype, t.device) for t in tensors)
        return (*where, *(p.requires_grad for p in parameters))

    def _find_stretches(self) -> None:
        for projection in (self.fc1, self.fc2):
            # A move between construction and wrapping (.cuda(), .bfloat16(), to_empty) scatters
            # the weights, each into memory of its own; a DDP buffer is shared and stays.
            if _scattered(projection.parameters):
                projection.point_into_one_tensor()
        order = _memory_order(self.fc1.weights())
        if self._order is not None and order != self._order:
            raise RuntimeError(
                f"the memory order of the experts' weights changed from {self._order} to {order} "
                "since the first forward; wrap the model in DDP before its first forward"
            )
        columns = _columns(self.fc1, self.fc2, order)
        stretches = list(_stretches(columns, self.count))
        # Frozen experts lie outside DDP's buffers, so the trained ones may have no neighbours.
        trained = columns[2] is not None and columns[3] is not None
        if trained and len(stretches) == self.count > 1:
            raise RuntimeError(
                "the experts' weights and main_grads are not laid out in the same order, so no "
                "grouped GEMM can serve them; --use-distributed-optimizer and plain DDP lay them "
                "out fittingly, a layer-wise optimizer does not"
            )
        self._order, self._stretches = order, stretches


def _parameters(
    experts: nn.Module, name: str, count: int, kind: str = "weight"
) -> list[nn.Parameter]:
    """The weights or biases of one projection by local expert index; none where it has none."""
    module = type(experts).__name__
    if module == "SequentialMLP":
        for i, expert in _indexed(experts):
            if type(expert).__name__ != "MLP":
                raise _unknown(f"expert {i}", expert, ("MLP",))
        linears = [_plain(getattr(e, name), f"{name} of expert {i}") for i, e in _indexed(experts)]
        found = [getattr(linear, kind) for linear in linears]
    elif module == "TEGroupedMLP":
        linear = _plain(getattr(experts, name), name)
        found = [getattr(linear, kind, None)]
        if not isinstance(found[0], nn.Parameter):
            found = [getattr(linear, f"{kind}{i}", None) for i in range(count)]
    else:
        raise _unknown("the expert module", experts, ("SequentialMLP", "TEGroupedMLP"))
    # Transformer Engine has empty tensors in the place of biases that are not there.
    return [parameter for parameter in found if isinstance(parameter, nn.Parameter)]


def _indexed(experts: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    return enumerate(experts.local_experts)  # type: ignore[arg-type]


def _plain(linear: Any, name: str) -> Any:
    if type(linear).__name__ not in PLAIN_LINEARS:
        raise _unknown(name, linear, sorted(PLAIN_LINEARS))
    return linear


def _unknown(name: str, module: nn.Module, known: Sequence[str]) -> TypeError:
    return TypeError(
        f"{name} is a {type(module).__name__}, whose forward --moe-token-dispatcher-type moonep "
        f"would bypass; supported are {', '.join(known)}. Remove the wrapper or subclass, or use "
        "--moe-token-dispatcher-type alltoall"
    )


def _bypassed(name: str, what: str) -> TypeError:
    return TypeError(
        f"expert module '{name}' has {what}, which --moe-token-dispatcher-type moonep would "
        "bypass; remove it, or use --moe-token-dispatcher-type alltoall"
    )


def _scattered(parameters: list[nn.Parameter]) -> bool:
    """Whether every weight has memory of its own."""
    return len(parameters) > 1 and all(
        p.untyped_storage().nbytes() == p.numel() * p.itemsize for p in parameters
    )


def _memory_order(weights: list[Tensor]) -> list[int]:
    return sorted(range(len(weights)), key=lambda i: weights[i].data_ptr())


def _columns(fc1: Projection, fc2: Projection, order: list[int]) -> list[list[Tensor] | None]:
    """Weights of FC1 and FC2, then main_grads of FC1 and FC2 (or None), in home order."""
    columns = (fc1.weights(), fc2.weights(), fc1.main_grads(), fc2.main_grads())
    return [None if c is None else [c[i] for i in order] for c in columns]


def _stretches(columns: list[list[Tensor] | None], count: int) -> Iterator[tuple[int, int]]:
    """Longest stretches [a, b) in which every column is evenly strided, greedily from the left."""
    steps = [
        tuple(None if c is None else _step(c[i], c[i + 1]) for c in columns)
        for i in range(count - 1)
    ]
    starts = [0]
    for i, step in enumerate(steps):
        broken = any(s is None for s, c in zip(step, columns, strict=True) if c is not None)
        if broken or (i > starts[-1] and step != steps[i - 1]):
            starts.append(i + 1)
    yield from pairwise([*starts, count])


def _step(a: Tensor, b: Tensor) -> int | None:
    """Elements from ``a`` forward to ``b``, or None when ``b`` is not ahead in the same memory."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return None
    step = int(b.storage_offset() - a.storage_offset())
    return step if step >= a.numel() else None


def _run(columns: list[list[Tensor] | None], a: int, b: int) -> Run:
    fc1, fc2, grad1, grad2 = (None if c is None else _strided(c[a:b]) for c in columns)
    assert fc1 is not None
    assert fc2 is not None
    return Run(first=a, fc1=fc1, fc2=fc2, grad1=grad1, grad2=grad2)


def _strided(tensors: list[Tensor]) -> Tensor:
    """One [g, out, in] view over evenly strided tensors."""
    first = tensors[0]
    step = first.numel() if len(tensors) == 1 else _step(tensors[0], tensors[1])
    assert step is not None
    return torch.as_strided(
        first, (len(tensors), *first.shape), (step, *first.stride()), first.storage_offset()
    )
