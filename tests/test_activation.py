"""The two forms of the activation against fp64 autograd."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from moonep_megatron.activation import Eager, FusedSwiGLU, activation


def config(**changes: object) -> SimpleNamespace:
    settings = dict(
        activation_func=F.silu,
        gated_linear_unit=True,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
        bias_activation_fusion=True,
        params_dtype=torch.bfloat16,
    )
    return SimpleNamespace(**(settings | changes))


@pytest.fixture(autouse=True)
def _without_compiler() -> Iterator[None]:
    with torch._dynamo.config.patch(disable=True):
        yield


def exact(pre: Tensor, probs: Tensor, d_act: Tensor) -> tuple[Tensor, ...]:
    pre, probs = (x.double().requires_grad_() for x in (pre, probs))
    gate, linear = pre.chunk(2, -1)
    act = gate / (1 + (-gate).exp()) * linear * probs[:, None]
    return act.detach(), *torch.autograd.grad(act, (pre, probs), d_act.double())


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_swiglu(fuse: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    pre, d_act = (torch.randn(64, n, generator=g).to(dtype) for n in (96, 48))
    probs = torch.rand(64, generator=g)
    chosen = activation(config(params_dtype=dtype), fuse=fuse)
    found = chosen.backward(pre, probs, d_act)
    assert torch.equal(chosen.forward(pre, probs), found[0])
    # Eager rounds bf16 between its operators; the compiled form computes in fp32.
    bound = torch.finfo(dtype).eps * (1 if fuse and dtype == torch.bfloat16 else 4)
    for value, right in zip(found, exact(pre, probs, d_act), strict=True):
        assert (value.double() - right).norm() <= bound * right.norm()
    assert [value.dtype for value in found] == [dtype, dtype, torch.float32]


@pytest.mark.parametrize(
    "changes",
    [
        {"bias_activation_fusion": False},
        {"activation_func": F.gelu},
        {"activation_func_clamp_value": 7.0},
        {"glu_linear_offset": 1.0},
        {"params_dtype": torch.float64},
        {"gated_linear_unit": False},
    ],
    ids=str,
)
def test_what_the_compiled_form_does_not_compute_is_eager(changes: dict[str, object]) -> None:
    assert isinstance(activation(config(), fuse=True), FusedSwiGLU)
    assert isinstance(activation(config(**changes), fuse=True), Eager)
