"""What users of other dispatchers ran into: cases that no other test holds by its name.

docs/user-cases.md lists all of them, with the tests elsewhere.
"""

import hashlib
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig
from ranks import Layout, run_ranks
from user_case_ranks import (
    collectives_of_a_pass,
    collectives_of_ddp,
    drift,
    labelled_rows,
    plans_of_passes,
    splits,
)

from moonep_megatron import MoonEPConfig, config
from moonep_megatron.backends.base import receive_rows
from moonep_megatron.plan import destinations, make_plan

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))
RAGGED = (24, 3, 0, 11)

# Token counts ---------------------------------------------------------------------------------


def _odd_case(topk: int) -> Case:
    """A buffer far larger than what anybody brings; K on both sides of R = 4."""
    return Case(
        name=f"K={topk}",
        ranks=4,
        experts=8,
        topk=topk,
        tokens=(RAGGED,),
        routing=("zipf",),
        moonep=(("max_tokens", 64),),
    )


@pytest.mark.parametrize("topk", [2, 4])
def test_no_pad_rows_on_wire(topk: int) -> None:
    """A token crosses once to each rank that computes it, and nothing else does, in both passes."""
    case = _odd_case(topk)
    answers = run_ranks(4, labelled_rows, case)
    row_bytes = case.hidden * case.dtype.itemsize
    arrived = [set(map(tuple, answer.computed)) for answer in answers]
    assert sum(len(answer.computed) for answer in answers) == sum(RAGGED) * topk
    for rank, answer in enumerate(answers):
        sent = sum(source == rank for tokens in arrived for source, _ in tokens)
        assert answer.sent == sent * row_bytes
        assert answer.returned == len(arrived[rank]) * row_bytes


@st.composite
def _padded_routings(draw: st.DrawFn) -> tuple[int, int, list[torch.Tensor]]:
    """S, experts, and ids [S, K] of every rank, of which -1 and whole tokens of -1 are padding."""
    ranks, homes = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    tokens, topk = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    hot = draw(st.integers(0, ranks * homes - 1))
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    every = []
    for _ in range(ranks):
        ids = torch.randint(0, ranks * homes, (tokens, topk), generator=g)
        ids[torch.rand(ids.shape, generator=g) < draw(st.floats(0, 1))] = hot
        ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
        ids[draw(st.integers(0, tokens)) :] = -1
        every.append(ids)
    return tokens, ranks * homes, every


