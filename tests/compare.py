"""Holds dispatchers to the dense reference, by the measure of ``reference.assert_as_good``."""

from itertools import groupby
from types import SimpleNamespace

import torch
from cases import Case, all_ranks, batch, weights
from moe import run_case
from ranks import Layout, run_ranks
from reference import Dense, assert_as_good, dense_moe, error
from torch import Tensor

DISPATCHERS = ("alltoall", "moonep")


def run_cases(cases: list[Case], dispatchers: tuple[str, ...]) -> list[dict[str, SimpleNamespace]]:
    """On a rank: every case under every dispatcher."""
    return [{d: run_case(case, d) for d in dispatchers} for case in cases]


def check(
    cases: list[Case], dispatchers: tuple[str, ...] = DISPATCHERS, timeout: float = 120.0
) -> None:
    """Run the cases, as many as possible in one start of the ranks, and compare every tensor."""
    for (world, ep, tp), some in groupby(cases, key=lambda c: (c.ranks, c.ep_size, c.tp)):
        group = list(some)
        layout = Layout(ep=ep, tp=tp, expert_tp=1)
        answers = run_ranks(world, run_cases, group, dispatchers, layout=layout, timeout=timeout)
        for i, case in enumerate(group):
            compare(case, {d: [answer[i][d] for answer in answers] for d in dispatchers})


def compare(case: Case, answers: dict[str, list[SimpleNamespace]]) -> None:
    """``answers``: by dispatcher, what ``run_case`` gave on every rank."""
    exact = expected(case)
    theirs = _gathered(case, answers["alltoall"])
    for dispatcher, ranks in answers.items():
        actual = _gathered(case, ranks)
        assert actual.keys() == exact.keys()
        for name, value in actual.items():
            where = f"{case.name}, {dispatcher}, {name}"
            assert_as_good(where, value, theirs[name], exact[name], case.dtype)
        # Over all experts the luck of roundings averages out, and the sharper ulp can be asked.
        for fc in ("FC1", "FC2"):
            all_of = [_flat(named, fc) for named in (actual, theirs, exact)]
            where = f"{case.name}, {dispatcher}, all {fc} gradients"
            assert_as_good(where, *all_of, all_of[0].dtype)
    if "moonep" in answers:
        check_rows(case, answers["moonep"])


def assert_same_bits(one: list[SimpleNamespace], other: list[SimpleNamespace]) -> None:
    """Two answers of ``run_case``, each a list, agree in every bit."""
    for a, b in zip(one, other, strict=True):
        for name in ("output", "grad_tokens", "grad_probs"):
            assert all(map(torch.equal, getattr(a, name), getattr(b, name))), name
        for name in ("grad_fc1", "grad_fc2"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def expected(case: Case) -> dict[str, Tensor]:
    """Every tensor of a case by name, from the dense reference."""
    return _named(case, [dense(case, m) for m in range(len(case.routing))])


def assert_near(
    case: Case,
    ours: list[SimpleNamespace],
    others: list[SimpleNamespace],
    theirs: list[SimpleNamespace],
) -> None:
    """Two backends differ by no more than alltoall (``theirs``) errs, and an ulp."""
    exact, a, b, c = expected(case), *(_gathered(case, x) for x in (ours, others, theirs))
    for name, value in exact.items():
        bound = error(c[name], value) + torch.finfo(case.dtype).eps
        off = error(a[name], b[name].double())
        assert off <= bound, f"{name}: backends differ by {off:.3e}, bound {bound:.3e}"


def dense(case: Case, microbatch: int) -> Dense:
    """The reference over the tokens of all ranks."""
    whole = all_ranks(case, microbatch)
    return dense_moe(
        case.expert, whole.tokens_sH, whole.ids_sK, whole.probs_sK, *weights(case), whole.grad_sH
    )


def _named(case: Case, dense: list[Dense]) -> dict[str, Tensor]:
    named = {}
    for m, part in enumerate(dense):
        named[f"output {m}"] = part.output_TH
        named[f"input gradient {m}"] = part.grad_tokens_TH
        named[f"probability gradient {m}"] = part.grad_probs_TK
    for e in range(case.experts):
        named[f"FC1 gradient of expert {e}"] = sum(part.grad_fc1_EIH[e] for part in dense)
        named[f"FC2 gradient of expert {e}"] = sum(part.grad_fc2_EHF[e] for part in dense)
    return named


def _flat(named: dict[str, Tensor], start: str) -> Tensor:
    return torch.cat([value.flatten() for name, value in named.items() if name.startswith(start)])


def _gathered(case: Case, ranks: list[SimpleNamespace]) -> dict[str, Tensor]:
    """The same names from what the ranks gave; expert data parallel copies must be equal."""
    named = {}
    for m in range(len(case.routing)):
        named[f"output {m}"] = torch.cat([rank.output[m] for rank in ranks])
        named[f"input gradient {m}"] = torch.cat([rank.grad_tokens[m] for rank in ranks])
        named[f"probability gradient {m}"] = torch.cat([rank.grad_probs[m] for rank in ranks])
    for fc in ("fc1", "fc2"):
        full = torch.cat([getattr(rank, f"grad_{fc}") for rank in ranks[: case.ep_size]])
        for copy in range(case.ep_size, case.ranks, case.ep_size):
            again = [getattr(rank, f"grad_{fc}") for rank in ranks[copy : copy + case.ep_size]]
            assert torch.equal(full, torch.cat(again)), f"{case.name}: {fc} differs between copies"
        for e in range(case.experts):
            named[f"{fc.upper()} gradient of expert {e}"] = full[e]
    return named


def check_rows(case: Case, ranks: list[SimpleNamespace]) -> None:
    """Exact balance: floor or ceil of the mean on every rank, and nothing lost of any expert.

    With a slack no rank is above it.
    """
    slack = dict(case.moonep).get("slack", 0)
    for group in range(0, case.ranks, case.ep_size):
        members = range(group, group + case.ep_size)
        for m in range(len(case.routing)):
            ids = torch.cat([batch(case, m, rank).ids_sK.flatten() for rank in members])
            total = ids.numel()
            caps = [total // case.ep_size + (d < total % case.ep_size) for d in range(case.ep_size)]
            histogram = torch.bincount(ids, minlength=case.experts).tolist()
            for rank in members:
                record = ranks[rank].records[m]
                rows = record["rows_per_rank"]
                if slack:
                    most = max(*caps, int(total / case.ep_size * (1 + slack) + 1e-9))
                    assert max(rows) <= most and sum(rows) == total, f"{case.name}: rows of {m}"
                else:
                    assert rows == caps, f"{case.name}: rows of microbatch {m}"
                assert record["per_expert"] == histogram, f"{case.name}: rows of experts"
                assert record["router_per_expert"] == histogram, f"{case.name}: router's counts"
