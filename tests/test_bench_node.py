"""scripts/bench_node.sh and warm_kernels.py, as far as a machine without GPUs can tell."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))


def _node(*arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPTS / "bench_node.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_usage_and_unknown_sections_run_nothing(tmp_path: Path):
    usage, unknown = _node(), _node(str(tmp_path / "out"), "kernels", "magic")
    assert (usage.returncode, unknown.returncode) == (2, 2)
    assert "bench_node.sh OUT" in usage.stderr and "magic" in unknown.stderr
    assert not (tmp_path / "out").exists()


def test_every_kernel_that_lists_configurations_is_compiled():
    pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")
    import warm_kernels

    modules = {name.rpartition(".")[2] for name, _ in warm_kernels.places()}
    listing = {
        p.stem for p in (SCRIPTS.parent / "kernels").glob("*.py") if "def configs(" in p.read_text()
    }
    assert modules == listing and {"plan", "dispatch", "push_weights"} <= modules
