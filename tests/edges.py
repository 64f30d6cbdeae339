"""MoE layers at the edge of what a router or a caller may bring, against the dense reference.

Each edge runs once on a rank, from the layer's input or, where no routing map can say it, from
expert ids; ``check`` compares everything that comes out. Letters as in ``cases.py``; W the width of
the model, which is H unless experts are latent.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cases import Batch, Case, batch, device, weights
from megatron.core.transformer.moe import moe_layer
from moe import build, expert_parameters, gradient, poisoned_memory, recorded, stacked
from reference import Dense, dense_moe, error
from torch import Tensor, nn

# Relative L2 error: what the order of sums leaves, and in 16 bits a few roundings on the way.
BOUNDS = {
    torch.float64: 4e-15,
    torch.float32: 1e-6,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A case with one microbatch, and what is odd about its input.

    ``ids`` is the dtype of expert ids to start from; None starts from the router. ``nan`` makes one
    token NaN, ``strided`` gives tokens that do not lie densely, ``latent`` is W of a model whose
    experts work in the case's H.
    """

    case: Case
    ids: torch.dtype | None = None
    nan: bool = False
    strided: bool = False
    latent: int | None = None

    @property
    def name(self) -> str:
        return self.case.name


Make = Callable[..., Case]


def edges(make: Make) -> list[Edge]:
    """All edges; ``make(name, **changes)`` gives a case for 4 ranks."""
    a_few = 5
    wide = make("").hidden * 2
    latent = (("hidden_size", wide), ("moe_latent_size", wide // 2))
    narrow = wide // 4
    many = {"experts": 1024, "topk": 8, "hidden": narrow, "ffn": narrow, "form": "grouped"}
    return [
        Edge(case=make("all tokens to one expert", topk=1, routing=("hot_expert",))),
        Edge(case=make("all tokens to one rank", routing=("hot_rank",))),
        Edge(case=make("uniform", routing=("uniform",))),
        Edge(case=make("K = 1", topk=1, routing=("zipf",))),
        Edge(case=make("E = R", experts=4, routing=("zipf",))),
        Edge(case=make("S = 1", tokens=((1,) * 4,), routing=("hot_rank",))),
        Edge(case=make("rows not divisible by R", tokens=((a_few, 4, 2, 0),), routing=("zipf",))),
        Edge(case=make("S*K not divisible by R", tokens=((a_few,) * 4,), topk=3)),
        Edge(case=make("last rank hot", routing=("last_rank",))),
        Edge(case=make("repeated ids", experts=12, topk=4, routing=("repeats",)), ids=torch.int32),
        Edge(case=make("one NaN row", routing=("zipf",)), nan=True),
        Edge(case=make("rows with -1", experts=12, topk=3, routing=("gaps",)), ids=torch.int32),
        Edge(case=make("int64 ids", routing=("hot_rank",)), ids=torch.int64),
        Edge(case=make("fp64 probabilities", probs_dtype=torch.float64, routing=("zipf",))),
        Edge(case=make("strided tokens", routing=("hot_rank",)), strided=True),
        Edge(case=make("latent experts", routing=("hot_rank",), config=latent), latent=wide),
        Edge(case=make("1024 experts", routing=("hot_rank",), **many)),
        Edge(case=make("all experts chosen", experts=4, topk=4, tokens=((7, 7, 1, 7),))),
    ]


def run_edges(some: list[Edge]) -> list[dict[str, Any]]:
    return [run_edge(edge) for edge in some]


def run_edge(edge: Edge) -> dict[str, Any]:
    """On a rank, forward and backward: ``output``, ``tokens``, ``probs`` and ``fc1``, ``fc2`` of
    its own experts (gradients), and ``rows``, those that every rank computed."""
    try:
        with poisoned_memory("moonep"), _latent_projections(edge):
            return _run(edge, build(edge.case, "moonep"), inputs(edge, dist.get_rank()))
    except Exception as error:
        raise RuntimeError(f"in {edge.name!r}") from error


def _run(edge: Edge, layer: nn.Module, part: Batch) -> dict[str, Any]:
    hidden = _strided(part.tokens_sH) if edge.strided else part.tokens_sH[:, None].clone()
    hidden.requires_grad_()
    if edge.ids is None:
        probs = layer.router.probs[0]
        with recorded("moonep") as records:
            output = layer(hidden)[0]
        rows = records[0]["rows_per_rank"]
    else:
        probs = part.probs_sK.clone().requires_grad_()
        sent = layer.token_dispatcher.route_ids(hidden, part.ids_sK.to(edge.ids))
        dispatched = layer.dispatch(sent, probs)
        rows = layer.token_dispatcher.current_route().plan.rows_RE.sum(1).tolist()
        sums, _ = layer.routed_experts_compute(*dispatched)
        output = layer.postprocess(layer.combine(sums), None)
    output.backward(part.grad_sH[:, None])
    d_probs = probs.grad if edge.ids else probs.grad.gather(1, part.ids_sK)
    fc1, fc2 = (stacked([gradient(p) for p in fc]) for fc in expert_parameters(layer))
    found = {"output": output[:, 0], "tokens": hidden.grad[:, 0], "probs": d_probs}
    found |= {"fc1": fc1, "fc2": fc2}
    return {name: value.detach().cpu() for name, value in found.items()} | {"rows": rows}


def check(edge: Edge, answers: list[dict[str, Any]]) -> None:
    """``answers``: what `run_edge` gave on every rank."""
    whole = [inputs(edge, rank) for rank in range(edge.case.ranks)]
    exact = _expected(edge, whole)
    bound = BOUNDS[edge.case.dtype]
    for name, value in exact.items():
        found = torch.cat([answer[name] for answer in answers]).to(value.device)
        assert torch.equal(found.isnan(), value.isnan()), f"{name}: NaN in other places"
        # Weight gradients expert by expert: one without rows must have exactly 0.
        parts = range(len(value)) if name in ("fc1", "fc2") else [slice(None)]
        for part in parts:
            off = error(found[part].nan_to_num(), value[part].nan_to_num())
            assert off <= bound, f"{name} {part}: relative error {off:.2e} above {bound:.2e}"
    total, ranks = sum(int((part.ids_sK >= 0).sum()) for part in whole), edge.case.ranks
    caps = [total // ranks + (d < total % ranks) for d in range(ranks)]
    for answer in answers:
        assert answer["rows"] == caps, "rows of the ranks"


def inputs(edge: Edge, rank: int) -> Batch:
    """What a rank brings; tokens [s, W]."""
    part = vars(batch(edge.case, 0, rank)).copy()
    if edge.latent:
        g = torch.Generator().manual_seed(50 + rank)
        shape = (len(part["tokens_sH"]), edge.latent)
        for name in ("tokens_sH", "grad_sH"):
            drawn = torch.randn(shape, generator=g, dtype=torch.float64)
            part[name] = drawn.to(device(), edge.case.dtype)
    if edge.nan and rank == 1:
        part["tokens_sH"][2] = torch.nan
    return Batch(**part)


def _expected(edge: Edge, whole: list[Batch]) -> dict[str, Tensor]:
    tokens, ids, probs, grad = (
        torch.cat([getattr(part, name) for part in whole])
        for name in ("tokens_sH", "ids_sK", "probs_sK", "grad_sH")
    )
    down_HW, up_WH = _projections(edge)
    dense: Dense = dense_moe(
        edge.case.expert,
        tokens if down_HW is None else tokens.double() @ down_HW.double().T,
        ids,
        probs,
        *weights(edge.case),
        grad if up_WH is None else grad.double() @ up_WH.double(),
    )
    output, d_tokens = dense.output_TH, dense.grad_tokens_TH
    if down_HW is not None and up_WH is not None:
        output, d_tokens = output @ up_WH.double().T, d_tokens @ down_HW.double()
    named = {"output": output, "tokens": d_tokens, "probs": dense.grad_probs_TK}
    return named | {"fc1": dense.grad_fc1_EIH, "fc2": dense.grad_fc2_EHF}


def _strided(tokens_sH: Tensor) -> Tensor:
    """The same values [s, 1, H], every other number of rows twice as long, transposed."""
    wide = tokens_sH.new_zeros(1, len(tokens_sH), 2 * tokens_sH.shape[1])
    wide[..., ::2] = tokens_sH
    return wide[..., ::2].transpose(0, 1)


def _projections(edge: Edge) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """[H, W] and [W, H] around latent experts."""
    if edge.latent is None:
        return None, None
    g = torch.Generator().manual_seed(7)
    shapes = ((edge.case.hidden, edge.latent), (edge.latent, edge.case.hidden))
    down, up = (torch.randn(s, generator=g, dtype=torch.float64) / s[1] ** 0.5 for s in shapes)
    return down.to(device(), edge.case.dtype), up.to(device(), edge.case.dtype)


@contextmanager
def _latent_projections(edge: Edge) -> Any:
    """Megatron asks Transformer Engine for them; a plain product is all that they are."""
    before = moe_layer.HAVE_TE, moe_layer.TELinear
    down_HW, up_WH = _projections(edge)

    class Projection(nn.Module):
        def __init__(self, wide: int, narrow: int, **_: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(down_HW if wide == edge.latent else up_WH)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x @ self.weight.T, None

    moe_layer.HAVE_TE, moe_layer.TELinear = True, Projection
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = before
