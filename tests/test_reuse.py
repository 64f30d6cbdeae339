"""Copies kept between microbatches: plans that prefer them, tags that decide, whole layers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from compare import check
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe import build, expert_parameters
from ranks import run_ranks
from routings import LOADS, lenient, random_counts

from moonep_megatron.plan import Plan, make_plan
from moonep_megatron.reuse import Held
from moonep_megatron.rules import PLANNERS

# Plans ------------------------------------------------------------------------------------------


def slots_after(plan: Plan, slots: int) -> list[list[int]]:
    """What slots hold after a pass of one wave."""
    return plan.foreign_expert_Rn[:, :slots].tolist()


def pairs_of(plan: Plan) -> list[tuple[int, int]]:
    homes = plan.foreign_expert_Rn.shape[1]
    return [
        (max(foreign) // homes, receiver)
        for receiver, foreign in enumerate(plan.foreign_expert_Rn.tolist())
        if max(foreign) >= 0
    ]


def check_kept(plan: Plan, plain: Plan, counts: torch.Tensor, held: Held, slots: int) -> None:
    """As good a balance as without, no busier, and what is held stays where it is."""
    ranks, experts = counts.shape
    homes = experts // ranks
    assert torch.equal(plan.rows_RE.sum(0), counts.sum(0).int())
    assert torch.equal(plan.rows_RE.sum(1), plan.cap_R) and torch.equal(plan.cap_R, plain.cap_R)
    assert (plan.waves(slots), plan.busiest) <= (plain.waves(slots), plain.busiest)
    for d in range(ranks):
        foreign = plan.foreign_expert_Rn[d].tolist()
        wanted = [e for e in foreign if e >= 0]
        computed = [e for e in range(experts) if plan.rows_RE[d, e] and e // homes != d]
        assert sorted(wanted) == computed and len({e // homes for e in wanted}) <= 1
        sizes = [int(plan.rows_RE[d, e]) if e >= 0 else 0 for e in plan.group_expert_RG[d].tolist()]
        assert plan.group_start_RG1[d].diff().tolist() == sizes
        if len(wanted) > slots:
            assert foreign == wanted + [-1] * (homes - len(wanted))
            continue
        assert all(e < 0 for e in foreign[slots:]), "one wave"
        for slot, expert in enumerate(held.experts[d]):
            if expert in wanted and expert not in held.experts[d][:slot]:
                assert foreign[slot] == expert, "a held copy does not move"


def fresh(plan: Plan, held: Held) -> int:
    return sum(
        e >= 0 and e not in held.experts[d]
        for d, foreign in enumerate(plan.foreign_expert_Rn.tolist())
        for e in foreign
    )


@settings(lenient, max_examples=40)
@given(
    ranks=st.integers(1, 16),
    homes=st.integers(1, 8),
    load=st.sampled_from(LOADS),
    rows=st.sampled_from([0, 5, 300, 9000]),
    slots=st.integers(1, 8),
    planner=st.sampled_from(PLANNERS),
    seed=st.integers(0, 999),
)
@example(ranks=8, homes=8, load="zipf", rows=9000, slots=8, planner="best", seed=1)
def test_plans_that_prefer_what_is_held(
    ranks: int, homes: int, load: str, rows: int, slots: int, planner: str, seed: int
) -> None:
    """Three microbatches of one layer, then one for which the weights have changed."""
    slots = min(slots, homes)
    held = Held([[-1] * slots] * ranks)
    for step in range(3):
        counts = random_counts(load, ranks, ranks * homes, rows, seed)
        counts += random_counts("even", ranks, ranks * homes, rows // 4, seed + step)
        options = {"planner": planner, "slots": slots}
        plain, plan = make_plan(counts, **options), make_plan(counts, held=held, **options)
        check_kept(plan, plain, counts, held, slots)
        if plan.busiest == plain.busiest:
            assert fresh(plan, held) <= fresh(plain, held)
        nothing = Held([[-1] * slots] * ranks)
        assert torch.equal(make_plan(counts, held=nothing, **options).rows_RE, plain.rows_RE)
        if plan.waves(slots) <= 1:
            held = Held(slots_after(plan, slots), pairs_of(plan))


def test_the_same_counts_again_need_no_push() -> None:
    for load in LOADS:
        counts = random_counts(load, 8, 64, 9000, 3)
        first = make_plan(counts)
        held = Held(slots_after(first, 8), pairs_of(first))
        again = make_plan(counts, held=held)
        assert fresh(again, held) == 0 and torch.equal(again.rows_RE, first.rows_RE)


def test_the_pairs_of_before_carry_other_rows() -> None:
    """Rank 0 gave to 1, which gave to 2; then 1 has no room for so much, or the flow turns."""
    held = Held([[-1]] * 3, [(0, 1), (1, 2)])
    assert sorted(held.again([[16], [9], [5]], [10] * 3) or ()) == [(0, 1, 6), (1, 2, 5)]
    assert held.again([[10], [15], [5]], [10] * 3) == [(1, 2, 5)]
    assert held.again([[30], [0], [0]], [10] * 3) is None, "20 rows do not fit into rank 1"
    assert held.again([[5], [16], [9]], [10] * 3) is None, "rank 0 lacks rows"
    assert Held([], [(0, 1)]).again([[16], [9], [5]], [10] * 3) is None, "nobody gives to rank 2"
    assert Held([], [(0, 1), (1, 0)]).again([[10], [10], [10]], [10] * 3) is None, "a ring"


def test_held_experts_are_taken_where_no_more_are_needed() -> None:
    # 9 rows: the largest two are 8 and 4; held is the one of 3, which with 8 is enough
    homes, transfers = [[8, 4, 3, 1], [0] * 4], [(0, 1, 9)]
    assert Held([[-1], [2]]).pieces(homes, transfers) == [(1, 0, 0, 8), (1, 0, 2, 1)]
    # held alone would take a third
    assert Held([[-1], [3]]).pieces(homes, transfers) == [(1, 0, 0, 8), (1, 0, 3, 1)]
    assert Held([[-1], [1, 2]]).pieces(homes, [(0, 1, 8)]) == [(1, 0, 0, 8)]


# Layers -----------------------------------------------------------------------------------------

REUSE = (("reuse", True), ("check_plan", True))


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_against_the_dense_reference(ranks: int) -> None:
    """Three microbatches in flight whose plans differ, every place of gradients, several waves."""
    check(
        [
            Case(
                name=f"R={ranks} {grads} B={slots} slack {slack}",
                ranks=ranks,
                experts=4 * ranks,
                routing=("zipf", "hot_rank", "zipf"),
                grads=grads,
                moonep=(*REUSE, ("slots", slots), ("slack", slack)),
            )
            for grads, slots, slack in (
                ("plain", 4, 0.0),
                ("main_grad", 2, 0.25),
                ("fused", 1, 0.0),
                ("fused", 4, 0.25),
            )
        ]
    )


CASE = Case(
    name="",
    experts=8,
    routing=("hot_rank", "zipf"),
    dtype=torch.float64,
    probs_dtype=torch.float64,
)


def _layer(reuse: bool) -> Any:
    return build(dataclasses.replace(CASE, moonep=(("reuse", reuse),)), "moonep")


def _pass(layer: Any, microbatch: int = 0) -> list[torch.Tensor]:
    """Output and gradients of a microbatch: of its tokens and of this rank's weights."""
    part = batch(CASE, microbatch, dist.get_rank())
    layer.router.microbatch = microbatch
    hidden = part.tokens_sH[:, None].clone().requires_grad_()
    output = layer(hidden)[0]
    output.backward(part.grad_sH[:, None])
    weights = [p for fc in expert_parameters(layer) for p in fc]
    grads = [hidden.grad, *(p.grad.clone() for p in weights)]
    layer.zero_grad()
    return [output.detach(), *grads]


