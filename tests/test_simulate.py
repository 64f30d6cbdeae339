"""scripts/simulate.py: files it reads and refuses, rows it writes, times it predicts."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import simulate
from simulation.data import DataError, read, together
from simulation.quality import judge
from simulation.synthetic import Synthetic
from simulation.times import Model

from moonep_megatron.bounds import bounds
from moonep_megatron.plan import make_plan

ROUTING = Path(__file__).parents[2] / "shared" / "routing"
KEYS = {
    "data",
    "layer",
    "ranks",
    "duplicates",
    "duplicates_bound",
    "busiest",
    "busiest_bound",
    "pairs_busiest",
    "pairs_duplicates",
}


def run(folder: Path, *flags: object, data: object = None) -> list[dict[str, Any]]:
    out = folder / "rows.json"
    code = simulate.main(
        [*(["--data", str(data)] if data else []), *map(str, flags), "--json", str(out)]
    )
    assert code == 0
    return json.loads(out.read_text())


def write(path: Path, content: object) -> Path:
    if path.suffix == ".npy":
        np.save(path, content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# Rows -------------------------------------------------------------------------------------------


def test_rows_of_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    ids = draw.choice(16, (3, 50, 4), p=np.arange(16) / 120).astype(np.uint8)
    counts = draw.integers(0, 99, (2, 8))
    counts[1] = 0
    data = tmp_path / "data"
    data.mkdir()
    write(data / "a_topk.npy", ids)
    write(data / "b.npy", counts)
    write(data / "c.json", {"logical_count": counts.tolist()})
    (data / "README.md").write_text("no data")

    rows = run(tmp_path, "--ranks", "4,8,16", "--png", tmp_path / "x.png", data=data)
    said = capsys.readouterr().out
    assert set(KEYS) <= set(rows[0])
    found = [(row["data"], row["layer"], row["ranks"]) for row in rows]
    expected = [("a_topk.npy", layer, ranks) for ranks in (4, 8, 16) for layer in range(3)]
    expected += [(name, 0, ranks) for name in ("b.npy", "c.json") for ranks in (4, 8)]
    assert found == expected
    assert "b.npy has 8 experts, no multiple of 16: skipped there" in said
    assert "b.npy: layer 1 has no routed rows: skipped" in said
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    totals = {"a_topk.npy": [np.bincount(layer.ravel(), minlength=16) for layer in ids]}
    totals |= {"b.npy": counts, "c.json": counts}
    for row in rows:
        check_row(row, totals[row["data"]][row["layer"]].tolist(), "best")


def test_rows_within_a_slack(tmp_path: Path) -> None:
    counts = np.random.default_rng(1).integers(0, 3000, (3, 16))
    counts[:, 0] += 9000
    path = write(tmp_path / "a.npy", counts)
    rows = run(tmp_path, "--ranks", 4, "--slack", "0,0.05", "--png", tmp_path / "x.png", data=path)
    assert [row["slack"] for row in rows] == [0] * 3 + [0.05] * 3
    for row in rows:
        check_row(row, counts[row["layer"]].tolist(), "best")
        assert row["pushed_mb"] == row["duplicates"] * 3 * 7168 * 2048 * 2 / 1e6
    assert max(row["fullest_rank"] for row in rows[3:]) == pytest.approx(1.05, abs=1e-3)
    # what a slack saves in weights it costs in products
    model = Model(link=1e9)
    assert model.times(rows[3])["moonep_ms"] > model.times(rows[0])["moonep_ms"]


def check_row(row: dict[str, Any], total_E: Sequence[int], planner: str) -> None:
    """The counts in a row are those of the plan that the layer would use."""
    counts = torch.zeros(row["ranks"], len(total_E), dtype=torch.int64)
    counts[0] = torch.tensor(total_E)
    slack = round(row["slack"] * 10_000)
    plan, pairs = (
        make_plan(counts, planner=planner, slack=slack),
        make_plan(counts, planner="pairs"),
    )
    assert row["best_busiest"] == make_plan(counts, slack=slack).busiest
    assert row["fullest_rank"] == pytest.approx(int(plan.cap_R.max()) * row["ranks"] / sum(total_E))
    least = bounds(total_E, row["ranks"], slack)
    assert (row["busiest"], row["duplicates"]) == (plan.busiest, plan.duplicates)
    assert (row["pairs_busiest"], row["pairs_duplicates"]) == (pairs.busiest, pairs.duplicates)
    assert (row["busiest_bound"], row["duplicates_bound"]) == (least.busiest, least.duplicates)
    assert row["sent"] == plan.sent_R.tolist() and row["received"] == plan.received_R.tolist()
    assert row["rule"] == plan.rule
    home_R = torch.arange(len(total_E)) // (len(total_E) // row["ranks"])
    foreign = plan.rows_RE[home_R != torch.arange(row["ranks"])[:, None]]
    assert row["tiny"] == int(((foreign > 0) & (foreign < 128)).sum())
    padded = ((plan.rows_RE + 127) // 128 * 128).sum(1).max()
    assert row["padded"] == pytest.approx(float(padded) * row["ranks"] / sum(total_E))


def test_ids_of_absent_choices_and_experts_that_nobody_chose(tmp_path: Path) -> None:
    path = write(tmp_path / "ids.npy", np.array([[[0, 3], [-1, 3]]]))
    assert read(path)[0].total_LE.tolist() == [[1, 0, 0, 2]]
    assert read(path, 6)[0].total_LE.tolist() == [[1, 0, 0, 2, 0, 0]]


def test_data_sets_together(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, rows in (("a.json", [[1, 2]]), ("b.json", [[5, 6]]), ("c.json", [[1, 2, 3, 4]])):
        write(data / name, {"logical_count": rows})
    sets = read(data)
    assert together(sets, ["a.json", "b.json"]).total_LE.tolist() == [[6, 8]]
    with pytest.raises(DataError, match=r"there is no d\.json in --data"):
        together(sets, ["a.json", "d.json"])
    with pytest.raises(DataError, match="differ"):
        together(sets, ["a.json", "c.json"])
    rows = run(tmp_path, "--ranks", 2, "--together", "a.json,b.json", data=data)
    assert [row["data"] for row in rows][-1] == "a.json+b.json"
    # one file that fits is enough
    rows = run(tmp_path, "--ranks", 4, data=data)
    assert [row["data"] for row in rows] == ["c.json"]


def test_synthetic_routing_comes_from_its_seed(tmp_path: Path) -> None:
    flags = ["--synthetic", "zipf,dirichlet", "--experts", 32, "--layers", 3, "--ranks", "8,16"]
    flags += ["--tokens", 100, "--topk", 2]
    first, again = run(tmp_path, *flags), run(tmp_path, *flags)
    assert first == again and len(first) == 2 * 3 * 2
    assert first != run(tmp_path, *flags, "--seed", 5)
    total_LE = Synthetic("zipf", 256, 40, seed=1).total_LE(10**8)
    assert (total_LE.sum(1) == 10**8).all()
    # the popularity is the given law, and its order drifts
    falling = np.sort(total_LE, 1)[:, ::-1].mean(0)
    law = np.arange(1, 257) ** -0.8
    assert np.abs(falling / falling.sum() * law.sum() / law - 1).max() < 0.02
    likeness = [np.corrcoef(total_LE[0], total_LE[step])[0, 1] for step in (1, 39)]
    assert likeness[0] > 0.5 > abs(likeness[1])


def test_reuse_over_the_microbatches_of_a_step(tmp_path: Path) -> None:
    """The same tokens again need no push; other ones only what the slots do not hold."""
    part = np.random.default_rng(3).choice(16, (2, 200, 4), p=np.arange(16) / 120)
    ids = np.concatenate([part, part, part], axis=1)
    path = write(tmp_path / "ids.npy", ids)
    rows = run(tmp_path, "--reuse", "--microbatches", 3, "--ranks", "2,4", data=path)
    assert [(row["layer"], row["ranks"]) for row in rows] == [(0, 2), (1, 2), (0, 4), (1, 4)]
    for row in rows:
        counts = torch.zeros(row["ranks"], 16, dtype=torch.int64)
        counts[0] = torch.from_numpy(np.bincount(part[row["layer"]].ravel(), minlength=16))
        plan = make_plan(counts)
        assert row["kept_duplicates"] == row["preferred_duplicates"] == 3 * plan.duplicates
        assert row["kept_pushed"] == row["preferred_pushed"] == plan.duplicates > 0
    # recorded by microbatch, one of them without a second
    data = tmp_path / "data"
    data.mkdir()
    for name, rows_of in (("0_microbatch_0", [9, 1]), ("0_microbatch_1", [1, 9]), ("1", [4, 4])):
        write(data / f"step_{name}.json", {"logical_count": [rows_of]})
    (row,) = run(tmp_path, "--reuse", "--ranks", 2, "--slack", 0.1, data=data)
    # expert 0 goes to rank 1, then expert 1 to rank 0: nothing can be kept
    assert (row["data"], row["kept_pushed"], row["preferred_pushed"]) == ("step_0", 2, 2)


def test_reuse_of_fewer_slots(tmp_path: Path) -> None:
    """What goes through one slot in several waves is there neither in backward nor later."""
    path = write(tmp_path / "ids.npy", np.repeat(np.arange(8), 25)[None, :, None] % 4)
    rows = []
    for slots in (4, 1):
        flags = ["--microbatches", 1, "--experts", 8, "--ranks", 2, "--slots", slots]
        data = tmp_path / f"data{slots}"
        data.mkdir()
        for microbatch in range(2):
            counts = read(path, 8)[0].total_LE.tolist()
            write(data / f"step_0_microbatch_{microbatch}.json", {"logical_count": counts})
        rows += run(tmp_path, "--reuse", *flags, data=data)
    assert [row["slots"] for row in rows] == [4, 1]
    assert rows[0]["preferred_pushed"] == rows[0]["preferred_duplicates"] / 2
    assert rows[1]["preferred_pushed"] == 2 * rows[1]["preferred_duplicates"] > 4


# Refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "", "a.json: the file is empty"),
        ("a.json", "{", "a.json: no JSON"),
        ("a.json", [[1, 2]], "a.json: no object with the key logical_count"),
        ("a.json", {"logical_count": []}, "a.json: logical_count: give a list of layers"),
        ("a.json", {"logical_count": [[1, 2], [3]]}, "a.json: logical_count: give a list"),
        ("a.json", {"logical_count": [["x", "y"]]}, "a.json: logical_count: give a list"),
        ("a.json", {"logical_count": [[1, 2], [3, -4]]}, "logical_count: layer 1, expert 1 has -4"),
        ("a.json", '{"logical_count": [[1, NaN]]}', "logical_count: layer 0, expert 1 has nan"),
        ("a.json", {"logical_count": [[1, 0.5]]}, "layer 0, expert 1 has 0.5 rows: give a whole"),
        ("a.json", {"logical_count": [[1, 2**40]]}, "layer 0, expert 1 has 1099511627776"),
        (
            "a.json",
            {"logical_count": [[1, 2, 3]]},
            r"a.json has 3 experts, no multiple of 2 \(--ranks\)",
        ),
        ("a.json", {"logical_count": [[0, 0]]}, "no layer has routed rows"),
        ("a.npy", np.zeros(4, dtype=int), r"a.npy: the array has shape \[4\]"),
        ("a.npy", np.zeros((1, 0), dtype=int), r"a.npy: the array has shape \[1, 0\]"),
        ("a.npy", np.full((1, 2), -1), "a.npy: counts: layer 0, expert 0 has -1"),
        ("a.npy", np.full((1, 2, 2), 0.5), "a.npy: ids have dtype float64"),
        ("a.npy", np.full((1, 2, 2), -2), "a.npy: ids hold -2..-2"),
        ("a.npy", np.array([[1, None]]), "a.npy: not a .npy file of numbers"),
        ("a.txt", "1 2", "no .npy or .json file"),
    ],
)
def test_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: object, message: str
) -> None:
    write(tmp_path / name, content)
    assert simulate.main(["--data", str(tmp_path), "--ranks", "2"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --data or --synthetic"),
        (["--synthetic", "even"], "is no list of zipf, dirichlet"),
        (["--synthetic", "zipf", "--ranks", "0"], "'0' is no list of whole numbers above 0"),
        (["--synthetic", "zipf", "--ranks", "256"], "--ranks 256: at most 128"),
        (["--synthetic", "zipf", "--link", "0"], "--link: 0 is not above 0"),
        (
            ["--synthetic", "zipf", "--slack", "0,2"],
            "--slack: '0,2' is no list of slacks: slack 2.0",
        ),
        (["--synthetic", "zipf", "--reuse"], "--reuse needs --data"),
        (["--synthetic", "zipf", "--slack", "1%"], "--slack: '1%' is no list of slacks"),
        (["--synthetic", "zipf", "--tflops", "nan"], "--tflops: nan is not above 0"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        simulate.main(flags)
    assert message in capsys.readouterr().err


def test_missing_folder_and_what_does_not_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "ids.npy", np.zeros((1, 3, 2), dtype=int))
    flags = ["--data", str(path), "--experts", "2", "--ranks", "2", "--reuse"]
    assert simulate.main(flags) == 2
    assert "--reuse: no step has several microbatches" in capsys.readouterr().err
    assert simulate.main([*flags, "--microbatches", "4"]) == 2
    assert "ids.npy: 3 tokens are no 4 microbatches" in capsys.readouterr().err
    assert simulate.main(["--data", "/nowhere"]) == 2
    assert "/nowhere: neither a folder nor" in capsys.readouterr().err
    assert simulate.main(["--synthetic", "zipf", "--experts", "100", "--ranks", "64"]) == 2
    assert "--experts 100 is no multiple of --ranks 64" in capsys.readouterr().err


# Times ------------------------------------------------------------------------------------------


def test_predicted_times_by_hand() -> None:
    model = Model(
        width=1000, ffn=100, topk=1, tokens=1000, node=2, link=1, network=0.5, tflops=1, launch=0.01
    )
    # rank 0 holds all rows of its two experts, 1000 for each rank of four
    row = judge([2000, 2000, 0, 0, 0, 0, 0, 0], 4, "pairs", node=2)
    assert (row["hottest_rank"], row["busiest"], row["duplicates"]) == (4, 3, 3)
    # of three duplicates one stays in the node
    assert (row["near_busiest"], row["far_busiest"]) == (1, 2)
    times = model.times(row)
    # an exchange of 1000 rows of 2 kB: a quarter to the neighbour at 1 GB/s, half afar at 0.5
    rows_ms = 2.0
    gemm_ms = 1e3 * 1000 * 2 * 300_000 / 1e12
    assert times["balanced_ms"] == pytest.approx(4 * rows_ms + 3 * gemm_ms + 24e-5)
    assert times["alltoall_ms"] == pytest.approx(4 * (4 * rows_ms + 3 * gemm_ms) + 24e-5)
    # 0.6 MB an expert, two of them afar: 2.4 ms, more than the 0.6 ms of a product
    push = 2.4
    expected = 4 * rows_ms + max(gemm_ms, push) + max(2 * gemm_ms, 3 * push) + 36e-5
    assert times["moonep_ms"] == pytest.approx(expected)


# Recorded routing -------------------------------------------------------------------------------


@pytest.mark.skipif(not ROUTING.is_dir(), reason="needs the recorded routing")
def test_quality_on_recorded_routing(tmp_path: Path) -> None:
    """Sums over all layers of all files: never above pairs, and this near to the bound."""
    most = {8: 1.1, 16: 1.15, 32: 1.1, 64: 1.02}
    both = "law_topk.npy,intent_topk.npy"
    rows = run(tmp_path, "--ranks", "8,16,32,64", "--together", both, data=ROUTING)
    assert all(row["busiest"] <= row["pairs_busiest"] for row in rows)
    added = [row for row in rows if "+" in row["data"] and row["ranks"] == 32]
    assert len(added) == 26
    assert sum(row["busiest"] for row in added) / 26 <= 1.9
    duplicates = sum(row["duplicates"] for row in added)
    assert duplicates <= 1.2 * sum(row["pairs_duplicates"] for row in added)
    for ranks, limit in most.items():
        own = [row for row in rows if row["ranks"] == ranks and "+" not in row["data"]]
        assert len(own) >= 70
        bound = sum(row["busiest_bound"] for row in own)
        assert bound <= sum(row["busiest"] for row in own) <= limit * bound
