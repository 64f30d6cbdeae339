"""Recorded routing: what the training script writes, and Megatron's router trace."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from test_scripts import SMALL, train

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import simulate
from gpt_moe import arguments
from simulation.data import DataError, read


def test_a_run_records_every_microbatch(tmp_path: Path) -> None:
    """Two ranks, two microbatches a step; steps 0 and 2 of three. alltoall routes the same."""
    out = tmp_path / "run.json"
    for dispatcher, recompute in (("moonep", "full"), ("alltoall", "none")):
        folder = tmp_path / dispatcher
        flags = ["--dispatcher", dispatcher, "--steps", 3, "--global-batch", 8, "--json", out]
        flags += ["--recompute", recompute, "--record", folder, "--record-interval", 2]
        run_ranks(2, train, *flags, joined=False, timeout=120)
        names = sorted(path.name for path in folder.iterdir())
        assert names == [f"step_{s:06}_microbatch_{m:03}.json" for s in (0, 2) for m in (0, 1)]
    history = json.loads(out.read_text())
    for step in (0, 2):
        parts = [
            json.loads((tmp_path / "alltoall" / name).read_text())
            for name in names
            if f"{step:06}" in name
        ]
        assert [(part["step"], part["microbatch"]) for part in parts] == [(step, 0), (step, 1)]
        by_rank = np.array([part["rank_count"] for part in parts])
        assert by_rank.shape == (2, 2, 2, 8), "microbatches, layers, ranks, experts"
        assert (by_rank.sum(3) == 2 * 32 * 2).all(), "S*K rows of every rank"
        # alltoall's rows are those of the experts at home
        home = by_rank.sum((0, 2)).reshape(2, 2, 4).sum(2)
        assert home.tolist() == history["rows_per_rank"][step]
    one, other = (read(tmp_path / name) for name in ("moonep", "alltoall"))
    assert [a.name for a in one] == names
    assert all(
        np.array_equal(a.total_LE, b.total_LE) for a, b in zip(one[:2], other[:2], strict=True)
    )
    rows = tmp_path / "rows.json"
    assert simulate.main(["--data", str(folder), "--ranks", "2", "--json", str(rows)]) == 0
    assert len(json.loads(rows.read_text())) == 4 * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--record", "x", "--record-interval", "0"], "--record-interval 0 must be at least 1"),
        (["--record-interval", "5"], "--record-interval 5 needs --record FOLDER"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit):
        arguments.parse([*SMALL, *flags])
    assert message in capsys.readouterr().err


# Megatron's router trace ------------------------------------------------------------------------


def trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Megatron's tracer: two steps, microbatches and ranks; ids [s, m, layer, rank, token, k]."""
    from megatron.core.transformer.moe.router_trace import RouterTracer

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ids = np.random.default_rng(0).permuted(
        np.broadcast_to(np.arange(8), (2, 2, 3, 2, 5, 8)), axis=5
    )
    ids = np.sort(ids[..., :2], axis=5)
    for rank in range(2):
        tracer = RouterTracer(str(folder), max_steps=9, rank=rank, training_mode=True)
        names = [f"decoder.layers.{n}.mlp.router" for n in (1, 10)]
        hooks = [tracer.make_hook(n) for n in [*names, "mtp.layers.0.mtp_model_layer.mlp.router"]]
        for step in range(2):
            for microbatch in range(2):
                for layer, hook in enumerate(hooks):
                    chosen = torch.zeros(5, 8, dtype=torch.bool)
                    chosen.scatter_(1, torch.tensor(ids[step, microbatch, layer, rank]), True)
                    module = torch.nn.Module()
                    module.topk = 2
                    hook(module, (), (chosen.float(), chosen))
            tracer.advance_step(step + 100)
    return ids


def test_router_trace_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core.transformer.moe.router_trace")  # since 0.19
    ids = trace(tmp_path, monkeypatch)
    sets = read(tmp_path)
    assert [one.name for one in sets] == [
        f"step {s} microbatch {m}" for s in (100, 101) for m in (0, 1)
    ]
    for one, (step, microbatch) in zip(sets, np.ndindex(2, 2), strict=True):
        expected = [np.bincount(ids[step, microbatch, i].ravel(), minlength=8) for i in range(3)]
        assert one.total_LE.tolist() == np.stack(expected).tolist()
    # one rank's file, and more experts than were chosen
    (alone, *_) = read(tmp_path / "router_trace_rank1.jsonl", 12)
    assert alone.total_LE.shape == (3, 12) and alone.total_LE.sum() == 3 * 5 * 2
    assert simulate.main(["--data", str(tmp_path), "--ranks", "2,4"]) == 0


GOOD = {"step": 0, "block": "decoder", "layer": 1, "rank": 0, "top_indices": [[0, 1], [2, 3]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "router_trace_rank0.jsonl: the file is empty"),
        ("{", "router_trace_rank0.jsonl: line 1: no JSON"),
        ("[1]", "line 1: no object"),
        (GOOD | {"step": -1}, "line 1: step is -1: give a whole number"),
        (GOOD | {"layer": None}, "line 1: layer is None"),
        (GOOD | {"mtp_idx": 0.5}, "line 1: mtp_idx is 0.5"),
        (GOOD | {"top_indices": [[0, 1], [2]]}, "line 1: top_indices: give a list of tokens"),
        (GOOD | {"top_indices": [[0.5]]}, "line 1: top_indices: give a list of tokens"),
        (GOOD | {"top_indices": [[0, -2]]}, r"line 1: top_indices hold -2\.\.0: give 0\.\."),
        (GOOD | {"top_indices": []}, "top_indices: no token of any record chose an expert"),
    ],
)
def test_bad_traces(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError) as error:
        read(tmp_path)
    assert re.search(message, str(error.value)), error.value
    if content == GOOD | {"top_indices": [[0, -2]]}:
        path.write_text(json.dumps(GOOD))
        with pytest.raises(DataError, match=r"top_indices hold 0\.\.3: give 0\.\.2"):
            read(tmp_path, 3)


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([[[1, 2]], [[0, 0]]], "rank_count: give a list for each of the 1 layers"),
        ([[[1, 2], [0, -1]]], "rank_count: layer 0: rank 1, expert 1 has -1 rows"),
        ([[[1, 2], [3]]], "rank_count: layer 0: give a list of ranks"),
        ([[[1, 1], [0, 0]]], "rank_count: layer 0 does not add up to logical_count"),
        ([[[1, 2, 0]]], "rank_count: layer 0 does not add up to logical_count"),
    ],
)
def test_counts_by_rank_that_do_not_add_up(
    tmp_path: Path, by_rank: list[object], message: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"logical_count": [[1, 2]], "rank_count": by_rank}))
    with pytest.raises(DataError) as error:
        read(path)
    assert f"a.json: {message}" in str(error.value)
    path.write_text(json.dumps({"logical_count": [[1, 2]], "rank_count": [[[1, 0], [0, 2]]]}))
    assert read(path)[0].total_LE.tolist() == [[1, 2]]
