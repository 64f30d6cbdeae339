"""What users do to expert weights between passes: freeze, evaluate first, replace, move, wrap."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from moe import build, expert_parameters, gradient, wrap
from ranks import run_ranks
from torch import nn

HOT = Case(name="", routing=("hot_rank",))


def _pass(layer: nn.Module, model: nn.Module, case: Case = HOT) -> torch.Tensor:
    """One forward and backward; the output."""
    part = batch(case, 0, dist.get_rank())
    output = model(part.tokens_sH[:, None].clone().requires_grad_())[0]
    output.backward(part.grad_sH[:, None])
    return output.detach()


def _freeze(parameters: list[nn.Parameter], which: str) -> None:
    for i, parameter in enumerate(parameters):
        parameter.requires_grad_(not (which == "all" or i == 1))


def _frozen(grads: str, when: str, which: str) -> list[SimpleNamespace]:
    """Gradients of alltoall and of moonep when experts are frozen before or after wrapping."""
    case, answers = Case(name="", routing=("hot_rank",), grads=grads), []
    for dispatcher in ("alltoall", "moonep"):
        layer = build(case, dispatcher)
        parameters = [p for projection in expert_parameters(layer) for p in projection]
        halves = expert_parameters(layer)
        if when == "before":
            for half in halves:
                _freeze(half, which)
        model = wrap(layer, case)
        if when == "after":
            for half in halves:
                _freeze(half, which)
        output = _pass(layer, model, case)
        kept = [getattr(p, "main_grad", p.grad) for p in parameters]
        answers.append(
            SimpleNamespace(output=output, grads=[None if g is None else g.clone() for g in kept])
        )
    return answers


@pytest.mark.parametrize("when, which", [("after", "all"), ("after", "one"), ("before", "one")])
def test_frozen_experts_get_no_gradient(when: str, which: str) -> None:
    """Staged freezing: frozen experts stay as under alltoall, the others get their whole share."""
    for grads in ("fused", "main_grad"):
        trained = False
        for theirs, ours in run_ranks(2, _frozen, grads, when, which):
            torch.testing.assert_close(ours.output, theirs.output)
            for mine, expected in zip(ours.grads, theirs.grads, strict=True):
                assert (mine is None) == (expected is None)
                if mine is not None:
                    trained |= bool(expected.abs().sum() > 0)
                    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
        assert trained == (which == "one")


def _evaluate_first() -> dict[str, Any]:
    layer = build(HOT, "moonep")
    with torch.inference_mode():
        layer.eval()
        first = layer(batch(HOT, 0, dist.get_rank()).tokens_sH[:, None])[0]
    layer.train()
    parameters = [p for projection in expert_parameters(layer) for p in projection]
    output = _pass(layer, layer)
    return {
        "same": torch.equal(first, output),
        "ordinary": not any(p.is_inference() for p in parameters),
        "trained": all(p.grad is not None for p in parameters),
    }


def test_evaluation_before_the_first_step() -> None:
    """A first pass in inference mode leaves nothing that cannot be trained with."""
    for answer in run_ranks(2, _evaluate_first):
        assert answer == {"same": True, "ordinary": True, "trained": True}


def _replace_weights(how: str) -> list[torch.Tensor]:
    """Outputs after all expert weights were doubled, of alltoall and moonep."""
    outputs = []
    for dispatcher in ("alltoall", "moonep"):
        layer = build(HOT, dispatcher)
        _pass(layer, layer)
        doubled = [p.detach() * 2 for p in layer.experts.parameters()]
        if how == "assign":
            state = {k: v * 2 for k, v in layer.state_dict().items() if torch.is_tensor(v)}
            layer.load_state_dict(state, assign=True, strict=False)
        elif how == "to_empty":
            layer.experts.to("meta").to_empty(device="cpu")
        else:
            layer.experts.double().float()
        with torch.no_grad():
            for parameter, value in zip(layer.experts.parameters(), doubled, strict=True):
                parameter.copy_(value)
        outputs.append(_pass(layer, layer))
    return outputs


@pytest.mark.parametrize("how", ["assign", "to_empty", "cast"])
def test_replaced_weights_are_seen(how: str) -> None:
    """Never a stale weight: new parameter objects or new memory are found at the next pass."""
    for theirs, ours in run_ranks(2, _replace_weights, how):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _released() -> bool:
    """Whether a pass leaves nothing that keeps old weights alive once the model lets them go."""
    layer = build(HOT, "moonep")
    _pass(layer, layer)
    pointer = expert_parameters(layer)[0][0].untyped_storage().data_ptr()
    layer.zero_grad()
    layer.double()
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu"]
    # The same address may serve again, but then for the new dtype.
    return not any(
        t.dtype == torch.float32 and t.untyped_storage().data_ptr() == pointer for t in tensors
    )


def test_old_weights_are_released() -> None:
    assert all(run_ranks(2, _released))


def _subclassed(kind: str) -> str:
    layer = build(HOT, "moonep")
    module = layer.experts if kind == "experts" else layer.experts.local_experts[0]
    module.__class__ = type("Custom" + type(module).__name__, (type(module),), {})
    with pytest.raises(TypeError) as refused:
        layer(batch(HOT, 0, dist.get_rank()).tokens_sH[:, None])
    return str(refused.value)


@pytest.mark.parametrize("kind, name", [("experts", "CustomSequentialMLP"), ("mlp", "CustomMLP")])
def test_expert_modules_with_a_forward_of_their_own_are_refused(kind: str, name: str) -> None:
    for message in run_ranks(2, _subclassed, kind):
        assert name in message
        assert "alltoall" in message


def _no_tokens_at_first() -> torch.Tensor:
    """No rank has a token in the first pass, and the most tokens are not configured."""
    case = Case(name="", routing=("hot_rank",), moonep=(("max_tokens", None),))
    layer = build(case, "moonep")
    part = batch(case, 0, dist.get_rank())
    router, full = layer.router, (layer.router.probs, layer.router.maps)
    router.probs = [p[:0] for p in full[0]]
    router.maps = [m[:0] for m in full[1]]
    assert layer(part.tokens_sH[:0, None])[0].shape[0] == 0
    router.probs, router.maps = full
    return gradient_of(layer, case)


def gradient_of(layer: nn.Module, case: Case) -> torch.Tensor:
    _pass(layer, layer, case)
    return torch.stack([gradient(p) for p in expert_parameters(layer)[0]])


def _with_tokens() -> torch.Tensor:
    return gradient_of(build(HOT, "moonep"), HOT)


def test_no_tokens_anywhere_at_first() -> None:
    """The capacity is agreed when there is something to agree on."""
    for late, plain in zip(
        run_ranks(2, _no_tokens_at_first), run_ranks(2, _with_tokens), strict=True
    ):
        assert torch.equal(late, plain)


def _checked_recompute() -> bool:
    """Debug comparison of plans: evaluations and torch's own checkpoints are no mistakes."""
    from torch.utils.checkpoint import checkpoint

    case = Case(name="", routing=("hot_rank",), moonep=(("check_plan", True),))
    layer = build(case, "moonep")
    part = batch(case, 0, dist.get_rank())
    hidden = part.tokens_sH[:, None].clone().requires_grad_()
    layer.eval()
    with torch.no_grad():
        layer(hidden)
    layer.train()
    for reentrant in (False, True):
        checkpoint(layer, hidden, use_reentrant=reentrant)[0].sum().backward()
    return layer.checkpointed_plans.total() == 0


def test_check_plan_raises_for_nothing_else() -> None:
    assert all(run_ranks(2, _checked_recompute))


def _other_plan_in_recompute() -> str:
    from torch.utils.checkpoint import checkpoint

    case = Case(name="", routing=("hot_rank", "last_rank"), moonep=(("check_plan", True),))
    layer = build(case, "moonep")
    hidden = batch(case, 0, dist.get_rank()).tokens_sH[:, None].clone().requires_grad_()
    output = checkpoint(layer, hidden, use_reentrant=True)[0]
    layer.router.microbatch = 1
    with pytest.raises(RuntimeError) as found:
        output.sum().backward()
    return str(found.value)


def test_check_plan_finds_another_routing_in_recompute() -> None:
    for message in run_ranks(2, _other_plan_in_recompute):
        assert "--moe-moonep-check-plan" in message
