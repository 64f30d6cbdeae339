"""The MoE layer under moonep against the dense reference, and no worse than Megatron's alltoall.

Every case checks outputs, input and probability gradients, every expert's weight gradients, and
that each rank computed exactly its share of rows. Cases of one world size share one start.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from compare import assert_same_bits, check
from moe import build, run_case, run_layer
from ranks import run_ranks
from reference import Expert
from torch import Tensor

SKEWS = ("hot_expert", "hot_rank", "last_rank", "two_thirds_idle", "uniform", "zipf")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_skew(ranks: int) -> None:
    """Two microbatches in flight, of different skews, share the duplicate slots."""
    check(
        [
            Case(name=skew, ranks=ranks, experts=4 * ranks, routing=(skew, SKEWS[i - 1]), seed=i)
            for i, skew in enumerate(SKEWS)
        ]
    )


def test_every_ep_size() -> None:
    """With E = R and E = 3R; at R = 1 nothing travels."""
    check(
        [
            Case(
                name=f"R={ranks} E={n * ranks}",
                ranks=ranks,
                experts=n * ranks,
                topk=min(2, n * ranks),
                routing=("zipf",),
            )
            for ranks in range(1, 9)
            for n in (1, 3)
        ]
    )


@pytest.mark.parametrize("topk", [1, 2, 8])
def test_choices_experts_and_slots(topk: int) -> None:
    """K against E = R and E >> R, with 1, 2 and E/R slots; planners take turns."""
    cases = []
    for ranks, experts in ((4, 8 if topk == 8 else 4), (4, 32), (8, 8), (8, 64)):
        n = experts // ranks
        for i, slots in enumerate(sorted({1, min(2, n), n})):
            skew = SKEWS[(i + ranks + experts + topk) % len(SKEWS)]
            planner = ("best", "pairs", "chain", "peel")[len(cases) % 4]
            cases.append(
                Case(
                    name=f"R={ranks} E={experts} K={topk} B={slots} {skew} {planner}",
                    ranks=ranks,
                    experts=experts,
                    topk=topk,
                    tokens=((9,) * ranks,),
                    routing=(skew,),
                    hidden=8,
                    ffn=8,
                    moonep=(("slots", slots), ("planner", planner), ("check_plan", True)),
                )
            )
    check(cases)


def test_waves_of_few_slots() -> None:
    """Fewer slots than foreign experts: the passes run several waves, and nothing is lost."""
    base = Case(name="waves", ranks=3, experts=24, routing=("hot_rank", "last_rank"))
    cases = [
        dataclasses.replace(base, name=f"B={slots}", moonep=(("slots", slots),))
        for slots in (1, 2, 3, 8)
    ]
    check(cases)
    waves = run_ranks(3, _waves, cases)[0]
    assert waves[0] > 1, "the case is too mild to need more than one wave"
    assert waves[-1] == 1


def _waves(cases: list[Case]) -> list[int]:
    return [max(r["waves"] for r in run_case(case, "moonep").records) for case in cases]


def test_odd_s() -> None:
    check(
        [
            Case(name=f"s={s}", ranks=3, experts=6, tokens=((s,) * 3,), routing=("zipf",))
            for s in (1, 3, 5, 7, 129)
        ]
    )


def _two_passes(*tokens: tuple[int, ...]) -> list[Case]:
    return [
        Case(name=str(s), ranks=3, experts=6, tokens=(s, s[::-1]), routing=("hot_rank", "uniform"))
        for s in tokens
    ]


def test_s0_rank() -> None:
    """Ranks without tokens join every exchange, in both passes."""
    check(_two_passes((0, 9, 4), (9, 0, 9), (7, 3, 0), (0, 0, 5)), timeout=60)


def test_s0_all_ranks() -> None:
    """Nobody has a token, and then, in the same layer, somebody has."""
    check(_two_passes((0, 0, 0)), timeout=60)
    tokens = ((0, 0, 0), (4, 0, 9), (0, 0, 0))
    routing = ("hot_rank",) * 3
    check([Case(name="then some", ranks=3, experts=6, tokens=tokens, routing=routing)], timeout=60)


def test_zero_tokens_for_home() -> None:
    """All tokens go to one home of eight; idle experts get a gradient, and it is exactly 0."""
    check(
        [
            Case(name=f"{skew}, K={topk}", ranks=8, experts=16, topk=topk, routing=(skew,))
            for skew, topk in (("hot_rank", 2), ("last_rank", 1), ("hot_expert", 1))
        ]
    )


def test_ragged_rank_s() -> None:
    """Many steps of one layer with changing token counts; S is fixed at start."""
    g = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 20, (100, 3), generator=g).tolist()
    counts[7], counts[8] = [19, 0, 0], [0, 0, 0]
    tokens = tuple(tuple(row) for row in counts)
    routing = tuple(SKEWS[i % len(SKEWS)] for i in range(len(tokens)))
    check([Case(name="ragged", ranks=3, experts=6, tokens=tokens, routing=routing)])


def test_first_small_then_large() -> None:
    """The first microbatch does not size anything; ``max_tokens`` does."""
    tokens = ((2, 2), (40, 31), (1, 40))
    check([Case(name="growing", tokens=tokens, routing=("uniform", "hot_rank", "zipf"))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtype_matrix(dtype: torch.dtype) -> None:
    check(
        [
            Case(
                name=f"{dtype} {probs}",
                dtype=dtype,
                probs_dtype=probs,
                topk=topk,
                hidden=32,
                ffn=32,
                routing=("hot_expert", "uniform"),
                tokens=((64, 64),) * 2,
            )
            for probs in (torch.float32, torch.bfloat16, torch.float64)
            for topk in (2, 8)
        ]
    )


FORMS = ("sequential", "grouped", "single")
ACTIVATIONS = [
    Expert(),
    Expert(gated=False, activation="gelu"),
    Expert(gated=False, activation="squared_relu"),
    Expert(gated=False, activation="silu"),
    Expert(activation="gelu"),
]


def test_activations_in_every_form_of_weights() -> None:
    check(
        [
            Case(name=f"{expert} {form}", form=form, expert=expert, routing=("hot_rank",))
            for form in FORMS
            for expert in ACTIVATIONS
        ]
    )


def test_biases() -> None:
    """In every form of weights, with few slots, ragged, and in the experts of gpt-oss."""
    gated, plain = Expert(biased=True), Expert(biased=True, gated=False, activation="gelu")
    oss = Expert(biased=True, activation="quick_gelu", clamp=1.5, offset=1.0)
    on_input = Expert(biased=True, probs_on_input=True)
    two = ("hot_rank", "zipf")
    check(
        [
            *(
                Case(name=f"{form} {expert}", form=form, expert=expert, routing=two)
                for form in FORMS
                for expert in (gated, plain)
            ),
            Case(name="gpt-oss", expert=oss, dtype=torch.bfloat16, topk=4, routing=two),
            Case(name="fp64", expert=oss, dtype=torch.float64, routing=two),
            Case(name="probs on input", expert=on_input, topk=1, routing=two),
            Case(
                name="waves and ragged",
                ranks=4,
                experts=16,
                expert=gated,
                tokens=((5, 0, 31, 12), (0, 3, 7, 1)),
                routing=two,
                moonep=(("slots", 1), ("max_tokens", 31)),
            ),
            *(
                Case(name=f"R={ranks}", ranks=ranks, experts=2 * ranks, expert=gated, routing=two)
                for ranks in (1, 8)
            ),
        ]
    )


def test_clamp_offset_and_probabilities_on_the_input() -> None:
    clamped = Expert(activation="quick_gelu", clamp=0.6, offset=1.0)
    on_input = [Expert(probs_on_input=True, gated=gated) for gated in (True, False)]
    check(
        [
            Case(name="clamp and offset", expert=clamped, routing=("hot_expert",)),
            Case(name="clamp alone", expert=Expert(clamp=0.3), routing=("hot_rank",)),
            *(
                Case(
                    name=f"probs on input, {dtype}",
                    expert=expert,
                    topk=1,
                    dtype=dtype,
                    routing=("hot_rank", "zipf"),
                )
                for expert in on_input
                for dtype in (torch.float32, torch.bfloat16)
            ),
        ]
    )


def test_sequence_parallel_ranks_bring_their_own_tokens() -> None:
    """TP=2 with sequence parallelism and expert TP 1: the EP group spans the TP ranks."""
    check(
        [
            Case(
                name=f"EP={ep}",
                ranks=4,
                ep=ep,
                tp=2,
                grads="main_grad",
                routing=("hot_rank", "zipf"),
            )
            for ep in (4, 2)
        ]
    )


def test_the_same_bits_in_other_processes() -> None:
    cases = [
        Case(name=str(dtype), ranks=4, experts=16, topk=4, dtype=dtype, routing=SKEWS[:3])
        for dtype in (torch.float32, torch.bfloat16)
    ]
    first, second = (run_ranks(4, _moonep_results, cases) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)


def _moonep_results(cases: list[Case]) -> list[SimpleNamespace]:
    return [run_case(case, "moonep") for case in cases]


def test_non_contiguous_hidden_states() -> None:
    for strided, plain in run_ranks(2, _strided_and_plain):
        assert torch.equal(strided, plain)


def _strided_and_plain() -> tuple[Tensor, Tensor]:
    case = Case(name="strided", tokens=((24, 24),), routing=("hot_rank",))
    layer = build(case, "moonep")
    hidden = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(3))[..., ::2]
    strided = hidden.transpose(0, 1).requires_grad_()
    plain = strided.detach().contiguous().requires_grad_()
    for x in (strided, plain):
        layer(x)[0].pow(2).sum().backward()
    return strided.grad, plain.grad


def test_backward_always_collective() -> None:
    """A rank whose loss is masked still serves the others' backward, and nobody waits forever."""
    for masked in run_ranks(3, _masked_loss, timeout=30):
        for full, with_mask in masked:
            assert torch.equal(full, with_mask)


