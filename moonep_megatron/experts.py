"""The expert MLP over home weights and duplicate slots: one autograd Function.

Row groups of a rank: its n home experts in home order, then its foreign experts, which use the B
slots in waves (foreign expert j uses slot j mod B in wave j div B). Rows are read through
``source_row_N`` inside the products, so neither pass expands the receive rows.

Letters: n home experts, B slots, M receive rows, N grouped rows, H row width, F expert FFN width,
F1 = 2F with a gated activation, else F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moonep_megatron import gemm
from moonep_megatron.backends.base import Backend, Route
from moonep_megatron.slots import SlotPool
from moonep_megatron.weights import HomeWeights, Projection, Run

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """What one pass of the experts needs beside its tensors.

    Attributes:
        activation: [rows, F1] -> [rows, F], elementwise along the rows.
        fused: add weight gradients into ``main_grad`` in backward, as
            ``gradient_accumulation_fusion`` says, instead of returning them.
    """

    backend: Backend
    route: Route
    home: HomeWeights
    slots: SlotPool
    activation: Activation
    fused: bool


@dataclass(frozen=True)
class Launch:
    """Consecutive groups whose weights form one strided tensor, and their g + 1 row bounds."""

    fc1: Tensor
    fc2: Tensor
    bounds: Sequence[int]


def run_experts(call: ExpertCall, receive_MH: Tensor, probs_N: Tensor) -> Tensor:
    """FC1, activation times probability, FC2, and the sum of each token's rows on this rank.

    Args:
        receive_MH: [M, H], from the dispatch.
        probs_N: [N], the router's weight of every grouped row.

    Returns:
        [M, H], for the gather.
    """
    return _ExpertMLP.apply(call, receive_MH, probs_N, *call.home.parameters)


def group_rows(call: ExpertCall) -> list[tuple[int, Sequence[int]]]:
    """(first group, bounds) of every launch of a pass, exactly as handed to the products."""
    launches = [(run.first, home_bounds(call.route, run)) for run in call.home.runs()]
    n = call.home.count
    for wave in range(call.route.waves):
        launches.append((n + wave * call.slots.count, slot_bounds(call, wave)))
    return launches


def home_bounds(route: Route, run: Run) -> Sequence[int]:
    """The rows of a run's groups."""
    return route.starts_G1[run.first : run.first + run.count + 1]


def slot_bounds(call: ExpertCall, wave: int) -> Sequence[int]:
    """The rows of a wave's groups; B + 1 of them, fewer in a last wave of fewer experts."""
    n, slots = call.home.count, call.slots.count
    first = n + wave * slots
    return call.route.starts_G1[first : min(first + slots, 2 * n) + 1]


