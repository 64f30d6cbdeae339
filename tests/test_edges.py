"""Degenerate input of every kind, on the collective backend: one start of four ranks for all."""

from typing import Any

import pytest
import torch
from cases import Case
from edges import Edge, check, edges, run_edges
from ranks import Layout, run_ranks
from routings import LOADS, check_plan, random_counts

from moonep_megatron.plan import make_plan


def _case(name: str, **changes: Any) -> Case:
    """In fp64, where only the order of sums is left; fp32 where the probabilities are wider."""
    dtype = torch.float32 if "probs_dtype" in changes else torch.float64
    options = {"ranks": 4, "dtype": dtype, "probs_dtype": torch.float64, "seed": len(name)}
    return Case(name=name, **(options | changes))


EDGES = edges(_case)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[dict[str, Any]]]:
    """By edge, what every rank found."""
    by_rank = run_ranks(4, run_edges, EDGES, layout=Layout(ep=4, expert_tp=1), timeout=120)
    return {edge.name: list(found) for edge, *found in zip(EDGES, *by_rank, strict=True)}


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
def test_degenerate_routing(edge: Edge, answers: dict[str, list[dict[str, Any]]]) -> None:
    check(edge, answers[edge.name])


@pytest.mark.parametrize("load", LOADS)
def test_degenerate_routing_of_64_ranks(load: str) -> None:
    """As many as no machine has here: the plan alone."""
    counts = random_counts(load, 64, 256, 512, seed=4)
    check_plan(make_plan(counts), counts)
