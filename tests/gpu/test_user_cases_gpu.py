"""Users' cases that need a GPU; docs/user-cases.md lists all of them."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case
from edges import Edge, check, edges, run_edge
from layer_ranks import MAX_TOKENS, layer_case, ranks
from test_quiet import LAUNCH, LOUD, _profiled, quiet_case
from test_user_cases import OVERLAP
from user_case_ranks import (
    collectives_of_a_pass,
    collectives_of_ddp,
    outputs_with_nan_token,
    plans_of_passes,
    splits,
)

pytestmark = pytest.mark.timeout(900)  # a first run compiles every kernel

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _case(name: str, **changes: Any) -> Case:
    return layer_case(name, 4, **changes)


@pytest.mark.parametrize("edge", edges(_case), ids=lambda edge: edge.name)
def test_degenerate_routing(edge: Edge) -> None:
    check(edge, ranks(4).call(run_edge, edge))


def test_nan_logits() -> None:
    """A token of NaNs is NaN at the end; no other notices more than another order of sums."""
    for clean, poisoned in ranks(2).call(outputs_with_nan_token, layer_case("NaN", 2)):
        others = torch.arange(len(clean)) != 3
        assert poisoned[3].isnan().all()
        torch.testing.assert_close(poisoned[others], clean[others], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_nccl_in_step(size: int) -> None:
    """After the first pass a layer asks torch.distributed for nothing, in neither direction.

    Under DDP with its overlap, only the reductions of gradients are left.
    """
    case = layer_case("calls", size, routing=("hot_rank",))
    assert ranks(size).call(collectives_of_a_pass, case) == [[]] * size
    reduced = dataclasses.replace(case, grads="fused", ddp=OVERLAP)
    for forward, backward in ranks(size).call(collectives_of_ddp, reduced):
        assert forward == []
        assert len(backward) >= 2, "DDP's reductions are not seen"
        assert all("reduce" in name for name in backward), backward


def test_plan_reuse_no_planning() -> None:
    """A forward plans once; its backward, and whatever goes over its route, not at all."""
    case = layer_case("plans", 4, routing=("hot_rank", "zipf", "last_rank"))
    assert ranks(4).call(plans_of_passes, case, _planning_kernel) == [[3, 0, 0]] * 4


def _planning_kernel() -> tuple[Any, str]:
    from moonep_megatron.backends import symmetric

    return symmetric.Planner, "plan"


def test_te_splits_cuda_int64() -> None:
    """The dispatcher alone hands on rows a group as Transformer Engine's products ask for them."""
    case = layer_case("splits", 2, routing=("hot_rank",))
    for answer in ranks(2).call(splits, case):
        assert answer.on_cuda and answer.dtype == torch.int64
        assert (answer.shape, answer.total) == ([2 * case.experts // 2], MAX_TOKENS * case.topk)


def test_rl_domain_shift() -> None:
    """With the balance log on, a pass of any skew still neither waits nor copies to the host."""
    case = quiet_case(4)
    logging = dataclasses.replace(case, moonep=(*case.moonep, ("log_maxvio", True)))
    for seen in ranks(4).call(_profiled, logging, True):
        assert any(LAUNCH.match(name) for name in seen)
        assert sorted({name for name in seen if LOUD.match(name)}) == []


def test_flat_vs_maxvio(tmp_path: Path) -> None:
    """Rates of dispatch and of combine's gather stay within 5 % from an even routing to maxvio 12.

    Ranks that share one GPU show right results only.
    """
    gpus = torch.cuda.device_count()
    size = [] if gpus > 1 else ["--same-gpu", "--shape", "512,1024,8,64"]
    out = tmp_path / "kernels.json"
    command = [sys.executable, SCRIPTS / "bench_kernels.py", "--only", "dispatch,gather"]
    command += ["--maxvio", "0,1,3,6,12", "--sms", "16", "--json", out, *size]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [r for r in json.loads(out.read_text())["rows"] if r["section"] != "copy"]
    assert {row["section"] for row in rows} == {"dispatch", "gather"}
    assert {row["load"] for row in rows} == {0, 1, 3, 6, 12}
    if gpus == 1:
        pytest.skip("results are right; rates need a GPU a rank")
    for one in {(row["section"], row["form"]) for row in rows}:
        rates = [row["gbps"] for row in rows if (row["section"], row["form"]) == one]
        assert max(rates) <= 1.05 * min(rates), f"{one}: {rates}"