class _ExpertMLP(torch.autograd.Function):
    """Forward and backward of all experts of one rank.

    The compute reads slots that the next layer overwrites, so backward pushes them again: weights
    do not change between forward and backward of a step.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ExpertCall, receive_MH: Tensor, probs_N: Tensor, *parameters: Tensor
    ) -> Tensor:
        del parameters  # inputs only so that autograd asks for their gradients
        rows = probs_N.shape[0]
        launches = _launches(call)
        f1, (h, f) = call.slots.fc1.shape[1], call.slots.fc2.shape[1:]
        pre_NF1 = receive_MH.new_empty(rows, f1)
        act_NF = receive_MH.new_empty(rows, f)
        out_NH = receive_MH.new_empty(rows, h)
        index = call.route.source_row_N
        for launch in launches:
            gemm.rows_times_weights(receive_MH, launch.fc1, pre_NF1, launch.bounds, index)
            a, b = launch.bounds[0], launch.bounds[-1]
            act_NF[a:b] = _weighted(call.activation, pre_NF1[a:b], probs_N[a:b])
            gemm.rows_times_weights(act_NF, launch.fc2, out_NH, launch.bounds, None)
        ctx.call = call
        ctx.save_for_backward(receive_MH, probs_N, pre_NF1)
        return call.backend.presum(call.route, out_NH)

    @staticmethod
    def backward(ctx: Any, d_sums_MH: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        receive_MH, probs_N, pre_NF1 = ctx.saved_tensors
        sweep = _Backward(call, receive_MH, probs_N, pre_NF1, d_sums_MH.contiguous())
        gradients = [
            HomeGradient(projection, call.home.order(), fused=call.fused)
            for projection in (call.home.fc1, call.home.fc2)
        ]
        for wave in range(call.route.waves):
            sweep.foreign(wave, gradients)
        sweep.home(gradients)
        d_receive_MH = call.backend.presum(call.route, sweep.d_x_NH)
        returned = gradients[0].returned() + gradients[1].returned()
        return None, d_receive_MH, sweep.d_probs_N, *returned


class _Backward:
    """The data and weight gradients of one pass, launch by launch."""

    def __init__(
        self, call: ExpertCall, receive_MH: Tensor, probs_N: Tensor, pre_NF1: Tensor, d_sums: Tensor
    ) -> None:
        self.call = call
        self.receive_MH, self.d_sums_MH = receive_MH, d_sums
        self.probs_N, self.pre_NF1 = probs_N, pre_NF1
        rows, f = probs_N.shape[0], call.slots.fc2.shape[2]
        self.act_NF = receive_MH.new_empty(rows, f)
        self.d_act_NF = receive_MH.new_empty(rows, f)
        self.d_pre_NF1 = torch.empty_like(pre_NF1)
        self.d_x_NH = receive_MH.new_empty(rows, receive_MH.shape[1])
        self.d_probs_N = torch.zeros_like(probs_N)

    def foreign(self, wave: int, gradients: list[HomeGradient]) -> None:
        """One wave of foreign experts: their gradients end at home, in ``gradients``."""
        call, slots, bounds = self.call, self.call.slots, slot_bounds(self.call, wave)
        count = len(bounds) - 1
        push(call, wave)
        self._rows(Launch(slots.fc1[:count], slots.fc2[:count], bounds))
        self._weights(slots.grad1[:count], slots.grad2[:count], bounds, accumulate=False)
        for gradient, slot_grads in zip(gradients, (slots.grad1, slots.grad2), strict=True):
            call.backend.pull_gradients(call.route, wave, slot_grads, gradient.pulled_into())

    def home(self, gradients: list[HomeGradient]) -> None:
        """The home experts, after every pull: the two must never write one gradient together."""
        for run in self.call.home.runs():
            bounds = home_bounds(self.call.route, run)
            self._rows(Launch(run.fc1, run.fc2, bounds))
            grad1, grad2 = (
                gradient.of_run(run, main_grad)
                for gradient, main_grad in zip(gradients, (run.grad1, run.grad2), strict=True)
            )
            self._weights(grad1, grad2, bounds, accumulate=True)

    def _rows(self, launch: Launch) -> None:
        """Data gradients of a launch, and the activation again, which forward did not keep."""
        bounds, index = launch.bounds, self.call.route.source_row_N
        a, b = bounds[0], bounds[-1]
        gemm.rows_times_weights(self.d_sums_MH, launch.fc2.mT, self.d_act_NF, bounds, index)
        with torch.enable_grad():
            pre = self.pre_NF1[a:b].detach().requires_grad_()
            probs = self.probs_N[a:b].detach().requires_grad_()
            act = _weighted(self.call.activation, pre, probs)
        self.d_pre_NF1[a:b], self.d_probs_N[a:b] = torch.autograd.grad(
            act, (pre, probs), self.d_act_NF[a:b]
        )
        self.act_NF[a:b] = act.detach()
        gemm.rows_times_weights(self.d_pre_NF1, launch.fc1.mT, self.d_x_NH, bounds, None)

    def _weights(
        self, grad1: Tensor, grad2: Tensor, bounds: Sequence[int], *, accumulate: bool
    ) -> None:
        index = self.call.route.source_row_N
        gemm.add_weight_gradients(
            self.d_sums_MH, self.act_NF, grad2, bounds, accumulate=accumulate, out_index=index
        )
        gemm.add_weight_gradients(
            self.d_pre_NF1, self.receive_MH, grad1, bounds, accumulate=accumulate, row_index=index
        )


def push(call: ExpertCall, wave: int) -> None:
    """Bring the weights of a wave's foreign experts into the slots."""
    for projection, slots in ((call.home.fc1, call.slots.fc1), (call.home.fc2, call.slots.fc2)):
        call.backend.push_weights(call.route, wave, projection.weights(), slots)


