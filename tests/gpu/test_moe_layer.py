"""The MoE layer on GPUs against the dense reference, and no worse than Megatron's alltoall.

As in the CPU tests, every case checks outputs, input and probability gradients, every expert's
weight gradients, and that each rank computed exactly its share of rows. Before every pass the
memory that passes share has been filled with NaN by another pass.
"""

import dataclasses
import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import Case, device
from compare import assert_near, assert_same_bits
from layer_ranks import GPU, MAX_TOKENS, check, layer_case, ranks, run_poisoned
from moe import build, run_layer
from ranks import Layout
from reference import Expert, error
from test_gradients import DISTRIBUTED, OVERLAP, RECOMPUTE, _train
from torch import Tensor

# A first run compiles every kernel; compiled, the whole file takes a minute or two.
pytestmark = pytest.mark.timeout(900)

SIZES = (1, 2, 4, 8)
SKEWS = ("hot_expert", "hot_rank", "last_rank", "two_thirds_idle", "uniform", "zipf")
TE = GPU and find_spec("transformer_engine") is not None
FORMS = ("sequential", "grouped", "single")
# The collective backend, in whose place these tests can be tried on CPUs, does not know it.
REDISPATCH = (("redispatch", True),) if GPU else ()


@pytest.fixture(scope="module", autouse=True)
def _all_ranks(request: pytest.FixtureRequest) -> None:
    """Start the ranks of all sizes together: loading takes longer than most tests."""
    if request.session.testscollected > 10:
        for size in SIZES:
            ranks(size)


