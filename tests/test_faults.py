"""Bad input and lost ranks end in an error that says what and where, on every rank, in time."""

import gc
import subprocess
import textwrap
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch
from fresh import Warm
from moe import build
from ranks import Failure, RankError, run_ranks

from moonep_megatron.backends import faults

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
        run_ranks(2, _one_rank_sleeps, timeout=8)


def _one_rank_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(120)
    _forward(Case(name="", routing=("hot_rank",)))


# --- fault records, written by hand in place of a kernel --------------------------------------

IMPORTS = """
import os, sys, time, torch
from functools import partial
from moonep_megatron.backends import faults
"""
# A process that watches records; BODY says who writes what, and how the main thread fares.
WATCHED = """
describe = partial(faults.describe, stages=("exchanged", "dispatched"), num_experts=6, topk=2,
                   timeout=2.0)
records = [torch.zeros(7, dtype=torch.int32) for _ in range(2)]
for record in records:
    faults.watch(record, describe=describe, rank=5)
def write(*fields, record=records[1]):
    record[1:] = torch.tensor(fields[1:], dtype=torch.int32)
    record[0] = fields[0]
LATE = (1, 3, 2, 7, 1, 41, 40)
"""
LATE = (
    "moonep_megatron: error on rank 5: expert-parallel rank 3 waited in layer 7 for "
    "expert-parallel rank 2 longer than --moe-moonep-timeout 2 s: stage 'dispatched' is at epoch "
    "40, expected 41."
)


Watching = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def watching() -> Iterator[Watching]:
    warm = Warm(IMPORTS)
    yield lambda body: warm.run(WATCHED + textwrap.dedent(body))
    warm.close()


# With a slow poll the end of the process is the first to look.
ENDINGS = {
    "main thread waits": ("write(*LATE)", "time.sleep(60)"),
    "main thread in C": ("write(*LATE)", "import select; select.select([], [], [], 60)"),
    "exception": ("faults.POLL_SECONDS = 60; time.sleep(0.1); write(*LATE)", "raise OSError('x')"),
    "exit": ("faults.POLL_SECONDS = 60; time.sleep(0.1); write(*LATE)", "sys.exit(0)"),
    "end of the script": ("faults.POLL_SECONDS = 60; time.sleep(0.1); write(*LATE)", ""),
    "both at once": ("write(*LATE)", "time.sleep(faults.POLL_SECONDS); raise OSError('x')"),
    "two records": ("write(*LATE); write(*LATE, record=records[0])", "time.sleep(60)"),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_fault_is_named_once_and_ends_the_process(watching: Watching, case: str) -> None:
    start = time.monotonic()
    done = watching("\n".join(ENDINGS[case]))
    assert time.monotonic() - start < 50
    assert done.returncode == 1, done
    assert done.stderr.count("moonep_megatron: error") == 1
    (line,) = (line for line in done.stderr.splitlines() if "moonep_megatron: error" in line)
    assert line.startswith(LATE)
    if case == "exception":
        assert done.stderr.index("OSError: x") < done.stderr.index(LATE)


def test_without_a_fault_a_process_ends_as_it_likes(watching: Watching) -> None:
    """Also when a record is freed, and when the process forks."""
    done = watching(
        """
        del record, records[0], write.__defaults__, write.__kwdefaults__
        records.clear()
        time.sleep(0.1)
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,))
        child.start()
        child.join()
        assert child.exitcode == 4
        assert [one.record() for one in faults._watched.values()] == [None] * 2
        faults.watch(torch.zeros(7, dtype=torch.int32), describe=describe)
        assert len(faults._watched) == 1
        raise SystemExit(3)
        """
    )
    assert (done.returncode, done.stderr) == (3, "")
    done = watching("raise OSError('mine')")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("OSError: mine")


def test_a_forked_child_leaves_the_records_alone(watching: Watching) -> None:
    """They may be memory that only the parent has."""
    done = watching(
        """
        faults.POLL_SECONDS = 60
        time.sleep(0.1)
        write(*LATE)
        child = os.fork()
        if not child:
            faults.report()
            os._exit(4)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("child", status, flush=True)
        """
    )
    assert done.stdout == "child 4\n"
    assert done.returncode == 1
    assert done.stderr.count("moonep_megatron: error") == 1


def test_a_description_that_fails_does_not_hide_the_fault(watching: Watching) -> None:
    done = watching(
        """
        faults.watch(records[1], describe=lambda fault: 1 / 0)
        write(*LATE)
        time.sleep(60)
        """
    )
    assert done.returncode == 1
    for part in ("moonep_megatron: error: ", "[1, 3, 2, 7, 1, 41, 40]", "ZeroDivisionError"):
        assert part in done.stderr


def test_watching_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_start", lambda: None)
    record = torch.zeros(7, dtype=torch.int32)
    alive = weakref.ref(record)
    faults.watch(record, describe=str)
    faults.report()
    del record
    gc.collect()
    assert alive() is None
    faults.report()


@pytest.mark.parametrize("record", [torch.zeros(7), torch.zeros(6, dtype=torch.int32)])
def test_what_is_no_record_is_refused(record: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="no fault record"):
        faults.watch(record, describe=str)


def test_bad_input_is_told_in_the_words_of_the_collective_backend() -> None:
    """What the kernels record reads as what the portable backend raises."""
    case = Case(name="", ranks=3, experts=6, tokens=((8, 9, 3),), moonep=(("max_tokens", 8),))
    words = {
        faults.BAD_IDS: (_failures(3, _by_ids, 6)[0], 1, 1, 0),
        faults.EXCESS_CHOICES: (_failures(3, _one_choice_too_many)[0], 2, 4, 0),
        faults.TOO_MANY_TOKENS: (_failures(3, _forward, case)[0], 1, 9, 8),
    }
    for kind, (failure, rank, seen, most) in words.items():
        fault = faults.Fault(kind, 0, rank, 4, 0, most, seen)
        text = faults.describe(fault, stages=("exchanged",), num_experts=6, topk=2)
        assert text == f"{failure.message} (layer 4, found by rank 0)"


def test_the_kernels_write_what_is_read() -> None:
    pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")
    from moonep_megatron.kernels import exchange, sync

    names = ["valid", "rank", "peer", "layer", "stage", "expected", "seen"]
    assert list(sync.FAULT_FIELDS) == names
    assert list(faults.Fault.__dataclass_fields__) == ["kind", *names[1:]]
    kinds = (exchange.BAD_IDS, exchange.EXCESS_CHOICES, exchange.TOO_MANY_TOKENS)
    assert kinds == (faults.BAD_IDS, faults.EXCESS_CHOICES, faults.TOO_MANY_TOKENS)
    assert faults.LATE == 1
    fault = faults.Fault(faults.LATE, 1, 0, 5, sync.PULLED, 3, 2)
    assert "stage 'pulled' is at epoch 2, expected 3" in faults.describe(
        fault, stages=sync.STAGE_NAMES
    )
    assert "number 99" in faults.describe(
        faults.Fault(faults.LATE, 1, 0, 5, 99, 3, 2), stages=sync.STAGE_NAMES
    )