@settings(max_examples=60, deadline=None)
@given(_padded_routings())
def test_padded_fit(drawn: tuple[int, int, list[torch.Tensor]]) -> None:
    """Padding goes nowhere, and no rows overflow buffers of S*K and min(K, R)*S rows.

    Nor would they if every group were rounded up to whole tiles of the products.
    """
    tokens, experts, every = drawn
    ranks, topk, tile = len(every), every[0].shape[1], 128
    counts = torch.stack([torch.bincount(ids[ids >= 0], minlength=experts) for ids in every])
    plan = make_plan(counts)
    taken: list[set[int]] = [set() for _ in range(ranks)]
    holders: list[dict[int, tuple[int, int]]] = [{} for _ in range(ranks)]
    for source, ids in enumerate(every):
        rank_SK, row_SK = destinations(plan, counts, ids, source)
        receive_SK = receive_rows(rank_SK, row_SK, source, ranks, tokens)
        for t in range(tokens):
            for k in range(topk):
                rank, row = int(rank_SK[t, k]), int(row_SK[t, k])
                if ids[t, k] < 0:
                    assert rank == row == int(receive_SK[t, k]) == -1
                    continue
                assert 0 <= row < tokens * topk and row not in taken[rank]
                taken[rank].add(row)
                received = int(receive_SK[t, k])
                assert 0 <= received < min(topk, ranks) * tokens
                assert holders[rank].setdefault(received, (source, t)) == (source, t)
    groups_RG = plan.group_start_RG1.diff(dim=1)
    padded_R = (-(-groups_RG // tile) * tile).sum(1)
    static = tokens * topk + groups_RG.shape[1] * (tile - 1)
    assert int(padded_R.max()) <= static
    assert [len(rows) for rows in taken] == plan.cap_R.tolist()


# Hangs ----------------------------------------------------------------------------------------

OVERLAP = (("overlap_grad_reduce", True), ("bucket_size", 1))


def test_what_calls_the_collectives() -> None:
    """The GPU test asserts that the symmetric backend starts none; here the same eyes see some."""
    case = Case(name="", ranks=2, routing=("hot_rank",))
    for names in run_ranks(2, collectives_of_a_pass, case):
        assert len(names) > 8 and any("alltoall" in name for name in names), names
    # At R = 1 there is nobody to ask, on this backend either.
    assert run_ranks(1, collectives_of_a_pass, Case(name="", ranks=1)) == [[]]
    reduced = Case(name="", ranks=1, grads="main_grad", ddp=OVERLAP)
    ((forward, backward),) = run_ranks(1, collectives_of_ddp, reduced)
    assert forward == [] and len(backward) >= 2, "DDP's reductions are not seen"


# Recompute ------------------------------------------------------------------------------------


def _reference_planner() -> tuple[Any, str]:
    from moonep_megatron.backends import collective

    return collective, "make_plan"


def test_plan_reuse_no_planning() -> None:
    """A forward plans once; its backward, and whatever goes over its route, not at all."""
    case = Case(name="", ranks=3, experts=6, routing=("hot_rank", "zipf", "last_rank"))
    assert run_ranks(3, plans_of_passes, case, _reference_planner) == [[3, 0, 0]] * 3


# What grouped products are told ----------------------------------------------------------------


def test_splits_lie_beside_the_rows() -> None:
    """int64 on the device of the rows, as Transformer Engine asks; the GPU test sees CUDA."""
    case = Case(name="", ranks=2, routing=("hot_rank",), moonep=(("max_tokens", 30),))
    for answer in run_ranks(2, splits, case):
        assert (answer.dtype, answer.beside_rows) == (torch.int64, True)
        assert (answer.shape, answer.total) == ([2 * 4], 24 * case.topk)


# Numbers --------------------------------------------------------------------------------------


def test_bitwise_twice() -> None:
    """EP=2, two pipeline stages of two chunks each: two runs give the same bits."""
    layout = Layout(ep=2, pp=2, vpp=2)
    first, second = (run_ranks(4, _train_interleaved, layout=layout) for _ in range(2))
    assert sum(len(losses) for losses, _ in first) == 2 * 2 * 4, "the last stages have the losses"
    for one, other in zip(first, second, strict=True):
        assert one == other
    assert len({digest for _, digest in first}) == 4


def _train_interleaved() -> tuple[list[float], str]:
    """Losses of four microbatches a step, and a digest of this rank's weights after two."""
    from gpt import Trainer, build

    options = {"num_layers": 4, "virtual_pipeline_model_parallel_size": 2}
    trainer = Trainer(*(build("moonep", vp_stage=stage, **options) for stage in range(2)))
    assert len(trainer.chunks) == 2
    losses, rank = [], dist.get_rank()
    for step in range(2):
        losses += trainer.step([(100 * step + 10 * m + rank,) for m in range(4)])
    digest = hashlib.sha256()
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    return losses, digest.hexdigest()


def test_no_float_atomics_in_sources() -> None:
    """`test_kernels.py` looks at the compiled kernels; nothing else in the tree has any either."""
    sources = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "moonep_megatron").rglob("*.py")]
    assert len(sources) > 40
    found = [line for path in sources for line in path.read_text().splitlines() if _adds(line)]
    assert found == []
    assert _adds("red.release.gpu.global.add.f32") and _adds("cute.arch.atomic_add(p, x)")


def _adds(line: str) -> bool:
    """Whether a line may add to memory atomically in floating point."""
    ptx = re.search(r"\b(atom|red)\.[\w.]*\.(f16|bf16|f32|f64)", line)
    return bool(ptx) or ("atomic_add(" in line and "Int32(" not in line) or "atomicAdd" in line


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"moe_dispatch_fwd_dtype": "mxfp8"}, "--moe-dispatch-fwd-dtype"),
        ({"moe_combine_bwd_dtype": "mxfp8"}, "--moe-combine-bwd-dtype"),
        ({"fp8": "e4m3"}, "--fp8-format"),
    ],
)
def test_fp8_dispatch_refused(changes: dict[str, str], flag: str) -> None:
    transformer = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=8,
        add_bias_linear=False,
    )
    config.check(transformer, MoonEPConfig())
    for name, value in changes.items():
        setattr(transformer, name, value)
    with pytest.raises(ValueError) as found:
        config.check(transformer, MoonEPConfig())
    message = str(found.value)
    (value,) = changes.values()
    assert flag in message and repr(value) in message
    assert "rows travel in the dtype of the model" in message or "fp16, bf16 or fp32" in message
    assert re.search(r"leave it out|train with --bf16", message), "no remedy"


# Skew and metrics -----------------------------------------------------------------------------

DRIFT = 8