def _masked_loss() -> list[tuple[Tensor, Tensor]]:
    """Input gradient with all losses, and with those of one rank masked: equal on the others."""
    case = Case(name="mask", ranks=3, experts=6, routing=("hot_rank",))
    layer = build(case, "moonep")
    rank, pairs = dist.get_rank(), []
    x = torch.randn(24, 1, case.hidden, generator=torch.Generator().manual_seed(rank))
    for quiet in range(3):
        gradients = []
        for masked in (False, True):
            hidden = x.clone().requires_grad_()
            output = layer(hidden)[0]
            (output[:0] if masked and rank == quiet else output).pow(2).sum().backward()
            gradients.append(hidden.grad)
        if rank == quiet:
            assert gradients[1].count_nonzero() == 0
        else:
            pairs.append((gradients[0], gradients[1]))
    return pairs


def test_frozen_inputs_still_give_weight_gradients() -> None:
    """Neither tokens nor probabilities ask for a gradient: the weights' must be the same."""
    for asked, frozen in run_ranks(2, _weight_gradients_when_frozen):
        for a, b in zip(asked, frozen, strict=True):
            assert torch.equal(a, b)


def _weight_gradients_when_frozen() -> tuple[list[Tensor], list[Tensor]]:
    case = Case(name="frozen", routing=("hot_rank",))
    found = []
    for asked in (True, False):
        layer = build(case, "moonep")
        layer.router.probs[0].requires_grad_(asked)
        x = torch.randn(24, 1, case.hidden, generator=torch.Generator().manual_seed(1))
        layer(x.requires_grad_(asked))[0].pow(2).sum().backward()
        found.append([parameter.grad for parameter in layer.experts.parameters()])
    return found[0], found[1]


