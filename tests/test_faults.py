"""Bad input and lost ranks end in an error that says what and where, on every rank, in time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from cases import Case, batch
from moe import build
from ranks import Failure, RankError, run_ranks

SECONDS = 60.0


def _failures(world: int, function: object, *args: object) -> list[Failure]:
    """What every rank raised; all must raise, and soon."""
    start = time.monotonic()
    answers = run_ranks(world, function, *args, timeout=SECONDS, failures=True)
    assert time.monotonic() - start < SECONDS
    for rank, answer in enumerate(answers):
        assert isinstance(answer, Failure), f"rank {rank} did not notice: {answer}"
    return answers


def _forward(case: Case) -> str:
    layer = build(case, "moonep")
    layer(batch(case, 0, dist.get_rank()).tokens_sH[:, None])
    return "passed"


def _by_ids(bad: int) -> None:
    """Rank 1 alone has one id that is no expert."""
    case = Case(name="", ranks=3, experts=6)
    layer = build(case, "moonep")
    part = batch(case, 0, dist.get_rank())
    ids = part.ids_sK.clone()
    if dist.get_rank() == 1:
        ids[2, 1] = bad
    rows = layer.token_dispatcher.route_ids(part.tokens_sH[:, None], ids)
    layer.dispatch(rows, part.probs_sK)


def _one_choice_too_many() -> None:
    case = Case(name="", ranks=3, experts=6)
    layer = build(case, "moonep")
    if dist.get_rank() == 2:
        layer.router.maps[0][5] = True
    layer(batch(case, 0, dist.get_rank()).tokens_sH[:, None])


def test_more_tokens_than_max_tokens() -> None:
    """One rank brings too many: all ranks say which, how many, and which flag to raise."""
    case = Case(name="", ranks=3, experts=6, tokens=((8, 9, 3),), moonep=(("max_tokens", 8),))
    for failure in _failures(3, _forward, case):
        assert failure.kind == "ValueError"
        for part in ("rank 1", "9 tokens", "--moe-moonep-max-tokens 8"):
            assert part in failure.message
    case = Case(name="", ranks=3, experts=6, tokens=((8, 8, 3),), moonep=(("max_tokens", 8),))
    assert run_ranks(3, _forward, case) == ["passed"] * 3


def _first_small_then_large() -> None:
    tokens = ((2, 5, 3), (5, 5, 0), (1, 6, 2))
    options = (("max_tokens", None),)
    routing = ("uniform",) * 3
    case = Case(name="", ranks=3, experts=6, tokens=tokens, routing=routing, moonep=options)
    layer = build(case, "moonep")
    for m in range(3):
        layer.router.microbatch = m
        output = layer(batch(case, m, dist.get_rank()).tokens_sH[:, None])[0]
        assert len(output) == tokens[m][dist.get_rank()]


def test_capacity_agreed_at_the_first_forward() -> None:
    """Without the flag the largest rank of the first forward decides; more is an error on all."""
    for failure in _failures(3, _first_small_then_large):
        assert failure.kind == "ValueError"
        for part in ("rank 1", "6 tokens", "--moe-moonep-max-tokens"):
            assert part in failure.message


@pytest.mark.parametrize("bad", [6, 1_000_000, -2])
def test_ids_out_of_range(bad: int) -> None:
    for failure in _failures(3, _by_ids, bad):
        assert failure.kind == "ValueError"
        assert "rank 1" in failure.message
        assert "-1..5" in failure.message


def test_more_choices_than_topk() -> None:
    for failure in _failures(3, _one_choice_too_many):
        assert failure.kind == "ValueError"
        for part in ("rank 2", "4 choices", "--moe-router-topk 2"):
            assert part in failure.message


REFUSED = [
    ({"experts": 7}, ("--num-experts", "7", "--expert-model-parallel-size")),
    ({"moonep": (("slots", 4),)}, ("--moe-moonep-slots", "4")),
    ({"moonep": (("slots", 0),)}, ("--moe-moonep-slots", "0")),
    ({"moonep": (("planner", "guess"),)}, ("--moe-moonep-planner", "guess", "pairs")),
    ({"moonep": (("backend", "smoke"),)}, ("--moe-moonep-backend", "smoke", "collective")),
    ({"moonep": (("max_tokens", 0),)}, ("--moe-moonep-max-tokens", "0")),
    ({"config": (("moe_expert_capacity_factor", 1.0),)}, ("--moe-expert-capacity-factor", "1.0")),
]


def _refusals() -> list[str]:
    messages = []
    for options, _ in REFUSED:
        try:
            build(Case(**{"name": "", "experts": 6, **options}), "moonep")
            messages.append("built")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_refused_when_the_layer_is_built() -> None:
    for messages in run_ranks(2, _refusals):
        for (options, parts), message in zip(REFUSED, messages, strict=True):
            assert all(part in message for part in parts), f"{options}: {message}"


def _unknown_linear(kind: str) -> None:
    case = Case(name="", routing=("hot_rank",))
    layer = build(case, "moonep")
    if kind == "class":
        linear = layer.experts.local_experts[1].linear_fc1
        linear.__class__ = type("LoraLinear", (type(linear),), {})
    else:
        layer.experts.local_experts[1].linear_fc2.register_forward_hook(lambda *_: None)
    layer(batch(case, 0, dist.get_rank()).tokens_sH[:, None])


@pytest.mark.parametrize("kind, name", [("class", "LoraLinear"), ("hook", "local_experts.1")])
def test_what_a_user_hung_on_an_expert_is_not_bypassed(kind: str, name: str) -> None:
    for failure in _failures(2, _unknown_linear, kind):
        assert failure.kind == "TypeError"
        assert name in failure.message
        assert "alltoall" in failure.message


def _one_rank_raises(when: str) -> None:
    case = Case(name="", ranks=3, experts=6, routing=("hot_rank",))
    layer = build(case, "moonep")
    part = batch(case, 0, dist.get_rank())
    hidden = part.tokens_sH[:, None].clone().requires_grad_()
    if when == "forward" and dist.get_rank() == 1:
        raise RuntimeError("deliberate")
    output = layer(hidden)[0]
    if when == "backward" and dist.get_rank() == 1:
        raise RuntimeError("deliberate")
    output.backward(part.grad_sH[:, None])


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_raises_ends_the_run(when: str) -> None:
    """Its peers, in the middle of an exchange with it, fail too and do not wait for ever."""
    failures = _failures(3, _one_rank_raises, when)
    assert failures[1].message == "deliberate"


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(RankError, match=r"gave no answer in|rank \d raised"):
        run_ranks(2, _one_rank_sleeps, timeout=12)


def _one_rank_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(120)
    _forward(Case(name="", routing=("hot_rank",)))


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from ranks import Layout, start
from test_faults import _one_rank_raises
import os
start(int(os.environ["RANK"]), 2, Layout(ep=2), "env://", 60.0)
_one_rank_raises("forward")
"""


def test_torchrun_ends_when_a_rank_raises(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    done = subprocess.run(
        [*command, str(script)], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert "deliberate" in done.stderr
