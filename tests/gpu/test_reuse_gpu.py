"""Duplicates kept between microbatches by the symmetric backend: right, never stale, not pushed."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from layer_ranks import GPU, check, layer_case, ranks, run_poisoned
from moe import build, expert_parameters, run_layer
from test_gradients import DISTRIBUTED

pytestmark = pytest.mark.timeout(900)

REUSE = ("reuse", True)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_layers_against_the_dense_reference(size: int) -> None:
    """Three microbatches in flight whose plans differ, every place of gradients, several waves."""
    check(
        [
            layer_case(
                f"{grads} {form} B={slots} slack {slack}",
                size,
                routing=("zipf", "hot_rank", "zipf"),
                grads=grads,
                form=form,
                ddp=ddp,
                moonep=(REUSE, ("slots", slots), ("slack", slack), ("check_plan", True)),
            )
            for grads, form, ddp, slots, slack in (
                ("plain", "sequential", (), 4, 0.0),
                ("main_grad", "grouped", (), 2, 0.25),
                ("fused", "single", DISTRIBUTED[:-1], 1, 0.0),
                ("fused", "sequential", (), 4, 0.25),
            )
        ]
    )


@pytest.mark.skipif(not GPU, reason="the collective backend prefers other plans then")
@pytest.mark.parametrize("slots", [4, 1])
def test_the_same_bits_as_without(slots: int) -> None:
    """Ranks together and apart: where experts stand in the slots changes no sum."""
    case = layer_case("", 4, routing=("zipf", "hot_rank", "zipf"), moonep=(("slots", slots),))
    kept = dataclasses.replace(case, name="kept", moonep=(*case.moonep, REUSE))
    plain = ranks(4).call(run_poisoned, case, "moonep")
    for delay in (0.0, 0.02):
        assert_same_bits(plain, ranks(4).call(run_poisoned, kept, "moonep", delay))


def _moved(layer: Any) -> list[int]:
    """Copies moved by each push from now on: those sent, or on the collective backend received."""
    backend, moved = layer.token_dispatcher.backend, []
    push = backend.push_weights

    def counted(*args: Any, **options: Any) -> None:
        before = len(marked)
        push(*args, **options)
        if GPU:
            torch.cuda.synchronize()
            marked.extend([0] * int(layer.kept_slots.pushed.kept.missing[-2:].sum()))
        moved.append(len(marked) - before)

    marked: list[int] = []
    if not GPU:
        mark = backend.residents.mark
        backend.residents.mark = lambda *args: marked.append(0) or mark(*args)
    backend.push_weights = counted
    return moved


def _changes() -> list[SimpleNamespace]:
    """Passes of one microbatch after every kind of change, beside a layer without reuse."""
    case = layer_case("", 2, routing=("hot_rank",))
    layers = []
    for reuse in (True, False):
        settings = (*case.moonep, ("reuse", reuse))
        one = dataclasses.replace(case, moonep=settings)
        layers.append((build(one, "moonep"), one))
    optimizers = [torch.optim.SGD(layer.experts.parameters(), lr=0.5) for layer, _ in layers]

    def run() -> list[Any]:
        return [run_layer(layer, layer, one, "moonep") for layer, one in layers]

    def step() -> None:
        for (layer, _), optimizer in zip(layers, optimizers, strict=True):
            for weight in layer.experts.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.zero_grad()

    def load() -> None:
        for layer, _ in layers:
            state = layer.experts.state_dict()
            state = {n: v if v is None else 2 * v for n, v in state.items()}
            layer.experts.load_state_dict(state)

    def write() -> None:
        for layer, _ in layers:
            with torch.no_grad():
                expert_parameters(layer)[0][0].mul_(3)

    run()
    moved, found = _moved(layers[0][0]), []
    for change in (lambda: None, step, load, write):
        run()
        del moved[:]
        run()
        before = sum(moved)
        del moved[:]
        change()
        answers = run()
        found.append(SimpleNamespace(answers=answers, before=before, after=sum(moved)))
    return found


def test_stale_copies_are_never_used() -> None:
    nothing, *changes = zip(*ranks(2).call(_changes), strict=True)
    assert [sum(one.before + one.after for one in nothing)] == [0], "pushed for nothing"
    for change in changes:
        assert sum(one.before for one in change) == 0
        assert sum(one.after for one in change) > 0, "nothing was pushed after a change"
        for one in change:
            kept, plain = one.answers
            if GPU:
                assert_same_bits([kept], [plain])


def test_a_capture_is_refused() -> None:
    if not GPU:
        pytest.skip("captures need a GPU")
    for message in ranks(2).call(_captured):
        assert "--moe-moonep-reuse" in message


def _captured() -> str:
    case = layer_case("", 2, routing=("hot_rank",), moonep=(REUSE,))
    layer = build(case, "moonep")
    run_layer(layer, layer, case, "moonep")
    backend, slots = layer.token_dispatcher.backend, layer.kept_slots
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            backend.push_weights(None, 0, {}, slots)
    except RuntimeError as error:
        return str(error)
    return "captured"
