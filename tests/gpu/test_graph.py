"""A whole layer in a CUDA graph: captured once, replayed with routing that it has never seen."""

import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import Case
from compare import dense
from layer_ranks import StaticPass, layer_case, ranks
from reference import error
from torch import Tensor

pytestmark = pytest.mark.timeout(900)  # a first run compiles every kernel

SKEWS = ("uniform", "hot_expert", "hot_rank", "last_rank", "two_thirds_idle", "zipf", "balanced")
REPLAYS = 100
# Replayed without a word to the host in between, then compared, and so on.
BLOCK = 25
CHECKED = (0, 1, 2, 49, 50, 99)
TOKENS = (64, 41, 1, 64)

Run = Callable[[], list[Tensor]]


def graph_case(size: int, form: str) -> Case:
    return layer_case(
        f"graph, {form}",
        size,
        form=form,
        routing=tuple(SKEWS[m % len(SKEWS)] for m in range(REPLAYS)),
        tokens=(TOKENS[:size],) * REPLAYS,
        moonep=(("slots", 2),),
    )


@pytest.mark.parametrize("fused", [False, True], ids=["returned", "fused"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_capture_fwd_bwd(size: int, fused: bool) -> None:
    """100 replays, from ranks out of step, equal eager passes bit for bit, and some the reference.

    With 2 slots and 4 experts a rank, skewed routings need a second wave.
    """
    case = graph_case(size, "grouped" if fused else "sequential")
    _check(case, ranks(size).call(_replays, case, "run", fused))


@pytest.mark.parametrize("fused", [False, True], ids=["returned", "fused"])
@pytest.mark.parametrize("size", [1, 2])
def test_forward_and_backward_apart(size: int, fused: bool) -> None:
    """Two graphs, as Megatron and Transformer Engine capture them: no stream crosses from one."""
    case = graph_case(size, "sequential")
    _check(case, ranks(size).call(_replays, case, "apart", fused))


@pytest.mark.parametrize("size", [2, 4])
def test_forward_alone(size: int) -> None:
    case = graph_case(size, "single")
    _check(case, ranks(size).call(_replays, case, "forward", False))


def _check(case: Case, answers: list[SimpleNamespace]) -> None:
    assert not [answer.wrong for answer in answers if answer.wrong]
    for m in CHECKED:
        _assert_right(case, m, [answer.checked[m] for answer in answers])


def _assert_right(case: Case, microbatch: int, found: list[list[Tensor]]) -> None:
    """Output and gradients of tokens and probabilities of all ranks against the dense reference."""
    exact = dense(case, microbatch)
    expected = (exact.output_TH, exact.grad_tokens_TH, exact.grad_probs_TK)
    # Three roundings to bf16 lie between input and output, each of half an ulp at most, and as
    # many in the gradient behind them.
    bound = 3 * torch.finfo(case.dtype).eps
    ranks_of = zip(*found, strict=True)
    for name, parts, value in zip(StaticPass.names, ranks_of, expected, strict=False):
        off = error(torch.cat(parts), value)
        assert off <= bound, f"replay {microbatch}: {name} is off by {off:.2e}, bound {bound:.2e}"


def _replays(case: Case, what: str, fused: bool) -> SimpleNamespace:
    """On a rank: ``wrong`` names the tensors of replays that differ from eager; ``checked``."""
    static = StaticPass(case, fused=fused)
    run = static.run if what == "apart" else getattr(static, what)
    _warm_up(static, run)
    replay, captured = _capture_apart(static) if what == "apart" else _capture(run)
    late = random.Random(dist.get_rank())
    wrong, checked = [], {}
    for first in range(0, REPLAYS, BLOCK):
        block = range(first, first + BLOCK)
        replayed = []
        for m in block:
            if late.random() < 0.3:
                time.sleep(0.01 * late.random())
            static.load(m)
            replay()
            replayed.append([tensor.clone() for tensor in captured])
        for m, tensors in zip(block, replayed, strict=True):
            static.load(m)
            wrong += [
                (m, name, count)
                for name, count in _different(tensors, run()).items()
                if count.item()
            ]
            if m in CHECKED:
                checked[m] = _for_reference(static, m, tensors)
    return SimpleNamespace(wrong=wrong, checked=checked)


def _warm_up(static: StaticPass, run: Run) -> None:
    """Beside the main stream, as graphs ask."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for m in range(3):
            static.load(m)
            run()
    torch.cuda.current_stream().wait_stream(side)


def _capture(run: Run) -> tuple[Callable[[], None], list[Tensor]]:
    """The replay and its tensors."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return graph.replay, captured


def _capture_apart(static: StaticPass) -> tuple[Callable[[], None], list[Tensor]]:
    """The same of two graphs that share memory."""
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        output = static.begin()
    with torch.cuda.graph(backward, pool=forward.pool()):
        captured = static.finish(output)

    def replay() -> None:
        forward.replay()
        backward.replay()

    return replay, captured


def _different(tensors: list[Tensor], eager: list[Tensor]) -> dict[str, Tensor]:
    """How many elements differ in their bits, a tensor each, on the device."""
    counts = {}
    for i, (one, other) in enumerate(zip(tensors, eager, strict=True)):
        name = StaticPass.names[i] if i < 3 else f"weight gradient {i - 3}"
        kind = {2: torch.int16, 4: torch.int32}[one.itemsize]
        counts[name] = (one.contiguous().view(kind) != other.contiguous().view(kind)).sum()
    return counts


def _for_reference(static: StaticPass, microbatch: int, tensors: list[Tensor]) -> list[Tensor]:
    """Tokens' output [s,H] and gradient [s,H], and the gradient of chosen probabilities [s,K]."""
    found = [tensor[:, 0] for tensor in tensors[:2]]
    if len(tensors) > 2:
        found.append(tensors[2].gather(1, static.batches[microbatch].ids_sK))
    return [tensor.cpu() for tensor in found]