@pytest.mark.parametrize("size", SIZES)
def test_every_skew(size: int) -> None:
    """Two microbatches in flight, of different skews, in every form of weights."""
    check(
        [
            layer_case(
                skew,
                size,
                routing=(skew, SKEWS[i - 1]),
                form=FORMS[i % 3],
                seed=i,
                moonep=REDISPATCH if i % 2 else (),
            )
            for i, skew in enumerate(SKEWS)
        ]
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_choices_experts_and_slots(size: int) -> None:
    """K against E = R and E >> R; B = 1, 2 and E/R, so that passes need one wave or several."""
    cases = []
    for topk in (1, 2, 8):
        for experts in (max(size, topk), 8 * size):
            n = experts // size
            for slots in sorted({1, min(2, n), n}):
                turn = len(cases)
                planner = ("best", "pairs", "chain", "peel")[turn % 4]
                skew = SKEWS[turn % len(SKEWS)]
                cases.append(
                    layer_case(
                        f"R={size} E={experts} K={topk} B={slots} {skew} {planner}",
                        size,
                        experts=experts,
                        topk=topk,
                        form=FORMS[turn % 3],
                        routing=(skew,),
                        moonep=(("slots", slots), ("planner", planner)),
                    )
                )
    check(cases)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_within_a_slack(size: int) -> None:
    """R below, at and above K: receive rows by token, and as many as a rank may compute."""
    check(
        [
            layer_case(
                f"K={topk} slack {slack} {skew}",
                size,
                topk=topk,
                routing=(skew, "zipf"),
                moonep=(("slack", slack), ("check_plan", True)),
            )
            for topk, slack, skew in ((1, 0.25, "zipf"), (2, 0.05, "hot_rank"), (8, 1.0, "uniform"))
        ]
    )


def test_waves_of_few_slots() -> None:
    """More foreign experts than slots: several waves, whose weights and gradients share slots."""
    case = layer_case(
        "waves",
        4,
        experts=32,
        routing=("hot_rank", "last_rank"),
        grads="fused",
        moonep=(("slots", 1),),
    )
    check([case])
    records = ranks(4).call(run_poisoned, case, "moonep")[0].records
    assert max(record["waves"] for record in records) > 1, "the case is too mild for two waves"


@pytest.mark.parametrize("size", [2, 4])
def test_ragged_tokens(size: int) -> None:
    """Ranks without tokens, passes without any, and a small first pass before larger ones."""
    g = torch.Generator().manual_seed(size)
    rows = torch.randint(0, MAX_TOKENS + 1, (12, size), generator=g).tolist()
    rows[0] = [2] * size
    rows[3], rows[4] = [MAX_TOKENS] + [0] * (size - 1), [0] * size
    rows[7] = [0] * (size - 1) + [1]
    check(
        [
            layer_case(
                f"ragged, K={topk}",
                size,
                topk=topk,
                tokens=tuple(map(tuple, rows)),
                routing=tuple(SKEWS[i % len(SKEWS)] for i in range(len(rows))),
            )
            for topk in (2, 8)
        ]
    )


@pytest.mark.parametrize("size", [2, 4])
def test_every_place_of_gradients(size: int) -> None:
    """``.grad``, ``main_grad`` and the fused sum into it, under DDP; two microbatches in flight."""
    check(
        [
            layer_case(
                f"{grads} {form} {dict(ddp)}",
                size,
                routing=("hot_rank", "hot_expert"),
                grads=grads,
                form=form,
                ddp=ddp,
            )
            for grads in ("plain", "main_grad", "fused", "bf16_main_grad")
            for form in FORMS
            for ddp in (((), DISTRIBUTED[:-1]) if grads in ("main_grad", "fused") else ((),))
        ]
    )


@pytest.mark.skipif(not TE, reason="needs Transformer Engine")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_of_transformer_engine(size: int) -> None:
    """TEGroupedMLP itself, whose products alltoall uses; gradients in every place, under DDP."""
    check(
        [
            layer_case(
                f"{grads} {dict(ddp)}",
                size,
                routing=("hot_rank", "hot_expert"),
                grads=grads,
                form="te",
                ddp=ddp,
            )
            for grads, ddp in (("plain", ()), ("main_grad", ()), ("fused", DISTRIBUTED[:-1]))
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    check(
        [
            layer_case(
                f"{dtype}, {probs} probabilities, K={topk}, {grads}",
                4,
                dtype=dtype,
                probs_dtype=probs,
                topk=topk,
                grads=grads,
                routing=("hot_expert", "uniform"),
            )
            for probs in (torch.float32, torch.bfloat16)
            for topk, grads in ((2, "fused"), (8, "plain"))
        ]
    )


def test_activations() -> None:
    experts = [
        Expert(gated=False, activation="gelu"),
        Expert(gated=False, activation="squared_relu"),
        Expert(activation="gelu"),
        Expert(activation="quick_gelu", clamp=0.6, offset=1.0),
    ]
    cases = [layer_case(str(e), 2, expert=e, routing=("hot_rank",)) for e in experts]
    on_input = Expert(probs_on_input=True)
    check([*cases, layer_case(str(on_input), 2, expert=on_input, topk=1, routing=("hot_rank",))])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_biases(size: int) -> None:
    """Behind the last row, which ragged ranks leave open, nothing may reach a gradient."""
    biased = Expert(biased=True)
    oss = Expert(biased=True, activation="quick_gelu", clamp=1.5, offset=1.0)
    two = ("hot_rank", "zipf")
    cases = [
        layer_case("plain", size, expert=biased, routing=two),
        layer_case("gpt-oss", size, expert=oss, topk=4, dtype=torch.bfloat16, routing=two),
        layer_case("main_grad", size, expert=biased, grads="main_grad", ddp=DISTRIBUTED[:-1]),
        layer_case("ragged", size, expert=biased, tokens=((MAX_TOKENS, *range(size - 1)),)),
    ]
    if TE:
        cases.append(layer_case("Transformer Engine", size, expert=biased, form="te", routing=two))
    check(cases)


@pytest.mark.parametrize("size", [2, 8])
def test_a_layer_of_some_size(size: int) -> None:
    check(
        [
            layer_case(
                f"medium, {skew}",
                size,
                experts=16,
                topk=8,
                form="grouped",
                grads="fused",
                routing=(skew,),
                hidden=1024 if GPU else 64,
                ffn=512 if GPU else 64,
                tokens=((512,) * size,),
                moonep=(("max_tokens", 512),),
            )
            for skew in ("zipf", "last_rank")
        ]
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_same_bits_again_and_near_the_collective_backend(size: int) -> None:
    """Twice, with ranks that start together and apart; and what rounding allows from collective."""
    for topk, dtype in ((2, torch.bfloat16), (8, torch.bfloat16), (2, torch.float16)):
        case = layer_case(f"K={topk} {dtype}", size, topk=topk, dtype=dtype, routing=SKEWS[:3])
        settings = dict(case.moonep) | {"backend": "collective"}
        collective = dataclasses.replace(case, moonep=tuple(settings.items()))
        some = ranks(size)
        ours = some.call(run_poisoned, case, "moonep")
        assert_same_bits(ours, some.call(run_poisoned, case, "moonep", 0.02))
        assert_near(
            case,
            ours,
            some.call(run_poisoned, collective, "moonep"),
            some.call(run_poisoned, case, "alltoall"),
        )


def test_recompute_and_redispatch_give_the_same_bits() -> None:
    base = layer_case("", 4, routing=SKEWS[:3], grads="fused")
    settings = tuple((dict(base.moonep) | dict(REDISPATCH)).items())
    again = [
        dataclasses.replace(base, name="recompute", config=RECOMPUTE),
        dataclasses.replace(base, name="redispatch", moonep=settings),
        dataclasses.replace(base, name="both", config=RECOMPUTE, moonep=settings),
    ]
    plain = ranks(4).call(run_poisoned, base, "moonep")
    for case in again:
        assert_same_bits(plain, ranks(4).call(run_poisoned, case, "moonep"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_optimizer_steps_equal_those_of_alltoall(dtype: torch.dtype) -> None:
    """DDP and the distributed optimizer with its overlaps, EP=2 x EDP=2, over four steps."""
    base = layer_case("", 4, ep=2, routing=SKEWS[:3], dtype=dtype, experts=8)
    cases = [
        dataclasses.replace(
            base, name=f"{grads} {form} {dict(ddp)}", ddp=ddp, grads=grads, form=form
        )
        for grads, form in (("main_grad", "sequential"), ("fused", "te" if TE else "grouped"))
        for ddp in (OVERLAP, DISTRIBUTED)
    ]
    close = 2e-5 if dtype == torch.float32 else 2e-2
    for rank in ranks(4).call(_train, cases, 4, layout=Layout(ep=2, expert_tp=1)):
        for case, trained in zip(cases, rank, strict=True):
            steps = list(zip(trained["moonep"], trained["alltoall"], strict=True))
            for number, (ours, theirs) in enumerate(steps):
                for name in ("output", "fc1", "fc2"):
                    off = error(getattr(ours, name), getattr(theirs, name).double())
                    assert off < close, f"{case.name}: {name} of step {number} is off by {off:.1e}"
            moved = error(steps[-1][0].fc1, steps[0][0].fc1.double())
            assert moved > 5 * close, "the steps are too small to show anything"


def test_inference_and_strided_tokens() -> None:
    """Without gradients, in eval mode, and for tokens that do not lie densely: the same output."""
    for trained, evaluated, strided in ranks(2).call(_three_outputs):
        assert torch.equal(trained, evaluated)
        assert torch.equal(trained, strided)


def _three_outputs() -> list[Tensor]:
    case = layer_case("eval", 2, routing=("hot_rank",))
    layer = build(case, "moonep")
    wide = torch.randn(
        8, 8, 2 * case.hidden, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    wide = wide.to(device(), case.dtype)[..., ::2].transpose(0, 1)
    outputs = [layer(wide.contiguous().requires_grad_())[0]]
    layer.eval()
    with torch.no_grad():
        outputs += [layer(wide.contiguous())[0], layer(wide)[0]]
    return [output.detach().cpu() for output in outputs]


def test_a_masked_loss_still_serves_the_other_ranks() -> None:
    """A rank whose loss is masked runs its backward: the others' gradients must not change."""
    for rank, pairs in enumerate(ranks(4).call(_masked_loss)):
        for quiet, (full, masked) in enumerate(pairs):
            if rank == quiet:
                assert masked.count_nonzero() == 0
            else:
                assert torch.equal(full, masked)


def _masked_loss() -> list[list[Tensor]]:
    """Input gradients with all losses and without that of one rank, for every such rank."""
    case = layer_case("mask", 4, routing=("hot_rank",))
    layer, rank = build(case, "moonep"), dist.get_rank()
    x = torch.randn(MAX_TOKENS, 1, case.hidden, generator=torch.Generator().manual_seed(rank))
    pairs = []
    for quiet in range(4):
        gradients = []
        for masked in (False, True):
            hidden = x.to(device(), case.dtype).requires_grad_()
            output = layer(hidden)[0]
            (output[:0] if masked and rank == quiet else output).float().pow(2).sum().backward()
            gradients.append(hidden.grad.cpu())
        pairs.append(gradients)
    return pairs


def test_layers_share_their_memory() -> None:
    """Two layers, forward one after the other and backward in reverse, ranks out of step."""
    case = layer_case("layers", 4, routing=("hot_rank", "zipf"))
    alone = ranks(4).call(_two_layers, case, False)
    for one, other in zip(alone, ranks(4).call(_two_layers, case, True), strict=True):
        for a, b in zip(one, other, strict=True):
            assert_same_bits([a], [b])


def _two_layers(case: Case, nested: bool) -> list[SimpleNamespace]:
    """Each layer's answer: one layer done before the other begins, or nested in its pass."""
    seeds = (dataclasses.replace(case, seed=seed) for seed in (1, 2))
    first, second = ((c, build(c, "moonep")) for c in seeds)
    answers = []

    def run_second(*_: object) -> None:
        if not answers:
            time.sleep(0.01 * dist.get_rank())
            answers.append(run_layer(second[1], second[1], second[0], "moonep"))

    if nested:
        # After the second microbatch's forward of the first layer, before its backwards.
        first[1].register_forward_hook(
            lambda *_: run_second() if first[1].router.microbatch == 1 else None
        )
    one = run_layer(first[1], first[1], first[0], "moonep")
    run_second()
    return [one, *answers]


@pytest.mark.parametrize("expandable", [False, True])
def test_allocator_modes(expandable: bool) -> None:
    """Both ways to reserve memory; addresses of the second cannot be exported as before."""
    option = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    routing = ("hot_rank", "zipf")
    check([layer_case("", 2, routing=routing, grads="fused", form="grouped")], **option)
    assert ranks(2, **option).call(_has_expandable_segments) == [expandable and GPU] * 2


def _has_expandable_segments() -> bool:
    return GPU and any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
