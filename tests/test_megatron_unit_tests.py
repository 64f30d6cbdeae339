"""scripts/megatron_unit_tests.py and its plugin, on a stand-in for a checkout."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import megatron_unit_tests
import torchrun

TESTS = """
import os
import pytest
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

BROKEN = os.environ.get("BROKEN") == os.environ["UNIT_TESTS_DISPATCHER"]

def config(**changes):
    options = dict(num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=2)
    return TransformerConfig(**options | {"moe_token_dispatcher_type": "alltoall"} | changes)

@pytest.mark.parametrize("name", ["alltoall", "allgather"])
def test_replaced(name):
    tensor = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    got = config(moe_token_dispatcher_type=name, **tensor)
    assert got.moe_token_dispatcher_type == os.environ["UNIT_TESTS_DISPATCHER"]
    assert got.expert_tensor_parallel_size == 1

def test_refused():
    config(moe_expert_capacity_factor=1.0)

def test_layer():
    kind = type(MoELayer.__new__(MoELayer, config())).__name__
    ours = os.environ["UNIT_TESTS_DISPATCHER"] == "moonep"
    assert kind == ("MoonEPMoELayer" if ours else "MoELayer")

def test_without_a_dispatcher():
    assert not BROKEN

def test_with_one():
    config()
    assert not BROKEN

def test_fails_always():
    config()
    raise ValueError("no such thing")

@pytest.mark.skip("not today")
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torchrun, "command", lambda ranks: [sys.executable])
    monkeypatch.setenv("RANK", "0")  # as torchrun would say; the stand-ins look at it
    folder = tmp_path / "checkout"
    (folder / megatron_unit_tests.FOLDER).mkdir(parents=True)
    (folder / megatron_unit_tests.FOLDER / "test_moe_layer.py").write_text(TESTS)
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("__version__ = '0.19.0'")
    return folder


def _main(checkout: Path, *words: str) -> int:
    return megatron_unit_tests.main(
        ["--megatron-lm", str(checkout), "--cpu", "--ranks", "1", *words]
    )


def test_ends_are_told_apart(checkout: Path, tmp_path: Path, capsys) -> None:
    out, table = tmp_path / "results.json", tmp_path / "table.md"
    assert _main(checkout, "--json", str(out), "--markdown", str(table)) == 0
    ends = {r["test"].partition("::")[2]: r for r in json.loads(out.read_text())}
    assert {name: r["end"] for name, r in ends.items()} == {
        "test_replaced[alltoall]": "passed",
        "test_replaced[allgather]": "passed",
        "test_refused": "refused",
        "test_layer": "passed",
        "test_without_a_dispatcher": "other",
        "test_with_one": "passed",
        "test_fails_always": "alltoall",
        "test_skipped": "skipped",
    }
    assert ends["test_refused"]["why"].startswith("--moe-expert-capacity-factor = 1.0: every rank")
    lines = table.read_text().splitlines()
    assert "| `test_moe_layer.py::test_replaced` | 2 | 0 |  |" in lines
    assert (
        "| `test_moe_layer.py::test_skipped` | 0 | 1 | Megatron skips it: not today (1) |" in lines
    )


def test_what_only_moonep_breaks_fails(checkout: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("BROKEN", "moonep")
    assert _main(checkout, "--", "-k", "with_one or fails_always") == 1
    assert "FAILED test_moe_layer.py::test_with_one: AssertionError" in capsys.readouterr().out


def test_a_run_that_breaks_off_says_so(checkout: Path, capsys) -> None:
    assert _main(checkout, "--", "--no-such-flag") == 1
    printed = capsys.readouterr().out
    assert "the tests with alltoall did not end (exit code 4)" in printed
    assert "--no-such-flag" in printed


def test_bad_input_is_named(tmp_path: Path, checkout: Path, capsys) -> None:
    for words, named in (
        ([str(tmp_path)], "holds no unit tests"),
        ([str(checkout), "--ranks", "0"], "--ranks 0"),
    ):
        with pytest.raises(SystemExit):
            megatron_unit_tests.main(["--megatron-lm", *words])
        assert named in capsys.readouterr().err


def test_a_test_has_passed_if_it_has_on_every_rank() -> None:
    line = {"test": "t", "why": "", "asked": []}
    ranks = [[line | {"outcome": o}] for o in ("passed", "skipped", "failed", "passed")]
    assert megatron_unit_tests.merge(ranks)["t"]["outcome"] == "failed"
    assert megatron_unit_tests.merge(ranks[:1])["t"]["outcome"] == "passed"