def _launches(call: ExpertCall) -> Iterator[Launch]:
    """The launches of a forward; a wave's weights are pushed just before it is yielded."""
    for run in call.home.runs():
        yield Launch(run.fc1, run.fc2, home_bounds(call.route, run))
    for wave in range(call.route.waves):
        push(call, wave)
        bounds = slot_bounds(call, wave)
        count = len(bounds) - 1
        yield Launch(call.slots.fc1[:count], call.slots.fc2[:count], bounds)


def _weighted(activation: Activation, pre: Tensor, probs: Tensor) -> Tensor:
    """Activation times router probability, rounded once to the rows' dtype, as Megatron does."""
    return (activation(pre) * probs.unsqueeze(-1)).to(pre.dtype)


class HomeGradient:
    """Where the gradients of one projection's home weights go.

    Three cases, of which a wrong one would drop the duplicates' share without any error, because
    DDP's hook ignores ``param.grad`` wherever ``grad_added_to_main_grad`` is set:

    - fused, with ``main_grad``: home and duplicates are added into ``main_grad`` here, the flag is
      set, and autograd gets a dummy for DDP's hook to fire on;
    - not fused, with ``main_grad``: home's own gradient is returned, and the hook adds it to the
      ``main_grad`` that the pull has already added the duplicates to;
    - without ``main_grad``: the sum is returned.
    """

    def __init__(self, projection: Projection, order: list[int], *, fused: bool) -> None:
        self.projection = projection
        self.place = {expert: place for place, expert in enumerate(order)}
        self.main_grads = projection.main_grads()
        self.own: Tensor | None = None
        if self.main_grads is None or not fused:
            weight = projection.weights()[0]
            # Without main_grad the duplicates come in here, in fp32, and all is rounded once.
            wide = torch.promote_types(weight.dtype, torch.float32)
            dtype = wide if self.main_grads is None else weight.dtype
            self.own = weight.new_zeros(len(order), *weight.shape, dtype=dtype)

    def pulled_into(self) -> list[Tensor]:
        """The n tensors, by local expert index, that the duplicates' gradients are added to."""
        return self._own_by_expert() if self.main_grads is None else self.main_grads

    def of_run(self, run: Run, main_grad: Tensor | None) -> Tensor:
        """[g, out, in], what the weight gradient of a run of home experts is added to."""
        if self.own is not None:
            return self.own[run.first : run.first + run.count]
        assert main_grad is not None
        return main_grad

    def returned(self) -> list[Tensor | None]:
        """What autograd gets for each parameter."""
        if self.own is None:
            return [_mark_added(p) for p in self.projection.parameters]
        dtype = self.projection.parameters[0].dtype
        return list(self.projection.per_parameter([g.to(dtype) for g in self._own_by_expert()]))

    def _own_by_expert(self) -> list[Tensor]:
        assert self.own is not None
        return [self.own[self.place[expert]] for expert in range(len(self.place))]


_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _mark_added(parameter: Any) -> Tensor | None:
    """Tell DDP's hook that ``main_grad`` is complete, and give it a gradient to fire on."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    key = (parameter.shape, parameter.dtype, parameter.device)
    if getattr(parameter, "zero_out_wgrad", False):
        return torch.zeros_like(parameter)
    if key not in _dummies:
        _dummies[key] = torch.empty_like(parameter, memory_format=torch.contiguous_format).detach()
    # A fresh object each: autograd would clone one that it is given twice.
    return _dummies[key].detach()
