"""A dense mixture of experts in fp64 on one process: what every dispatcher must compute.

Letters: T all tokens of all ranks · K choices of a token · E experts · H width of a token ·
F width inside an expert · I rows of FC1 (2F when gated, else F). Nothing here knows about ranks,
plans, slots or Megatron; every (token, choice) entry is computed by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def _quick_gelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


def _squared_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x)) ** 2


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "gelu": _gelu,
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
}


@dataclass(frozen=True, kw_only=True)
class Expert:
    """How one expert computes: ``activation`` names an entry of ``ACTIVATIONS``.

    Where it has biases, they are the last column of its weights.
    """

    activation: str = "silu"
    gated: bool = True
    clamp: float | None = None
    offset: float = 0.0
    probs_on_input: bool = False
    biased: bool = False

    def __call__(self, x_MH: Tensor, probs_M: Tensor, fc1_IH: Tensor, fc2_HF: Tensor) -> Tensor:
        if self.probs_on_input:
            x_MH, probs_M = x_MH * probs_M[:, None], torch.ones_like(probs_M)
        fc1, bias1, fc2, bias2 = fc1_IH, 0, fc2_HF, 0
        if self.biased:
            (fc1, bias1), (fc2, bias2) = ((w[:, :-1], w[:, -1]) for w in (fc1_IH, fc2_HF))
        inner_MF = self._activate(x_MH @ fc1.T + bias1)
        return (inner_MF @ fc2.T + bias2) * probs_M[:, None]

    def _activate(self, inner_MI: Tensor) -> Tensor:
        act = ACTIVATIONS[self.activation]
        if not self.gated:
            return act(inner_MI)
        half = inner_MI.shape[1] // 2
        gate_MF, linear_MF = inner_MI[:, :half], inner_MI[:, half:]
        if self.clamp is not None:
            gate_MF = torch.minimum(gate_MF, torch.full_like(gate_MF, self.clamp))
            linear_MF = linear_MF.clip(-self.clamp, self.clamp)
        return act(gate_MF) * (linear_MF + self.offset)


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Result of one pass, all fp64: output [T,H] and the gradients of everything that went in."""

    output_TH: Tensor
    grad_tokens_TH: Tensor
    grad_probs_TK: Tensor
    grad_fc1_EIH: Tensor
    grad_fc2_EHF: Tensor


def dense_moe(
    expert: Expert,
    tokens_TH: Tensor,
    ids_TK: Tensor,
    probs_TK: Tensor,
    fc1_EIH: Tensor,
    fc2_EHF: Tensor,
    grad_output_TH: Tensor,
) -> Dense:
    """Forward and backward. An id of -1 is no choice; a repeated id is two choices."""
    leaves = [t.detach().double().requires_grad_() for t in (tokens_TH, probs_TK, fc1_EIH, fc2_EHF)]
    tokens, probs, fc1, fc2 = leaves
    output = torch.zeros_like(tokens)
    for e in range(fc1.shape[0]):
        token_M, choice_M = torch.nonzero(ids_TK == e, as_tuple=True)
        rows_MH = expert(tokens[token_M], probs[token_M, choice_M], fc1[e], fc2[e])
        output = output.index_add(0, token_M, rows_MH)
    grads = torch.autograd.grad(output, leaves, grad_output_TH.double(), materialize_grads=True)
    return Dense(
        output_TH=output.detach(),
        grad_tokens_TH=grads[0],
        grad_probs_TK=grads[1],
        grad_fc1_EIH=grads[2],
        grad_fc2_EHF=grads[3],
    )


def error(actual: Tensor, exact: Tensor) -> float:
    """Relative L2 error; 0 where both are zero, infinite where only the exact one is."""
    difference = (actual.double().to(exact.device) - exact).norm().item()
    size = exact.norm().item()
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def assert_as_good(
    name: str, actual: Tensor, theirs: Tensor, exact: Tensor, computed_in: torch.dtype
) -> None:
    """The error of ``actual`` is at most 1.05 x that of ``theirs`` plus one ulp.

    ``computed_in`` is the dtype that intermediate values were rounded to, whose ulp counts.
    """
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    assert actual.dtype == theirs.dtype, f"{name}: {actual.dtype}, alltoall has {theirs.dtype}"
    # The reference is itself rounded to fp64, in an order of sums of its own.
    ulps = 8 if computed_in == torch.float64 else 1
    bound = 1.05 * error(theirs, exact) + ulps * torch.finfo(computed_in).eps
    ours = error(actual, exact)
    # Written so that a NaN fails.
    assert ours <= bound, f"{name}: relative error {ours:.3e} above {bound:.3e}"
