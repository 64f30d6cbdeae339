"""Routings that load experts exactly as asked, random otherwise, the same on every rank.

Letters: S tokens of a rank, R ranks, T = R*S tokens, K experts a token, E experts, n = E/R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layer_bench.options import Case, Shape

# Exchanges after which the choices of tokens are as good as independent.
_SHUFFLES = 48


def loads(shape: Shape, ranks: int, case: Case) -> Tensor:
    """Int64 [E], the rows of every expert: R*S*K together, R*S at most for each.

    Raises:
        ValueError: no routing of distinct experts has that factor or maxvio.
    """
    experts, total = shape.experts, ranks * shape.rows
    if case.kind == "balanced":
        return _split(total, experts)
    if case.kind == "maxvio":
        hot = round((1 + case.value) * total / experts)
        _require(shape, case, hot <= ranks * shape.tokens)
        return torch.cat([torch.tensor([hot]), _split(total - hot, experts - 1)])
    home = round(case.value * shape.rows)
    _require(shape, case, case.value >= 1 and home <= total)
    n = experts // ranks
    first = _split(home, n) if case.kind == "even" else _few(shape, ranks, home, n)
    _require(shape, case, int(first.max()) <= ranks * shape.tokens)
    others = _split(total - home, experts - n) if ranks > 1 else first[:0]
    return torch.cat([first, others])


def hot_experts(shape: Shape, ranks: int, home: int) -> int:
    """The fewest experts of rank 0 that can take its surplus over S*K rows."""
    return max(1, -(-(home - shape.rows) // (ranks * shape.tokens)))


def _few(shape: Shape, ranks: int, home: int, n: int) -> Tensor:
    """Rank 0's loads [n]: the mean on every expert, and the surplus on few of them.

    Where even those can't take it all, every token chooses them and the other experts get the rest.
    """
    hot = min(hot_experts(shape, ranks, home), n)
    each = min(-(-shape.rows // n) + (home - shape.rows) // hot, ranks * shape.tokens)
    return torch.cat([torch.full((hot,), each), _split(home - hot * each, n - hot)])


def _split(rows: int, parts: int) -> Tensor:
    """Int64 [parts] that differ by 1 at most."""
    if parts == 0:
        if rows:
            raise ValueError(f"{rows} rows are left over for no expert")
        return torch.zeros(0, dtype=torch.int64)
    return rows // parts + (torch.arange(parts) < rows % parts).long()


def _require(shape: Shape, case: Case, possible: bool) -> None:
    if not possible:
        raise ValueError(f"no routing of shape {shape} to distinct experts is {case}")


def choices(shape: Shape, ranks: int, case: Case) -> Tensor:
    """Int64 [T, K]: distinct experts of every token of all ranks, with exactly these ``loads``."""
    return with_loads(loads(shape, ranks, case), ranks * shape.tokens, shape.topk)


def with_loads(loads_E: Tensor, tokens: int, topk: int) -> Tensor:
    """Int64 [T, K] of which expert e has ``loads_E[e]`` entries, no token one expert twice."""
    generator = torch.Generator().manual_seed(1 + int((loads_E * torch.arange(len(loads_E))).sum()))
    order = torch.randperm(len(loads_E), generator=generator)
    line = torch.repeat_interleave(order, loads_E[order])
    # Entry p belongs to token p mod T: an expert's entries are neighbours, T of them at most.
    ids_TK = line.view(topk, tokens).T[torch.randperm(tokens, generator=generator)].contiguous()
    for _ in range(_SHUFFLES):
        _exchange(ids_TK, generator)
    return ids_TK


def _exchange(ids_TK: Tensor, generator: torch.Generator) -> None:
    """Pairs of tokens swap one choice each, unless one would then have an expert twice."""
    tokens, topk = ids_TK.shape
    one, two = torch.randperm(tokens, generator=generator)[: tokens // 2 * 2].view(2, -1)
    at = torch.randint(topk, (2, len(one)), generator=generator)
    mine, theirs = ids_TK[one, at[0]], ids_TK[two, at[1]]
    clash = (ids_TK[one] == theirs[:, None]).any(1) | (ids_TK[two] == mine[:, None]).any(1)
    ids_TK[one, at[0]] = torch.where(clash, mine, theirs)
    ids_TK[two, at[1]] = torch.where(clash, theirs, mine)


def statistics(loads_E: Tensor, ranks: int) -> dict[str, float]:
    """maxvio, and the rows of the busiest rank over the mean, when all are computed at home."""
    wide = loads_E.double()
    home_R = wide.view(ranks, -1).sum(1)
    return {
        "maxvio": float(wide.max() / wide.mean() - 1),
        "hottest_rank": float(home_R.max() / home_R.mean()),
    }