def _pushed(layer: Any) -> list[tuple[int, int]]:
    """(slot, projection) of every copy that this rank receives from now on."""
    found: list[tuple[int, int]] = []
    residents = layer.token_dispatcher.backend.residents
    mark = residents.mark
    residents.mark = lambda slot, projection, tag: (
        found.append((slot, projection)) or mark(slot, projection, tag)
    )
    return found


def _step(layer: Any, plain: Any, fused: bool) -> None:
    for one in (layer, plain):
        weights = [p for fc in expert_parameters(one) for p in fc]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(weights, lr=0.1, foreach=fused).step()
        one.zero_grad()


def _load(layer: Any, plain: Any) -> None:
    saved = plain.experts.state_dict().items()
    state = {name: value if value is None else 2 * value for name, value in saved}
    for one in (layer, plain):
        one.experts.load_state_dict(state)


def _write(layer: Any, plain: Any) -> None:
    for one in (layer, plain):
        with torch.no_grad():
            expert_parameters(one)[0][0].mul_(3)


def _write_data(layer: Any, plain: Any) -> None:
    from moonep_megatron import weights

    for one in (layer, plain):
        expert_parameters(one)[1][-1].data.mul_(3)
    weights.weights_changed()


def _move(layer: Any, plain: Any) -> None:
    for one in (layer, plain):
        for weight in [p for fc in expert_parameters(one) for p in fc]:
            weight.data = 0.5 * weight.data


CHANGES = {
    "a step": lambda *layers: _step(*layers, fused=False),
    "a step of a foreach optimizer": lambda *layers: _step(*layers, fused=True),
    "a state dict": _load,
    "a write": _write,
    "a write that is said": _write_data,
    "weights that moved": _move,
}


