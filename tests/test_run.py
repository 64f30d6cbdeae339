"""`python -m`: run.py starts scripts as Python would, and the package prints its tables."""

import os
import sys

import pytest
from fresh import python

from moonep_megatron import features, refusals, run

SCRIPT = """
import sys, typing
import neighbour
from megatron.core.transformer.transformer_config import TransformerConfig
field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
assert "moonep" in typing.get_args(field.type)
print(__name__, sys.argv, sys.path[0], sep="|")
raise SystemExit(7)
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "neighbour.py").write_text("")
    (tmp_path / "flags.yaml").write_text("num-layers: 4\nswiglu: true\n")
    link = tmp_path / "link.py"
    link.symlink_to(folder / "train.py")
    return link


def test_run_starts_a_script_as_python_would(script):
    words = ["--num-layers", "8", "--help"]
    done = python("-m", "moonep_megatron.run", "--arguments", str(script.parent / "flags.yaml"),
                  str(script), *words)  # fmt: skip
    assert done.returncode == 7, done.stderr
    name, argv, path = done.stdout.strip().splitlines()[-1].split("|")
    assert name == "__main__"
    assert argv == str([str(script), "--num-layers", "4", "--swiglu", *words])
    assert path == str(script.parent / "scripts")


def test_a_checkouts_own_megatron_is_the_one_enabled(script, monkeypatch):
    """`enable()` imports Megatron, which must come from beside the script, as the script's does."""
    seen = []
    monkeypatch.setattr(run, "enable", lambda: seen.append(sys.path[0]))
    monkeypatch.setattr(run.runpy, "run_path", lambda *_, **__: None)
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path[1:]])
    monkeypatch.setattr(sys, "argv", ["run", str(script)])
    run.main()
    assert seen == [str(script.parent / "scripts")]


def test_run_starts_a_module(script):
    # PYTHONPATH makes the module importable; its neighbour is found the same way.
    os.environ["PYTHONPATH"] = str(script.parent / "scripts")
    try:
        done = python("-m", "moonep_megatron.run", "-m", "train", "-m", "x")
    finally:
        del os.environ["PYTHONPATH"]
    assert done.returncode == 7, done.stderr
    name, argv, _ = done.stdout.strip().splitlines()[-1].split("|")
    assert name == "__main__"
    assert argv == str([str(script.parent / "scripts" / "train.py"), "-m", "x"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "no script to run"),
        (["--num-layers", "4"], "unknown option --num-layers"),
        (["-m"], "-m needs a value"),
        (["--arguments"], "--arguments needs a value"),
        (["missing.py"], "no script missing.py"),
    ],
)
def test_run_explains_its_usage(words, problem):
    done = python("-m", "moonep_megatron.run", *words)
    assert done.returncode == 2
    assert "usage: python -m moonep_megatron.run" in done.stderr
    assert problem in done.stderr


def test_run_help():
    done = python("-m", "moonep_megatron.run", "--help")
    assert done.returncode == 0
    assert "usage: python -m moonep_megatron.run" in done.stdout


def test_package_prints_the_tables():
    tables = f"{features.markdown()}\n\n{refusals.markdown()}"
    assert python("-m", "moonep_megatron").stdout.strip() == tables
