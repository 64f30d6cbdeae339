"""The expert MLP over home weights and duplicate slots: one autograd Function.

Row groups of a rank: its n home experts in home order, then its foreign experts, which use the B
slots in waves (foreign expert j uses slot j mod B in wave j div B). Rows are read through
``source_row_N`` inside the products, so neither pass expands the receive rows.

One wave's weights are pushed once a pass, for both projections; of several waves each projection
is pushed when its turn comes, so that every wave of FC1 goes before the activation.

Letters: n home experts, B slots, M receive rows, N grouped rows, H row width, F expert FFN width,
F1 = 2F with a gated activation, else F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moonep_megatron import gemm
from moonep_megatron.activation import Activation
from moonep_megatron.backends.base import Backend, Bounds, Route
from moonep_megatron.biases import Biases
from moonep_megatron.slots import SlotPool
from moonep_megatron.weights import HomeWeights, Projection, Run

FC1, FC2 = 0, 1


@dataclass(frozen=True, kw_only=True)
class ExpertCall:
    """What one pass of the experts needs beside its tensors.

    Attributes:
        fused: add weight gradients into ``main_grad`` in backward, as
            ``gradient_accumulation_fusion`` says, instead of returning them.
        differentiated: gradients are recorded, so forward keeps what backward needs.
        on_host: read the row boundaries on the host, for products that need them there.
        dispatch_again: brings the receive rows of this pass once more in backward, instead of
            keeping them; lent, as from `Backend.dispatch`.
    """

    backend: Backend
    route: Route
    home: HomeWeights
    slots: SlotPool
    activation: Activation
    fused: bool
    differentiated: bool = True
    on_host: bool = True
    dispatch_again: Callable[[], Tensor] | None = None

    def bounds(self, first: int, count: int) -> Bounds:
        """Row boundaries of groups first .. first + count, where the products want them."""
        if self.on_host:
            return self.route.starts_G1()[first : first + count + 1]
        return self.route.bounds(first, count)

    def computed_rows(self, rows: int) -> int:
        """How many of N rows elementwise work covers: those of all groups, or all N."""
        return self.route.starts_G1()[-1] if self.on_host else rows

    def wave_slots(self, wave: int) -> int:
        """Slots that a wave uses; a last one may use fewer than B."""
        return min(self.slots.count, self.home.count - wave * self.slots.count)


def run_experts(call: ExpertCall, receive_MH: Tensor, probs_N: Tensor) -> Tensor:
    """FC1, activation times probability, FC2, and the sum of each token's rows on this rank.

    Args:
        receive_MH: [M, H], from the dispatch, lent; freed here.
        probs_N: [N], the router's weight of every grouped row.

    Returns:
        [M, H], for the gather, lent.
    """
    return _ExpertMLP.apply(call, receive_MH, probs_N, *call.home.parameters)


def group_rows(call: ExpertCall) -> list[tuple[int, Bounds]]:
    """(first group, bounds) of every launch of a pass, exactly as handed to the products."""
    launches = [(run.first, call.bounds(run.first, run.count)) for run in call.home.runs()]
    for wave in range(call.route.waves):
        for first, count in _chunks(call, wave):
            group = _foreign_group(call, wave) + first
            launches.append((group, call.bounds(group, count)))
    return launches


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
        pre_NF1 = receive_MH.new_empty(rows, call.slots.fc1.shape[1])
        out_NH = receive_MH.new_empty(rows, call.slots.fc2.shape[1])
        index = call.route.source_row_N
        runs, a = call.home.runs(), call.computed_rows(rows)
        biases = Biases.gather(call.home, call.backend, call.route)
        _push_all(call, backward=False)
        for weights, bounds in _launches(call, runs, FC1):
            gemm.rows_times_weights(receive_MH, weights, pre_NF1, bounds, index)
        if biases:
            biases.add_to_fc1(pre_NF1[:a])
        ctx.call, ctx.biases = call, biases
        # Parameters ask for gradients also where none are recorded.
        if call.differentiated and any(ctx.needs_input_grad):
            kept = receive_MH.new_empty(0) if call.dispatch_again else call.backend.keep(receive_MH)
            ctx.save_for_backward(kept, probs_N, pre_NF1)
        call.backend.free_receive()
        act_NF = call.activation.forward(pre_NF1[:a], probs_N[:a])
        for weights, bounds in _launches(call, runs, FC2):
            gemm.rows_times_weights(act_NF, weights, out_NH, bounds, None)
        if biases:
            biases.add_to_fc2(out_NH[:a], probs_N[:a])
        _end_beside(call)
        return call.backend.presum(call.route, out_NH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sums_MH: Tensor) -> tuple[Tensor | None, ...]:
        call: ExpertCall = ctx.call
        receive_MH, probs_N, pre_NF1 = ctx.saved_tensors
        if call.dispatch_again is not None:
            # The receive rows are needed for the input, too.
            d_sums_MH = call.backend.keep(d_sums_MH)
            call.backend.free_receive()
            receive_MH = call.dispatch_again()
        sweep = _Backward(call, receive_MH, probs_N, pre_NF1, d_sums_MH.contiguous())
        fc1, fc2, order = call.home.fc1, call.home.fc2, call.home.order()
        grad1 = HomeGradient(fc1, fc2, order, fused=call.fused)
        grad2 = HomeGradient(fc2, fc1, order, fused=call.fused)
        sweep.run(grad1, grad2)
        returned = grad1.returned() + grad2.returned()
        if ctx.biases:
            returned += sweep.biases(ctx.biases)
        call.backend.free_receive()
        d_receive_MH = None
        if gather_follows(ctx):
            d_receive_MH = call.backend.presum(call.route, sweep.d_x_NH, sweep.d_probs_N)
        return None, d_receive_MH, sweep.d_probs_N, *returned


def gather_follows(ctx: Any) -> bool:
    """Whether the backward of the dispatch, a gather, runs in this backward pass.

    Not where neither tokens nor probabilities need a gradient, nor where the caller asks for other
    gradients only. Every pre-sum needs its gather.

    Args:
        ctx: of a Function whose first two tensors are receive rows and probabilities.
    """
    nodes = [node for node, _ in ctx.next_functions[:2] if node is not None]
    leaves = ["AccumulateGrad" in node.name() for node in nodes]
    return any(leaves) or any(map(torch._C._will_engine_execute_node, nodes))


class _Backward:
    """The data and weight gradients of one pass."""

    def __init__(
        self, call: ExpertCall, receive_MH: Tensor, probs_N: Tensor, pre_NF1: Tensor, d_sums: Tensor
    ) -> None:
        self.call, self.runs = call, call.home.runs()
        self.receive_MH, self.d_sums_MH = receive_MH, d_sums
        self.probs_N, self.pre_NF1 = probs_N, pre_NF1
        rows, f = probs_N.shape[0], call.slots.fc2.shape[2]
        self.d_act_NF = receive_MH.new_empty(rows, f)
        self.d_x_NH = receive_MH.new_empty(rows, d_sums.shape[1])

    def run(self, fc1: HomeGradient, fc2: HomeGradient) -> None:
        """All of it. Pulls and home weight gradients never add to one parameter together."""
        call, index = self.call, self.call.route.source_row_N
        _push_all(call, backward=True)
        for weights, bounds in _launches(call, self.runs, FC2, backward=True):
            gemm.rows_times_weights(self.d_sums_MH, weights.mT, self.d_act_NF, bounds, index)
        self._activation()
        self._home_weights(FC2, fc2)
        for wave in range(call.route.waves):
            self._slot_weights(wave)
            targets = (fc1.pulled_into(), fc2.pulled_into())
            call.backend.pull_gradients(call.route, wave, call.slots, targets)
        for weights, bounds in _launches(call, self.runs, FC1, backward=True):
            gemm.rows_times_weights(self.d_pre_NF1, weights.mT, self.d_x_NH, bounds, None)
        _end_beside(call)
        self._home_weights(FC1, fc1)

    def _activation(self) -> None:
        """Gradients of activation and probability, and the activation, which was not kept."""
        a = self.call.computed_rows(self.probs_N.shape[0])
        self.act_NF, self.d_pre_NF1, d_probs = self.call.activation.backward(
            self.pre_NF1[:a], self.probs_N[:a], self.d_act_NF[:a]
        )
        self.d_probs_N = F.pad(d_probs, (0, self.probs_N.shape[0] - a))

    def biases(self, biases: Biases) -> list[Tensor | None]:
        """Gradients of the biases for autograd; what they add to those of the probabilities."""
        call, a = self.call, self.act_NF.shape[0]
        biases.add_to_d_probs(self.d_probs_N[:a], self.d_sums_MH)
        groups = 2 * call.home.count
        gradients = biases.gradients(
            self.d_pre_NF1, self.d_sums_MH, self.probs_N[:a], call.bounds(0, groups)
        )
        returned: list[Tensor | None] = []
        for projection, wide in zip((call.home.fc1, call.home.fc2), gradients, strict=True):
            parameters = projection.bias_parameters
            gradient = wide.to(parameters[0].dtype)
            returned += [gradient] if parameters[0].dim() == 2 else gradient.unbind(0)
        return returned

    def _home_weights(self, projection: int, gradient: HomeGradient) -> None:
        for run in self.runs:
            into = gradient.of_run(run, run.grad1 if projection == FC1 else run.grad2)
            bounds = self.call.bounds(run.first, run.count)
            self._weights(projection, into, bounds, accumulate=True)

    def _slot_weights(self, wave: int) -> None:
        """The slot gradients of one wave, as soon as those of the wave before are at home."""
        call, count = self.call, self.call.wave_slots(wave)
        bounds = call.bounds(_foreign_group(call, wave), count)
        call.backend.wait_pulled()
        self._weights(FC2, call.slots.grad2[:count], bounds, accumulate=False)
        self._weights(FC1, call.slots.grad1[:count], bounds, accumulate=False)

    def _weights(
        self, projection: int, grads_goi: Tensor, bounds: Bounds, *, accumulate: bool
    ) -> None:
        index = self.call.route.source_row_N
        if projection == FC2:
            d_out, rows, which = self.d_sums_MH, self.act_NF, {"out_index": index}
        else:
            d_out, rows, which = self.d_pre_NF1, self.receive_MH, {"row_index": index}
        gemm.add_weight_gradients(d_out, rows, grads_goi, bounds, accumulate=accumulate, **which)


def _launches(
    call: ExpertCall, runs: list[Run], projection: int, *, backward: bool = False
) -> Iterator[tuple[Tensor, Bounds]]:
    """Weights [g, out, in] and bounds of every launch of one projection: home, then slots.

    A launch over slots is yielded when work queued from there on may read them.
    """
    for run in runs:
        weights = run.fc1 if projection == FC1 else run.fc2
        yield weights, call.bounds(run.first, run.count)
    slots = call.slots.weights(projection)
    for wave in range(call.route.waves):
        if call.route.waves > 1:
            _push(call, wave, (projection,), backward=backward)
        for first, count in _chunks(call, wave):
            call.backend.wait_slots(call.route, wave, projection, first, first + count)
            group = _foreign_group(call, wave) + first
            yield slots[first : first + count], call.bounds(group, count)
        if call.route.waves > 1:
            call.backend.free_slots()


def _chunks(call: ExpertCall, wave: int) -> Iterator[tuple[int, int]]:
    """(first slot, count) of each launch over a wave's slots."""
    first, end = 0, call.wave_slots(wave)
    for count in call.backend.slot_chunks:
        if first + count < end:
            yield first, count
            first += count
    yield first, end - first


