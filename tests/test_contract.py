"""What a layer owes its backend: what is lent comes back, in order, whatever path autograd takes.

Run under `strict.StrictBackend`, which stands for the symmetric backend on CPUs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from compare import compare
from moe import build, expert_parameters, run_case
from ranks import Layout, run_ranks
from reference import Expert
from strict import strict
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SKEWED = ("hot_rank", "last_rank")


def _strictly(function: Callable[..., Any], *args: Any) -> Any:
    with strict():
        return function(*args)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moonep": (("slots", 1),)},
        {"grads": "fused", "form": "grouped"},
        {"grads": "bf16_main_grad", "dtype": torch.bfloat16},
        {"topk": 1, "experts": 4},
        {"expert": Expert(biased=True)},
        {"config": (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))},
    ],
    ids=str,
)
def test_two_microbatches_in_flight(changes: dict[str, Any]) -> None:
    case = Case(name=str(changes), routing=SKEWED, **changes)
    layout = Layout(ep=2, expert_tp=1)
    moonep = run_ranks(2, _strictly, run_case, case, "moonep", layout=layout)
    alltoall = run_ranks(2, run_case, case, "alltoall", layout=layout)
    compare(case, {"moonep": moonep, "alltoall": alltoall})


def test_one_rank_joins_nothing() -> None:
    run_ranks(1, _strictly, run_case, Case(name="one rank", ranks=1), "moonep")


def _layer() -> tuple[Any, Tensor]:
    layer = build(Case(name="", routing=SKEWED), "moonep")
    part = batch(Case(name="", routing=SKEWED), 0, dist.get_rank())
    return layer, part.tokens_sH[:, None].clone().requires_grad_()


def _gradients(layer: Any, hidden: Tensor) -> list[Tensor]:
    fc1, fc2 = expert_parameters(layer)
    grads = [hidden.grad, *(p.grad for p in (*fc1, *fc2))]
    layer.zero_grad()
    hidden.grad = None
    return grads


def _checkpointed(form: str, reentrant: bool) -> bool:
    def block(hidden: Tensor) -> Tensor:
        once = hidden + layer(hidden)[0]
        return once + layer(once)[0] if form == "two layers" else once

    with strict() as calls:
        layer, hidden = _layer()
        run = (lambda h: layer(h)[0]) if form == "layer" else block
        run(hidden).sum().backward()
        plain = _gradients(layer, hidden)
        kept = calls.count("keep")
        for _ in range(2):
            checkpoint(run, hidden, use_reentrant=reentrant).sum().backward()
            again = _gradients(layer, hidden)
            assert all(map(torch.equal, plain, again))
        return calls.count("keep") == (kept * 3 if reentrant else kept * 5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["layer", "block", "two layers"])
def test_checkpoints(form: str, reentrant: bool) -> None:
    """Torch's two kinds; neither may recompute between what it lends and its return."""
    assert all(run_ranks(2, _checkpointed, form, reentrant))


def _frozen_input() -> None:
    with strict() as calls:
        layer, hidden = _layer()
        layer(hidden)[0].sum().backward()
        expected = _gradients(layer, hidden)[1:]
        for probs in layer.router.probs:
            probs.requires_grad_(False)
        for _ in range(2):
            calls.clear()
            layer(hidden.detach())[0].sum().backward()
            assert all(map(torch.equal, expected, _gradients(layer, hidden)[1:]))
            assert calls.count("pre-sum") == calls.count("gather") == 1


def test_experts_behind_frozen_layers() -> None:
    """No gradient goes further back, so no pre-sum waits for a gather."""
    run_ranks(2, _frozen_input)


def _expert_gradients_only() -> None:
    with strict():
        layer, hidden = _layer()
        layer(hidden)[0].sum().backward()
        expected = _gradients(layer, hidden)[1:]
        fc1, fc2 = expert_parameters(layer)
        for _ in range(2):
            found = torch.autograd.grad(layer(hidden)[0].sum(), [*fc1, *fc2])
            assert all(map(torch.equal, expected, found))


def test_gradients_of_experts_alone() -> None:
    """``autograd.grad`` prunes the backward of the dispatch."""
    run_ranks(2, _expert_gradients_only)


def _redispatched() -> None:
    with strict() as calls:
        layer, hidden = _layer()
        layer(hidden)[0].sum().backward()
        expected = _gradients(layer, hidden)
        object.__setattr__(layer.moonep, "redispatch", True)
        for _ in range(2):
            calls.clear()
            layer(hidden)[0].sum().backward()
            assert all(map(torch.equal, expected, _gradients(layer, hidden)))
            assert calls.count("dispatch") == 3


def test_dispatched_again_in_backward() -> None:
    run_ranks(2, _redispatched)


def _evaluated() -> None:
    with strict() as calls:
        layer, hidden = _layer()
        with torch.no_grad():
            layer(hidden)
        assert "keep" not in calls


def test_evaluation_keeps_nothing() -> None:
    run_ranks(2, _evaluated)


def _half_frozen() -> None:
    with strict() as calls:
        layer, hidden = _layer()
        fc1, fc2 = expert_parameters(layer)
        for parameter in fc1:
            parameter.requires_grad_(False)
        buffer = torch.zeros(len(fc2), *fc2[0].shape, dtype=torch.bfloat16)
        for parameter, place in zip(reversed(fc2), buffer, strict=True):
            parameter.main_grad, parameter.grad_added_to_main_grad = place, False
        layer(hidden)[0].sum().backward()
        assert "pull" in calls


def test_one_projection_frozen_and_narrow_main_grads() -> None:
    """One kernel adds to the gradients of both projections, so they have one dtype."""
    run_ranks(2, _half_frozen)


def _differentiated_twice() -> None:
    layer, hidden = _layer()
    (grad,) = torch.autograd.grad(layer(hidden)[0].pow(2).sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_second_derivatives_are_refused() -> None:
    run_ranks(2, _differentiated_twice)


def test_what_was_cut_off_is_named() -> None:
    from moonep_megatron.backends.turns import Turns

    turns, memory = Turns(), object()
    turns.begin("dispatch", memory, 3)
    turns.begin("dispatch", object(), 3)
    with pytest.raises(RuntimeError, match="layer 3 failed or was cut off after its dispatch"):
        turns.begin("dispatch", memory, 4)
    turns.end("dispatch", memory)
    turns.begin("dispatch", memory, 4)
