"""scripts/soak.py: a tiny soak, and that it would notice what it is there for."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import soak
from soaking import report
from soaking.settings import Settings

TINY = ["--ranks", "2", "--passes", "30", "--block", "3", "--check-every", "2", "--warmup", "3"]
TINY += ["--experts", "8", "--tokens", "12", "--delay", "0.002"]


def test_a_tiny_soak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "soak.json"
    assert soak.main([*TINY, "--json", str(out)]) == 0, capfd.readouterr()
    data = json.loads(out.read_text())
    assert data["problems"] == [] and data["settings"]["ranks"] == 2
    for result in data["ranks"]:
        assert result["passes"] == result["plans"] >= 30
        assert result["compared"] >= result["steps"] // 2 >= 5
        assert len(result["worst"]) == 5 and 0 < max(result["worst"].values()) < 1e-6
        assert len(result["memory"]) == result["steps"] // 3
    assert "collective, 2 ranks" in capfd.readouterr().out


def _settings() -> Settings:
    return soak.arguments(TINY)[0]


def _with_wrong_weights_and_plans() -> tuple[list[str], list[str]]:
    """Problems found once weights are not those of the reference; once one rank's plans differ."""
    from soaking.passes import Soak
    from soaking.ranks import _agree

    some = Soak(_settings(), dist.get_rank(), torch.device("cpu"))
    for step in range(4):
        some.step(step)
    _agree(some, dist.get_rank(), 0.0)
    assert some.problems == [] and some.compared == 2
    with torch.no_grad():
        for layer in some.layers:
            next(layer.experts.parameters()).mul_(1.001)
    for step in range(4, 10):
        some.step(step)
    weights, some.problems = some.problems, []
    if dist.get_rank() == 1:
        some.plans[0].rows_RE.view(-1)[0] += 1
    _agree(some, dist.get_rank(), 0.0)
    return weights, some.problems


def test_wrong_numbers_and_plans_are_found() -> None:
    answers = run_ranks(2, _with_wrong_weights_and_plans)
    assert any("is off by" in problem for weights, _ in answers for problem in weights)
    assert answers[0][1] == ["ranks 0 and 1: 1 plans of a block differ"]
    assert answers[1][1] == ["ranks 1 and 0: 1 plans of a block differ"]


def _result(rank: int, **changes: Any) -> dict[str, Any]:
    memory = [{"steps": 20 * i, "rss": (500 + i) << 20} for i in range(1, 20)]
    return {"rank": rank, "problems": [], "compared": 1, "memory": memory} | changes


def test_growth_and_silence_are_found() -> None:
    settings = _settings()
    assert report.problems([_result(0), _result(1)], settings) == []
    assert report.problems([_result(0)], settings) == ["1 ranks gave no result"]
    (unseen,) = report.problems([_result(0), _result(1, compared=0)], settings)
    assert unseen == "rank 1: no step was compared with the reference"
    leak = [{"steps": 20 * i, "rss": (500 + 4 * i) << 20} for i in range(1, 20)]
    (grown,) = report.problems([_result(0), _result(1, memory=leak)], settings)
    assert grown == "rank 1: rss grew from 508.0 to 572.0 MiB after warm-up"
    device = [{"steps": i, "cuda_allocated": 7 << 20} for i in range(10)]
    device += [{"steps": i, "cuda_allocated": 9 << 20} for i in range(10, 14)]
    (grown,) = report.problems([_result(0), _result(1, memory=device)], settings)
    assert "cuda_allocated grew from 7.0 to 9.0" in grown
    # The first samples may grow: that is the warm-up.
    early = [{"steps": i, "rss": (100 if i < 3 else 500) << 20} for i in range(30)]
    assert report.problems([_result(0), _result(1, memory=early)], settings) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "3"], "--experts 16 is not divisible by --ranks 3"),
        (["--slots", "5"], "--slots 5 is above --experts ÷ --ranks"),
        (["--topk", "17"], "--topk 17 is above --experts 16"),
        (["--passes", "0"], "--passes 0 must be at least 1"),
        (["--seconds", "0"], "--seconds 0.0 must be at least 1"),
        (["--check-every", "0"], "--check-every 0 must be at least 1"),
        (["--backend", "symmetric"], "needs a Hopper GPU"),
    ],
)
def test_bad_flags(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        soak.arguments(flags)
    assert message in capsys.readouterr().err
