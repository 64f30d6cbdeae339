"""What the layer benchmark measures, as far as it needs no GPU, and that all of it runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import bench_layer
from layer_bench import figure, report, trace
from layer_bench.measure import Results
from layer_bench.options import BALANCED, SHAPES, Case, Shape, Variant, cases_of, variants
from layer_bench.routing import choices, hot_experts, loads, statistics, with_loads

SCRIPT = Path(bench_layer.__file__)
SHAPE = Shape("small", 8, 8, 32, 4, 64)
RANKS = 4


def counted(shape: Shape, ranks: int, case: Case) -> torch.Tensor:
    """Rows of every expert, from the choices; no token may have an expert twice."""
    ids = choices(shape, ranks, case)
    assert ids.shape == (ranks * shape.tokens, shape.topk)
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    return torch.bincount(ids.flatten(), minlength=shape.experts)


@pytest.mark.parametrize("name", ["A", "B", "C"])
@pytest.mark.parametrize("kind", ["one", "even"])
@pytest.mark.parametrize("factor", [1.25, 1.5, 2.0])
def test_rank_0_is_exactly_as_hot_as_asked(name: str, kind: str, factor: float):
    shape = replace(SHAPES[name], tokens=512)
    counts = counted(shape, 2, Case(kind, factor))
    home, other = counts.view(2, -1)
    assert home.sum() == factor * shape.rows
    assert other.max() - other.min() <= 1
    if kind == "even":
        assert home.max() - home.min() <= 1
    assert statistics(counts, 2)["hottest_rank"] == factor


def test_the_surplus_is_on_the_fewest_experts_that_can_take_it():
    shape = replace(SHAPE, topk=2)
    mean = shape.rows * RANKS // shape.experts
    one = counted(shape, RANKS, Case("one", 2.0))
    assert one[0] == mean + shape.rows and (one[1 : shape.experts // RANKS] == mean).all()
    # On two ranks K experts of a token leave one of them too little room.
    several = counted(SHAPE, 2, Case("one", 2.0))
    most = 2 * SHAPE.tokens
    assert hot_experts(SHAPE, 2, 2 * SHAPE.rows) == 2
    assert (several[:2] == most).all() and several[2] < most / 2
    # A's tokens choose one expert all, and moving that one is enough.
    assert hot_experts(SHAPES["A"], 2, 2 * SHAPES["A"].rows) == 1


@pytest.mark.parametrize("maxvio", [1.0, 3.5, 7.0])
def test_expert_0_has_so_many_times_the_mean(maxvio: float):
    counts = counted(SHAPE, RANKS, Case("maxvio", maxvio))
    assert counts[0] == (1 + maxvio) * RANKS * SHAPE.rows / SHAPE.experts
    assert counts[1:].max() - counts[1:].min() <= 1
    assert statistics(counts, RANKS)["maxvio"] == pytest.approx(maxvio)
    assert (counted(SHAPE, RANKS, BALANCED) == RANKS * SHAPE.rows // SHAPE.experts).all()


def test_impossible_routings_are_refused():
    for case in (Case("maxvio", 8.0), Case("even", 5.0), Case("one", 0.5)):
        with pytest.raises(ValueError, match="no routing of shape small"):
            loads(SHAPE, RANKS, case)


def test_choices_are_random_beyond_their_loads():
    even = torch.full((32,), 256)
    ids = with_loads(even, 2048, 4)
    pairs = torch.zeros(32, 32)
    for k in range(4):
        for j in range(k):
            pairs.index_put_((ids[:, k], ids[:, j]), torch.ones(2048), accumulate=True)
    met = (pairs + pairs.T)[torch.triu_indices(32, 32, 1).unbind()]
    # Any two experts meet about as often as chance has it: 2048 * (4 * 3) / (32 * 31) = 24.8.
    assert met.min() > 24.8 - 6 * 24.8**0.5 and met.max() < 24.8 + 6 * 24.8**0.5
    assert torch.equal(ids, with_loads(even, 2048, 4))


def test_every_routing_is_measured_once():
    cases = cases_of(SHAPES["A"], (1.0, 2.0), ("one", "even"), (0.0, 5.0, 12.0))
    assert cases == [BALANCED, Case("one", 2.0), Case("even", 2.0), Case("maxvio", 3.0)]


def test_the_ideal_comes_first_and_moonep_last():
    made = variants(("moonep", "alltoall"), ("te",))
    names = [(v.dispatcher, v.experts) for v in made]
    assert names == [("ideal", "ours"), ("ideal", "te"), ("alltoall", "te"), ("moonep", "ours")]
    assert made[0] == Variant("ideal", "ours")


def row(dispatcher: str, experts: str, ms: float, case: str = "even 2", **more: object) -> dict:
    samples = {"samples_ms": [ms - 1, ms, ms + 1], "forward_samples_ms": [ms / 3] * 3}
    place = {
        "shape": "A",
        "case": case,
        "kind": case.split(maxsplit=1)[0],
        "value": 2.0,
        "notes": [],
    }
    names = {"dispatcher": dispatcher, "experts": experts, "wrong": []}
    return {**place, **names, "maxvio": 1.0, "hottest_rank": 2.0, **samples, **more}


ROWS = [
    row("ideal", "ours", 20, "balanced"),
    row("alltoall", "te", 60),
    row("allgather", "te", 50),
    row("alltoall", "ours", 44),
    row("moonep", "ours", 22, duplicates=3, busiest=3, peak_mb=100.0),
    row("moonep", "ours", 20, "balanced", peak_mb=101.0),
    row("ideal", "ours", 24, "balanced"),
]


def test_ratios_are_to_the_ideal_of_the_run_and_to_the_better_baseline():
    profile = {"shape": "A", "case": "even 2", "dispatcher": "moonep", "experts": "ours"}
    rows = report.together(ROWS, [profile | {"host_syncs": 0, "exposed_push_ms": 0.5}])
    assert len(rows) == len(ROWS) - 1
    ideal, moonep = rows[0], rows[4]
    assert (ideal["ms"], len(ideal["samples_ms"])) == (22, 6)
    assert moonep["ratio_ideal"] == 1
    assert moonep["gain_te"] == 50 / 22 and moonep["gain_ours"] == 2
    assert (moonep["exposed_push_ms"], moonep["ms"]) == (0.5, 22)
    assert rows[5]["gain_te"] is None
    assert "A moonep: highest peak memory ÷ lowest over the routings 1.010" in report.findings(rows)


def test_a_wrong_row_has_no_ratio_and_says_so(tmp_path: Path):
    rows = report.together([*ROWS[:4], ROWS[4] | {"wrong": ["rank 1: output"]}], [])
    assert rows[4]["ratio_ideal"] is None and rows[4]["gain_te"] is None
    cells = [
        str(c) for t in report.tables(rows, [SHAPES["A"]]) for col in t.columns for c in col._cells
    ]
    assert "WRONG" in cells and "20.00" not in cells
    figure.draw(rows, [SHAPES["A"]], tmp_path / "new" / "layer.png")
    assert (tmp_path / "new" / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_results_of_variants_are_compared():
    good = Results({"output": torch.ones(8), "weight gradient": torch.ones(8)})
    near = Results({"output": torch.ones(8) * 1.001, "weight gradient": torch.ones(8)})
    lost = Results({"output": torch.ones(8), "weight gradient": torch.tensor([1.0] * 7 + [0.5])})
    nan = Results({"output": torch.full((8,), float("nan")), "weight gradient": torch.ones(8)})
    assert near.wrong(good) == []
    assert lost.wrong(good) == ["weight gradient differs by 1.8e-01 relative"]
    assert len(nan.wrong(good)) == 1 and len(nan.wrong(nan)) == 1


def kernel(name: str, begin: float, end: float, number: int, stream: int = 7) -> dict:
    place = {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}
    return place | {"args": {"correlation": number, "stream": stream}}


def call(name: str, at: float, number: int) -> dict:
    return {
        "cat": "cuda_runtime",
        "name": name,
        "ts": at,
        "dur": 1,
        "args": {"correlation": number},
    }


EVENTS = [
    {"cat": "user_annotation", "name": "layer pass 2", "ts": 100, "dur": 50},
    {"cat": "gpu_user_annotation", "name": "layer pass 2", "ts": 0, "dur": 500},
    call("cudaLaunchKernelExC", 90, 1),  # before the range
    call("cudaLaunchKernelExC", 101, 2),
    call("cudaLaunchKernelExC", 102, 3),
    call("cudaLaunchKernelExC", 103, 4),
    call("cudaLaunchKernelExC", 104, 5),
    call("cudaMemcpyAsync", 105, 6),
    call("cudaStreamSynchronize", 106, 7),
    call("cudaEventSynchronize", 107, 8),
    call("cudaDeviceSynchronize", 170, 9),  # the profiler's, behind the range
    kernel("early_gemm", 0, 1000, 1),
    kernel("kernel_cutlass_gemmSm90", 1000, 2000, 2),
    kernel("kernel_cutlass__push_ptr", 1500, 3000, 3, stream=9),
    kernel("kernel_cutlass__wait_pulled", 2000, 2600, 4),
    kernel("kernel_cutlass__pull_ptr", 3500, 4500, 5, stream=9),
    {
        "cat": "gpu_memcpy",
        "name": "Memcpy DtoH (Device -> Pageable)",
        "ts": 4000,
        "dur": 250,
        "args": {"correlation": 6, "stream": 7},
    },
]


def test_host_syncs_and_exposed_transfers_of_one_pass(tmp_path: Path):
    calls, work = trace.pass_of(EVENTS, "layer pass 2")
    assert [e["args"]["correlation"] for e in work] == [2, 3, 4, 5, 6]
    found = trace.summary(calls, work)
    assert (found["host_syncs"], found["copies_to_host"], found["launches"]) == (2, 1, 4)
    assert (found["push_ms"], found["pull_ms"]) == (1.5, 1.0)
    # Beside the GEMM nothing is exposed; beside a kernel that only waits, all is.
    assert (found["exposed_push_ms"], found["exposed_pull_ms"]) == (1.0, 0.75)
    assert found["idle_ms"] == 0.5
    merged = trace.merged([work, work[:1]])
    assert {e["pid"] for e in merged} == {0, 1}
    assert {e["cat"] for e in merged if e["ph"] == "X"} == {"gemm", "push", "wait", "pull", "other"}
    bench_layer.write_trace(
        tmp_path / "t" / "o.json", {"shape": "A", "case": "even 2", "events": merged}
    )
    assert json.loads((tmp_path / "t" / "o-A.json").read_text())["traceEvents"] == merged
    assert (tmp_path / "t" / "o-A.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no range"):
        trace.pass_of(EVENTS, "layer pass 3")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cuda"], "no GPU found"),
        (["--device", "cpu", "--shapes", "Z"], "'Z'"),
        (["--device", "cpu", "--shape", "x:1,2"], "not name:H,F,E,K,S"),
        (["--device", "cpu", "--shape", "x:8,8,7,2,4"], "E a multiple of the 2 ranks"),
        (["--device", "cpu", "--factors", "3"], "--factors"),
        (["--device", "cpu", "--maxvio", "-1"], "--maxvio"),
        (["--device", "cpu", "--experts", "te"], "--experts te"),
        (["--device", "cpu", "--dispatchers", "magic"], "magic"),
        (["--device", "cpu", "--dispatchers", "moonep-redispatch"], "moonep-redispatch"),
    ],
)
def test_bad_arguments_are_refused(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        bench_layer.arguments(flags)
    assert words in capsys.readouterr().err


def test_moonep_beside_alltoall_on_two_cpu_ranks(tmp_path: Path):
    out, picture = tmp_path / "new" / "layer.json", tmp_path / "new" / "layer.png"
    command = [sys.executable, SCRIPT, "--device", "cpu"]
    command += ["--dispatchers", "alltoall,moonep", "--factors", "1,2", "--maxvio", "3"]
    command += ["--iterations", "2", "--warmups", "0", "--json", out, "--png", picture]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(out.read_text())
    assert data["failures"] == {} and torch.__version__.startswith(data["versions"]["torch"])
    rows = {(r["dispatcher"], r["case"]): r for r in data["rows"]}
    cases = ["balanced", "one 2", "even 2", "maxvio 3"]
    assert list(rows) == [
        ("ideal", "balanced"),
        *((name, case) for name in ("alltoall", "moonep") for case in cases),
    ]
    for (dispatcher, case), found in rows.items():
        assert found["wrong"] == [] and 0 < found["forward_ms"] < found["ms"]
        assert found["ratio_ideal"] > 0
        if dispatcher == "moonep":
            assert found["rows_per_rank"] == [SHAPES["tiny"].rows] * 2
            assert (found["duplicates"] > 0) == (case != "balanced")
            assert found["pulled_mb"] == found["duplicates"] * 4 * 3 * 64 * 32 / 1e6
            assert found["gain_ours"] == rows["alltoall", case]["ms"] / found["ms"]
    assert rows["alltoall", "one 2"]["hottest_rank"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