def _foreign_group(call: ExpertCall, wave: int) -> int:
    """Row group of a wave's first slot."""
    return call.home.count + wave * call.slots.count


def _push_all(call: ExpertCall, *, backward: bool) -> None:
    """Start the push of a single wave, which serves both projections."""
    if call.route.waves == 1:
        _push(call, 0, (FC1, FC2), backward=backward)


def _end_beside(call: ExpertCall) -> None:
    """Free the slots that `_push_all` filled, and wait for what the pass did on another stream.

    A pass without waves did nothing there, and a CUDA graph may not wait for a stream that has no
    part in it.
    """
    if call.route.waves == 1:
        call.backend.free_slots()
    if call.route.waves:
        call.backend.join()


def _push(call: ExpertCall, wave: int, projections: tuple[int, ...], *, backward: bool) -> None:
    homes = (call.home.fc1, call.home.fc2)
    weights = {p: homes[p].weights() for p in projections}
    call.backend.push_weights(call.route, wave, weights, call.slots, backward=backward)


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

    def __init__(
        self, projection: Projection, other: Projection, order: list[int], *, fused: bool
    ) -> None:
        self.projection = projection
        self.place = {expert: place for place, expert in enumerate(order)}
        self.main_grads = projection.main_grads()
        self.own: Tensor | None = None
        if self.main_grads is None or not fused:
            weight = projection.weights()[0]
            # Without main_grad the duplicates come in here, in fp32, and all is rounded once.
            wide = torch.promote_types(weight.dtype, torch.float32)
            if not any(p.requires_grad for p in projection.parameters):
                # Thrown away in the end, but one kernel adds to both projections.
                wide = next((g.dtype for g in other.main_grads() or ()), wide)
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
