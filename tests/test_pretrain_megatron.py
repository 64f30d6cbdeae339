"""scripts/pretrain_megatron.py on a stand-in for a checkout, or on one that MEGATRON_LM names."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import pretrain_megatron
import torchrun
from megatron_lm import log

# Prints what Megatron's loop does of two iterations; `--moe-token-dispatcher-type` shifts the loss.
SCRIPT = """
import os, sys
shift = float(os.environ.get("SHIFT", 0)) * (sys.argv[-1] == "moonep")
if "--fail" in sys.argv:
    sys.exit("[rank0] ValueError: no such thing")
for i, loss in enumerate((7.0, 6.5), 1):
    print(f" [date] iteration {i:8}/ {2:8} | elapsed time per iteration (ms): 12.5 |"
          f" lm loss: {loss + shift:.6E} | number of skipped iterations: 0 |")
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torchrun, "command", lambda ranks: [sys.executable])
    folder = tmp_path / "checkout"
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("__version__ = '0.19.0'")
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    return folder


def _main(checkout: Path, *arguments: str) -> int:
    words = ["--megatron-lm", str(checkout), "--cpu", "--ranks", "2", "--steps", "2", *arguments]
    return pretrain_megatron.main(words)


def test_the_same_losses_pass(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out" / "losses.json"
    assert _main(checkout, "--runs", "stock", "moonep", "--json", str(out)) == 0
    result = json.loads(out.read_text())
    assert result["largest_relative_difference"] == {"stock": 0.0, "moonep": 0.0}
    assert result["runs"]["moonep"]["lm loss"] == [7.0, 6.5]
    assert result["core"] == "0.19.0"
    printed = capsys.readouterr().out
    assert "-m moonep_megatron.run pretrain_gpt.py FLAGS" in printed
    assert "--moe-token-dispatcher-type moonep" in printed


def test_other_losses_fail(checkout: Path, monkeypatch, capsys):
    monkeypatch.setenv("SHIFT", "0.01")
    assert _main(checkout, "--runs", "stock", "enabled") == 1
    assert "losses of enabled differ from stock" in capsys.readouterr().out


def test_a_nan_is_another_loss():
    good, bad = {"lm loss": [7.0, 6.9, 6.5]}, {"lm loss": [7.0, math.nan, 6.5]}
    (problem,) = pretrain_megatron.check({"stock": good, "moonep": bad}, 1e-4)
    assert "moonep differ from stock by nan" in problem


def test_a_run_that_fails_says_why(checkout: Path, capsys):
    assert _main(checkout, "--runs", "stock", "--", "--fail") == 1
    printed = capsys.readouterr().out
    assert "ValueError: no such thing" in printed and "stock did not run to its end" in printed


def test_a_run_that_stops_early_fails(checkout: Path, capsys):
    assert _main(checkout, "--runs", "stock", "--steps", "3") == 1
    assert "logged other iterations than 1 to 3" in capsys.readouterr().out


def test_bad_input_is_named(tmp_path: Path, checkout: Path, capsys):
    for words, named in (
        ([str(tmp_path)], "holds no pretrain_gpt.py"),
        ([str(checkout), "--ranks", "0"], "--ranks 0"),
        ([str(checkout), "--cpu", "--backend", "symmetric"], "--backend symmetric needs GPUs"),
        ([str(checkout), "--cpu", "--te"], "--te needs GPUs"),
    ):
        with pytest.raises(SystemExit):
            pretrain_megatron.main(["--megatron-lm", *words])
        assert named in capsys.readouterr().err


def test_one_word_differs_between_dispatchers(checkout: Path):
    args = pretrain_megatron.parse(["--megatron-lm", str(checkout), "--cpu"])
    ours, theirs = (pretrain_megatron.flags(args, name) for name in ("moonep", "alltoall"))
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == [
        ("moonep", "alltoall")
    ]


def test_entries_are_read_from_between_other_output():
    text = (
        "noise iteration 1/ 2 | a b: 1.5E+00 | c: nan |\nmore\n iteration 2/ 2 | a b: 2 |[rank1] x"
    )
    first, second = log.iterations(text)
    assert first["iteration"] == 1 and first["a b"] == 1.5 and math.isnan(first["c"])
    assert second == {"iteration": 2, "a b": 2}


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout")
@pytest.mark.timeout(600)
def test_of_a_real_checkout(tmp_path: Path):
    words = ["--megatron-lm", os.environ["MEGATRON_LM"], "--cpu", "--steps", "3"]
    assert pretrain_megatron.main([*words, "--runs", "stock", "moonep"]) == 0
