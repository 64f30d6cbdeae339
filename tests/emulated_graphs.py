"""Megatron's own CUDA graphs (``--cuda-graph-impl local``) on CPUs, of passes that Python runs.

A capture is a pass like others, and a replay runs it again, over the same static tensors. All that
Megatron does around them is its own code: what it records, its passes to warm up, which gradients
it asks for, where it adds them. Left to GPUs is what a graph itself is: streams, memory that passes
share, and replays that no Python sees.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from moonep_megatron import layer as moonep_layer


class _Graph:
    replay: Callable[[], None]

    def register_generator_state(self, generator: Any) -> None:
        pass


def enable() -> None:
    """For the rest of this process, on top of `moonep_megatron.cpu`; for one model."""
    for owner, name, stand_in in (
        (torch.cuda, "CUDAGraph", _Graph),
        (torch.cuda, "graph", lambda *_, **__: nullcontext()),
        (torch.cuda, "graph_pool_handle", lambda: (0, 0)),
        (torch.cuda, "set_stream", lambda stream: None),
        (torch.cuda, "default_stream", torch.cuda.current_stream),
        (torch.cuda, "memory_stats", lambda: defaultdict(int)),
        (torch._C, "_cuda_beginAllocateCurrentThreadToPool", lambda device, pool: None),
        (torch._C, "_cuda_endAllocateToPool", lambda device, pool: None),
        (cuda_graphs, "get_all_rng_states", dict),
        (cuda_graphs._CudaGraphRunner, "create_fwd_graph", _create_forward),
        (cuda_graphs._CudaGraphRunner, "create_bwd_graph", _create_backward),
        # The backend of these tests reads its sizes on the host, as no graph could.
        (moonep_layer, "captures_dispatch", lambda config: False),
    ):
        setattr(owner, name, stand_in)
    random.get_cuda_rng_tracker().use_cudagraphable_rng = True


_forward = cuda_graphs._CudaGraphRunner.create_fwd_graph
_backward = cuda_graphs._CudaGraphRunner.create_bwd_graph


def _create_forward(runner: Any, *args: Any, **kwargs: Any) -> None:
    _forward(runner, *args, **kwargs)

    def replay() -> None:
        # A replay is a graph of its own also for autograd, which knows the static tensors by now.
        inputs, named = (
            cuda_graphs.tree_map(_leaf, part)
            for part in (runner.fwd_graph_input_args, runner.fwd_graph_input_kwargs)
        )
        with torch.enable_grad():
            outputs = runner.get_tensors(runner.func(*inputs, **named))
        for static, tensor in zip(runner.fwd_graph_output_surface, outputs, strict=True):
            static.data.copy_(tensor.detach())
        runner.replayed = runner.get_tensors(inputs, named), outputs

    runner.fwd_graph.replay = replay


def _leaf(value: Any) -> Any:
    return value.data.requires_grad_(value.requires_grad) if torch.is_tensor(value) else value


def _create_backward(runner: Any) -> None:
    _backward(runner)
    parameters = runner.params_to_backprop
    # Whoever had added its gradient while the pass was captured does so in every replay.
    added = [getattr(parameter, "grad_added_to_main_grad", False) for parameter in parameters]
    into: list[Tensor] = [tensor for tensor in runner.static_grad_inputs if tensor is not None]

    @torch.no_grad()
    def replay() -> None:
        inputs, outputs = ([t for t in some if t.requires_grad] for some in runner.replayed)
        gradients = torch.autograd.grad(
            outputs,
            [*inputs, *parameters],
            [tensor for tensor in runner.static_grad_outputs if tensor is not None],
            allow_unused=True,
        )
        for static, gradient in zip(into, gradients, strict=False):
            static.copy_(gradient)
        weights = gradients[len(into) :]
        for parameter, gradient, done in zip(parameters, weights, added, strict=True):
            if gradient is not None and not done:
                parameter.main_grad.add_(gradient)

    runner.bwd_graph.replay = replay