def _changes() -> list[SimpleNamespace]:
    """Every change in turn, on layers with and without reuse that hold the same weights."""
    layer, plain = (_layer(reuse) for reuse in (True, False))
    first = _pass(layer), _pass(plain)
    pushed = _pushed(layer)
    answers = [SimpleNamespace(name="first", results=first, pushed=(0, 0))]
    for name, change in CHANGES.items():
        _pass(layer), _pass(layer)
        del pushed[:]
        _pass(layer)
        before = len(pushed)
        change(layer, plain)
        results = _pass(layer), _pass(plain)
        answers.append(SimpleNamespace(name=name, results=results, pushed=(before, len(pushed))))
    # The same with a version that never changes: what was pushed before is used.
    layer.token_dispatcher.backend.residents._version = lambda: 0
    _pass(layer)
    _step(layer, plain, fused=False)
    results = _pass(layer), _pass(plain)
    answers.append(SimpleNamespace(name="frozen", results=results, pushed=(0, 0)))
    return answers


def _far(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(
        float((a - b).norm() / b.norm().clamp(min=1e-300)) for a, b in zip(one, other, strict=True)
    )


def test_stale_copies_are_never_used() -> None:
    ranks = run_ranks(2, _changes)
    for answers in zip(*ranks, strict=True):
        name = answers[0].name
        far = max(_far(*answer.results) for answer in answers)
        if name == "frozen":
            assert far > 1e-3, "the comparison would see a stale copy"
            continue
        assert far < 1e-13, f"{name}: {far}"
        if name != "first":
            assert [answer.pushed[0] for answer in answers] == [0, 0], f"{name}: pushed for nothing"
            assert sum(answer.pushed[1] for answer in answers) > 0, f"{name}: nothing pushed"


def _written_by_a_step() -> tuple[float, float]:
    """Distances after a step that writes as Megatron's optimizers do: where no counter sees it."""

    class Writes(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data.mul_(2)

    layers = [_layer(reuse) for reuse in (True, False)]
    weights = [p for layer in layers for fc in expert_parameters(layer) for p in fc]
    versions = [weight._version for weight in weights]
    _pass(layers[0])
    Writes(weights, lr=1.0).step()
    assert [weight._version for weight in weights] == versions
    return _far(*(_pass(layer) for layer in layers)), _far(*(_pass(layer) for layer in layers))


def test_steps_are_seen_where_nothing_else_tells() -> None:
    for distances in run_ranks(2, _written_by_a_step):
        assert max(distances) < 1e-13


def _two_layers() -> tuple[float, int, list[list[int]]]:
    layers = [_layer(reuse) for reuse in (True, True, False, False)]
    for i, layer in enumerate(layers):
        layer.token_dispatcher.backend.layer = layer.layer_number = 1 + i % 2
        with torch.no_grad():
            for weight in [p for fc in expert_parameters(layer) for p in fc]:
                weight.mul_(1 + i % 2)
    far = 0.0
    for microbatch in (0, 1, 0, 1):
        results = [_pass(layer, microbatch) for layer in layers]
        far = max(far, _far(results[0], results[2]), _far(results[1], results[3]))
    one, two = (layer.kept_slots for layer in layers[:2])
    shared = one.grad1.data_ptr() == two.grad1.data_ptr()
    own = one.fc1.data_ptr() != two.fc1.data_ptr()
    tags = [slots.tags[:, 0, 0].unique().tolist() for slots in (one, two)]
    return far, shared and own, tags


def test_layers_keep_apart_what_they_hold() -> None:
    """Two layers with other weights, in turn: own slots, shared gradients, tags of their own."""
    answers = run_ranks(2, _two_layers)
    for far, apart, _ in answers:
        assert far < 1e-13 and apart
    held = [set().union(*(tags[i] for *_, tags in answers)) - {-1} for i in (0, 1)]
    assert held == [{1}, {2}]


def _pushes(reuse: bool) -> int:
    """Copies received over four microbatches of two kinds, forward and backward, then a step."""
    layer = _layer(reuse)
    count = 0
    backend = layer.token_dispatcher.backend
    receive = backend._receive

    def counted(*args: Any) -> Any:
        nonlocal count
        count += pushing
        return receive(*args)

    push, pushing = backend.push_weights, False

    def pushes(*args: Any, **options: Any) -> None:
        nonlocal pushing
        pushing = True
        push(*args, **options)
        pushing = False

    backend._receive, backend.push_weights = counted, pushes
    for microbatch in (0, 1, 0, 1):
        _pass(layer, microbatch)
    return count


def test_fewer_copies_travel() -> None:
    with_reuse, without = (sum(run_ranks(2, _pushes, reuse)) for reuse in (True, False))
    # Backward needs none of its own, and the second half of the microbatches none at all.
    assert 0 < 4 * with_reuse <= without
