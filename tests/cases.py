"""Problems for MoE layers: who brings how many tokens, and which experts they ask for.

A case is data, drawn from its seed alone, so every rank and the reference build the same tensors:
on the process's GPU where there is one, else on the CPU, with the same values.
Letters as in ``reference.py``; s tokens of one rank; n = E/R experts of a rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from reference import Expert
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem. ``tokens`` and ``routing`` have one entry a microbatch, all in flight at once.

    ``ep`` defaults to all ranks. ``grads`` is where weight gradients end: "plain" (``.grad``),
    "main_grad", "fused", "bf16_main_grad" (the last three under Megatron's DDP). ``form`` is whose
    weights: "sequential" (SequentialMLP), "grouped" and "single" (stand-ins of Transformer Engine's
    grouped modules, one weight an expert or one for all), "te" (Transformer Engine's own; GPUs).
    """

    name: str
    ranks: int = 2
    experts: int = 8
    topk: int = 2
    tokens: tuple[tuple[int, ...], ...] = ()
    routing: tuple[str, ...] = ("uniform",)
    hidden: int = 16
    ffn: int = 12
    dtype: torch.dtype = torch.float32
    probs_dtype: torch.dtype = torch.float32
    expert: Expert = field(default_factory=Expert)
    form: str = "sequential"
    grads: str = "plain"
    ep: int | None = None
    tp: int = 1
    seed: int = 0
    ddp: tuple[tuple[str, object], ...] = ()
    config: tuple[tuple[str, object], ...] = ()
    moonep: tuple[tuple[str, object], ...] = ()

    @property
    def ep_size(self) -> int:
        return self.ep or self.ranks

    @property
    def tokens_mr(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of every microbatch and rank; 24 on each rank where the case says nothing."""
        return self.tokens or ((24,) * self.ranks,) * len(self.routing)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank brings in one microbatch: tokens [s,H], ids [s,K], probs [s,K], dL/dy [s,H]."""

    tokens_sH: Tensor
    ids_sK: Tensor
    probs_sK: Tensor
    grad_sH: Tensor

    def dense_probs(self, experts: int) -> Tensor:
        """The router's form: probs [s,E], zero where a token does not go."""
        return self._spread(self.probs_sK, experts)

    def routing_map(self, experts: int) -> Tensor:
        return self._spread(torch.ones_like(self.ids_sK, dtype=torch.bool), experts)

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def _spread(self, values_sK: Tensor, experts: int) -> Tensor:
        return values_sK.new_zeros(values_sK.shape[0], experts).scatter(1, self.ids_sK, values_sK)


Draw = Callable[[torch.Generator, int, int, Case], Tensor]


def _weighted(weights_E: Tensor, g: torch.Generator, s: int, topk: int) -> Tensor:
    """K distinct experts a token, drawn with the given weights; ids ascending as from a map."""
    if s == 0:
        return torch.empty(0, topk, dtype=torch.int64)
    return torch.multinomial(weights_E.expand(s, -1), topk, generator=g).sort(dim=1).values


def _uniform(g: torch.Generator, s: int, rank: int, case: Case) -> Tensor:
    return _weighted(torch.ones(case.experts), g, s, case.topk)


def _balanced(g: torch.Generator, s: int, rank: int, case: Case) -> Tensor:
    # Each rank starts at its own phase: a common start would fill the same prefix of experts.
    first = torch.arange(s) * case.topk + rank * s * case.topk
    return ((first[:, None] + torch.arange(case.topk)) % case.experts).sort(dim=1).values


def _hot_expert(g: torch.Generator, s: int, rank: int, case: Case) -> Tensor:
    weights = torch.ones(case.experts)
    weights[case.experts // 2] = 1e9
    return _weighted(weights, g, s, case.topk)


def _favour(first: int, last: int, g: torch.Generator, s: int, case: Case) -> Tensor:
    """Only experts of EP ranks [first, last), and others only where those are fewer than K."""
    n = case.experts // case.ep_size
    weights = torch.full((case.experts,), 1e-9)
    weights[first * n : last * n] = 1.0
    return _weighted(weights, g, s, case.topk)


def _zipf(g: torch.Generator, s: int, rank: int, case: Case) -> Tensor:
    order = torch.randperm(case.experts, generator=torch.Generator().manual_seed(case.seed + 99))
    return _weighted(1.0 / (1.0 + order) ** 1.2, g, s, case.topk)


def _repeats(g: torch.Generator, s: int, rank: int, case: Case) -> Tensor:
    """Ids in no order, often the same one several times in a token."""
    return torch.randint(0, 3, (s, case.topk), generator=g) * (case.experts // 3)


def _gaps(g: torch.Generator, s: int, rank: int, case: Case) -> Tensor:
    """Repeats with -1, no choice, strewn in; some tokens have none at all."""
    ids = _repeats(g, s, rank, case)
    ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    ids[::5] = -1
    return ids


# Below the router, by id: what no routing map can say.
ODD_IDS: dict[str, Draw] = {"repeats": _repeats, "gaps": _gaps}
ROUTINGS: dict[str, Draw] = {
    "uniform": _uniform,
    "balanced": _balanced,
    "hot_expert": _hot_expert,
    "hot_rank": lambda g, s, rank, case: _favour(0, 1, g, s, case),
    "last_rank": lambda g, s, rank, case: _favour(case.ep_size - 1, case.ep_size, g, s, case),
    "two_thirds_idle": lambda g, s, rank, case: _favour(0, -(-case.ep_size // 3), g, s, case),
    "zipf": _zipf,
}


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def weights(case: Case) -> tuple[Tensor, Tensor]:
    """FC1 [E,I,H] and FC2 [E,H,F] of all experts, in the case's dtype; biases as a last column."""
    g = torch.Generator().manual_seed(case.seed)
    inner = case.ffn * (2 if case.expert.gated else 1)
    fc1 = torch.randn(case.experts, inner, case.hidden, generator=g, dtype=torch.float64)
    fc2 = torch.randn(case.experts, case.hidden, case.ffn, generator=g, dtype=torch.float64)
    fc1, fc2 = fc1 / case.hidden**0.5, fc2 / case.ffn**0.5
    if case.expert.biased:
        biases = (torch.randn(*w.shape[:2], 1, generator=g, dtype=w.dtype) for w in (fc1, fc2))
        fc1, fc2 = (torch.cat(pair, dim=2) for pair in zip((fc1, fc2), biases, strict=True))
    return fc1.to(device(), case.dtype), fc2.to(device(), case.dtype)


def batch(case: Case, microbatch: int, rank: int) -> Batch:
    s = case.tokens_mr[microbatch][rank]
    g = torch.Generator().manual_seed(1 + case.seed + 1000 * microbatch + 7 * rank)
    ids_sK = (ROUTINGS | ODD_IDS)[case.routing[microbatch]](g, s, rank, case)
    probs_sK = torch.rand(s, case.topk, generator=g, dtype=torch.float64) + 0.1
    tokens, grad = (
        torch.randn(s, case.hidden, generator=g, dtype=torch.float64).to(case.dtype)
        for _ in range(2)
    )
    probs_sK = (probs_sK / probs_sK.sum(dim=1, keepdim=True)).to(case.probs_dtype)
    part = Batch(tokens_sH=tokens, ids_sK=ids_sK, probs_sK=probs_sK, grad_sH=grad)
    return part.to(device())


def all_ranks(case: Case, microbatch: int) -> Batch:
    """The batches of all ranks, one after another."""
    parts = [batch(case, microbatch, rank) for rank in range(case.ranks)]
    return Batch(
        tokens_sH=torch.cat([part.tokens_sH for part in parts]),
        ids_sK=torch.cat([part.ids_sK for part in parts]),
        probs_sK=torch.cat([part.probs_sK for part in parts]),
        grad_sH=torch.cat([part.grad_sH for part in parts]),
    )