def test_inference_needs_no_gradients() -> None:
    for with_gradients, without in run_ranks(2, _outputs_with_and_without_gradients):
        assert torch.equal(with_gradients, without)


def _outputs_with_and_without_gradients() -> tuple[Tensor, Tensor]:
    case = Case(name="eval", routing=("hot_rank",))
    layer = build(case, "moonep")
    trained = run_layer(layer, layer, case, "moonep").output[0]
    layer.eval()
    x = torch.randn(24, 1, case.hidden, generator=torch.Generator().manual_seed(1))
    outputs = [layer(x)[0]]
    with torch.no_grad():
        outputs.append(layer(x)[0])
    assert trained.shape == (24, case.hidden)
    return outputs[0].detach(), outputs[1]


def test_static_shapes() -> None:
    """Nothing that the layer keeps for backward has a shape that tells of the routing."""
    for shapes in run_ranks(3, _saved_shapes):
        assert len(shapes[0]) > 3
        assert all(saved == shapes[0] for saved in shapes)


def _saved_shapes() -> list[list[torch.Size]]:
    case = Case(name="shapes", ranks=3, experts=12, routing=SKEWS)
    layer, found = build(case, "moonep"), []
    for m in range(len(SKEWS)):
        layer.router.microbatch = m
        hidden = batch(case, m, dist.get_rank()).tokens_sH[:, None].requires_grad_()
        found.append([])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: found[-1].append(saved.shape) or saved, lambda saved: saved
        ):
            layer(hidden)
    return found