def test_rl_domain_shift() -> None:
    """Balance metrics follow a workload that drifts, a layer each; the rows do not."""
    case = Case(
        name="",
        ranks=4,
        experts=16,
        tokens=((48,) * 4,),
        moonep=(("log_maxvio", True), ("slots", 2)),
    )
    answers = run_ranks(4, drift, case, DRIFT)
    hottest = []
    for step in range(DRIFT):
        some = [answer[step] for answer in answers]
        counts_E = sum(one.counts for one in some).double()
        violation_E = counts_E / counts_E.mean() - 1
        home_R = counts_E.view(4, 4).sum(1)
        expected = {
            "maxvio": violation_E.max(),
            "minvio": violation_E.min(),
            "avgvio": violation_E.abs().mean(),
            "hottest_rank_without": home_R.max() / home_R.mean(),
        }
        hottest.append(float(expected["hottest_rank_without"]))
        for one in some:
            record, logged = one.record, one.logged
            for name, value in expected.items():
                assert record[name] == pytest.approx(float(value))
                assert logged[f"moe/moonep_{name}_layer_0"] == pytest.approx(float(value), rel=1e-5)
            for name in ("duplicates", "busiest_sent", "busiest_received"):
                assert logged[f"moe/moonep_{name}_layer_0"] == record[name]
            assert record["busiest"] == max(record["busiest_sent"], record["busiest_received"])
            megabytes = record["duplicates"] * one.copy_bytes / 1e6
            assert logged["moonep_pushed_mb"] == pytest.approx(megabytes, rel=1e-5)
            assert record["rows_per_rank"] == [48 * case.topk] * 4
            assert logged["moonep_hottest_rank"] == 1
    assert hottest[0] < 1.5 and hottest[-1] > 3, "the workload does not drift"


def test_row_metrics_named() -> None:
    """Rows that are computed and rows that arrive are told apart, and both are right."""
    for topk in (2, 4):
        case = _odd_case(topk)
        answers = run_ranks(4, labelled_rows, case)
        arrived = [len(set(map(tuple, answer.computed))) for answer in answers]
        for record in run_ranks(4, _record, case):
            assert record["arrived_rows_per_rank"] == arrived
            assert record["rows_per_rank"] == [len(answer.computed) for answer in answers]
            assert sum(record["rows_per_rank"]) == sum(record["router_per_expert"])
            assert sum(arrived) < sum(record["rows_per_rank"])


def _record(case: Case) -> dict[str, Any]:
    from moe import run_case

    return run_case(case, "moonep").records[0]


def _of_one_token() -> tuple[str, list[int]]:
    from moe import build, run_layer

    case = Case(name="", ranks=4, tokens=((1,) * 4,), routing=("hot_rank",))
    layer = build(case, "moonep")
    rows = run_layer(layer, layer, case, "moonep").records[0]["rows_per_rank"]
    return layer.config.moe_token_dispatcher_type, rows


def test_break_even_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many tokens balancing needs to pay is told, by layer; nothing switches by itself."""
    import break_even
    from simulation.break_even import break_even as tokens_of
    from simulation.break_even import gain, logged_row
    from simulation.times import Model

    model = Model()
    layers = [logged_row(8, 8, hottest, busiest) for hottest, busiest in ((1.0, 0), (1.8, 3))]
    layers.append(logged_row(16, 8, 1.8, 3))
    for row in layers:
        tokens = tokens_of(model, row)
        assert gain(model, row, tokens) >= 1 > gain(model, row, tokens - 1)
        gains = [gain(model, row, 2**power) for power in range(4, 20)]
        assert all(a <= b + 1e-9 for a, b in pairwise(gains)), "not one crossing"
    # Weights over the slower wires need more tokens to hide behind.
    assert tokens_of(model, layers[2]) > tokens_of(model, layers[1])
    never = logged_row(8, 8, 1.0, 40)
    assert tokens_of(Model(topk=1, tflops=1e9, link=1e-3), never) is None

    out, picture = tmp_path / "rows.json", tmp_path / "curve.png"
    flags = ["--ranks", "8", "--synthetic", "zipf", "--experts", "64", "--layers", "3"]
    assert break_even.main([*flags, "--json", str(out), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert out.read_text().count("break_even_tokens") == 3
    assert break_even.main(["--ranks", "8", "--layer", "1.8,3"]) == 0
    assert f"{tokens_of(model, layers[1]):,}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        break_even.main(["--layer", "0.5,1"])
    assert "'0.5,1' is no HOTTEST,BUSIEST" in capsys.readouterr().err
    # One token a rank, far below the break-even: still moonep, still balanced.
    assert run_ranks(4, _of_one_token) == [("moonep", [2] * 4)] * 4


# The page -------------------------------------------------------------------------------------


def test_the_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "user-cases.md").read_text()
    named = re.findall(r"`((?:gpu/)?test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 40
    for file, function in named:
        source = (ROOT / "tests" / file).read_text()
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), f"{file}::{function}"
    assert page.count("https://github.com/") >= 40
