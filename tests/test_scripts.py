"""The scripts as a user starts them: runs, pictures, failures, resumption, and finding Python."""

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import run_ranks

SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = [
    "--layers",
    "2",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--ffn",
    "32",
    "--experts",
    "8",
    "--seq",
    "32",
    "--router-skew",
    "1",
]
LAYERS, RANKS, STEPS = 2, 2, 3
ROWS = 2 * 32 * 2  # micro batch x seq x topk: S*K


def run(command: list[object], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def compare(*flags: object) -> subprocess.CompletedProcess[str]:
    script = SCRIPTS / "compare_dispatchers.py"
    return run([sys.executable, script, "--ranks", RANKS, "--steps", STEPS, *SMALL, *flags])


def train(*flags: object) -> None:
    """On a rank: the training script from its first line to its last."""
    sys.path.insert(0, str(SCRIPTS))
    sys.argv = ["train_gpt_moe.py", *map(str, [*SMALL, *flags])]
    runpy.run_path(str(SCRIPTS / sys.argv[0]), run_name="__main__")


def load(name: str):
    """A script as a module, to test its functions without ranks."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return load("compare_dispatchers")


def test_compare_on_two_ranks(tmp_path: Path):
    out, picture = tmp_path / "out" / "compare.json", tmp_path / "out" / "compare.png"
    done = compare("--json", out, "--png", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(out.read_text())
    assert data["problems"] == [] and data["balanced_rows"] == ROWS
    for a, b in zip(data["alltoall"]["loss"], data["moonep"]["loss"], strict=True):
        assert abs(a - b) <= 1e-4 * abs(a)
    assert data["moonep"]["rows_per_rank"] == [[[ROWS] * RANKS] * LAYERS] * STEPS
    skewed = data["alltoall"]["rows_per_rank"]
    assert all(sum(rows) == ROWS * RANKS for layers in skewed for rows in layers)
    assert max(max(rows) for layers in skewed for rows in layers) > 1.2 * ROWS
    for key in ("maxvio", "hottest_rank_without", "duplicates"):
        values = data["moonep"][key]
        assert len(values) == STEPS and all(len(layers) == LAYERS for layers in values)
    # The skew that moonep reports is the one that alltoall suffered.
    for reported, rows in zip(data["moonep"]["hottest_rank_without"], skewed, strict=True):
        assert reported == pytest.approx([max(layer) / ROWS for layer in rows], rel=0.02)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_failing_rank_ends_the_comparison(tmp_path: Path):
    began = time.monotonic()
    """Its peer waits for it in an exchange of counts; torchrun ends both."""
    done = compare("--fail-at", "1:1", "--dispatchers", "moonep", "--json", tmp_path / "no.json")
    assert done.returncode == 1
    assert "--fail-at 1:1: this rank was told to fail" in done.stderr
    assert "moonep run failed" in done.stdout
    assert time.monotonic() - began < 150
    assert not (tmp_path / "no.json").exists()
    assert gone(str(SCRIPTS / "train_gpt_moe.py"), "--fail-at", "1:1")


def test_a_run_over_its_time_is_stopped():
    done = compare("--timeout", 4, "--seed", 987)
    assert done.returncode == 1
    assert "--timeout 4" in done.stdout
    assert gone(str(SCRIPTS / "train_gpt_moe.py"), "--seed", "987")


def test_ranks_do_not_outlive_torchrun(tmp_path):
    script = str(SCRIPTS / "train_gpt_moe.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, script, "--seed", "986", "--steps", "9999"]
    env, output = os.environ | {"CUDA_VISIBLE_DEVICES": ""}, tmp_path / "output"
    with output.open("w") as out:
        torchrun = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while len(processes_with(script, "986")) < 3 and time.monotonic() < end:
            time.sleep(0.1)
        assert len(processes_with(script, "986")) >= 3, f"no ranks: {output.read_text()}"
        time.sleep(1)  # Python itself is up
    finally:
        torchrun.kill()
        torchrun.wait()
    assert gone(script, "986")


def gone(*words: str) -> bool:
    """Whether no such process runs, or soon none: a killed one takes a while on a busy machine."""
    end = time.monotonic() + 20
    while processes_with(*words) and time.monotonic() < end:
        time.sleep(0.2)
    return not processes_with(*words)


def processes_with(*words: str) -> list[str]:
    """Command lines of running processes that contain the words next to each other or not."""
    listing = run(["ps", "-ww", "-eo", "args"]).stdout.splitlines()
    return [line for line in listing if all(word in line for word in words)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--experts", 7], "--experts 7 is not divisible by --ep 2"),
        (["--ep", 3], "--ep 3 does not divide the 2 ranks"),
        (["--topk", 9], "--topk 9 is above --experts 8"),
        (["--global-batch", 5], "--global-batch 5 is not a multiple"),
        (["--hidden", 30, "--heads", 4], "--hidden 30 must be a multiple of twice --heads 4"),
        (["--seq", 0], "--seq 0 must be at least 1"),
        (["--ranks", 0], "--ranks 0 must be at least 1"),
        (["--dispatchers", "magic"], "magic"),
    ],
)
def test_bad_flags_are_named_before_anything_starts(
    flags: list[object], message: str, comparison, monkeypatch, capsys
):
    monkeypatch.setattr(comparison.subprocess, "Popen", None)
    command = ["--ranks", RANKS, "--steps", STEPS, *SMALL, *flags]
    try:
        code = comparison.main(list(map(str, command)))
    except SystemExit as end:  # argparse
        code = end.code
    assert code != 0
    assert message in "".join(capsys.readouterr())


def test_bad_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpt_moe import text

    with pytest.raises(ValueError, match=r"--text .*gone.txt is not a file"):
        text.read_text(tmp_path / "gone.txt", 8)
    short = tmp_path / "short.txt"
    short.write_bytes(b"eight by")
    with pytest.raises(ValueError, match=r"has 8 bytes, but --seq 8 needs at least 9"):
        text.read_text(short, 8)
    assert len(text.read_text(short, 7)) == 8
    assert len(text.read_text(None, 8)) > 100_000


def test_samples_do_not_depend_on_how_ranks_share_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpt_moe import text

    corpus = text.read_text(None, 16)
    whole = text.batch(corpus, seed=3, step=7, samples=range(6), seq=16)
    part = text.batch(corpus, seed=3, step=7, samples=range(2, 5), seq=16)
    for name, values in part.items():
        assert values.equal(whole[name][2:5]), name
    assert whole["labels"][:, :-1].equal(whole["tokens"][:, 1:])


def test_checks_of_the_comparison_can_fail(comparison):
    good = {"loss": [2.0, 1.0], "rows_per_rank": [[[4, 4]], [[4, 4]]]}
    other = {"loss": [2.0, 1.00009], "rows_per_rank": [[[7, 1]], [[4, 4]]]}
    assert comparison.check({"alltoall": other, "moonep": good}, 4, 1e-4) == []
    far = good | {"loss": [2.0, 1.0002]}
    assert "losses differ" in comparison.check({"alltoall": far, "moonep": good}, 4, 1e-4)[0]
    nan = good | {"loss": [2.0, float("nan")]}
    assert "losses differ" in comparison.check({"alltoall": nan, "moonep": good}, 4, 1e-4)[0]
    uneven = good | {"rows_per_rank": [[[4, 4]], [[5, 3]]]}
    problem = comparison.check({"alltoall": good, "moonep": uneven}, 4, 1e-4)[0]
    assert "step 2, MoE layer 1" in problem and "[5, 3]" in problem


def test_repeated_runs_hold_moonep_to_itself_and_to_the_spread_of_the_others(comparison):
    theirs = [[2.0, 1.0], [2.0, 1.01]]
    near = comparison.repetition({"alltoall": theirs, "moonep": [[2.0, 1.015]] * 2})
    assert near["problems"] == []
    assert near["spread"] == pytest.approx(0.01)
    assert near["distance"] == pytest.approx(0.005 / 1.01)
    far = comparison.repetition({"alltoall": theirs, "moonep": [[2.0, 1.03]] * 2})
    assert "nearest" in far["problems"][0]
    unequal = comparison.repetition(
        {"alltoall": theirs, "moonep": [[2.0, 1.0], [2.0, 1.0 + 1e-12]]}
    )
    assert unequal["problems"] == ["moonep, run 2: not run 1's losses, from step 2 on"]
    once = comparison.repetition({"alltoall": theirs[:1], "moonep": [[2.0, 1.5]]})
    assert once["problems"] == [] and once["spread"] == 0


def test_checkpoint_moves_between_dispatchers_and_ep_sizes(tmp_path: Path):
    """alltoall EP=2 -> moonep EP=4 -> alltoall EP=2 gives the losses of an unbroken run."""

    def losses(ranks: int, dispatcher: str, steps: int, *flags: object) -> list[float]:
        out = tmp_path / "run.json"
        run_flags = ["--dispatcher", dispatcher, "--steps", steps, "--global-batch", 8]
        run_ranks(ranks, train, *run_flags, "--json", out, *flags, joined=False, timeout=120)
        return json.loads(out.read_text())["loss"]

    one, two = tmp_path / "one", tmp_path / "two"
    unbroken = losses(2, "alltoall", 4, "--save", one, "--save-interval", 2)
    middle = losses(4, "moonep", 3, "--load", one / "step_000002", "--save", two, "--overlap")
    end = losses(2, "alltoall", 4, "--load", two)
    assert len(unbroken) == 4
    # A wrong moment, weight or step count would show in the loss after the next update.
    assert middle == pytest.approx(unbroken[2:3], rel=1e-6)
    assert end == pytest.approx(unbroken[3:4], rel=1e-6)


def shell(script: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("bash"), "-c", f'source "{SCRIPTS}/_venv.sh"; {script}'],
        env={"PATH": f"{path}:/usr/bin:/bin", "HOME": str(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_finder_skips_a_python_that_does_not_run(tmp_path: Path):
    # A pyenv shim: on PATH, but it only prints that the version is not active.
    for name in ("python3.12", "python3.13", "python3.14", "python3", "python"):
        fake_python(tmp_path / name, "echo 'pyenv: command not found' >&2; exit 127")
    done = shell("find_python", tmp_path)
    assert done.returncode != 0
    assert "found no Python >= 3.12" in done.stderr and "PYTHON=" in done.stderr
    real = tmp_path / ".pyenv/versions/3.12.9/bin/python3"
    fake_python(real, f'exec "{sys.executable}" "$@"')
    assert shell("find_python", tmp_path).stdout.strip() == str(real)


def test_finder_prefers_path_and_obeys_PYTHON(tmp_path: Path):
    fake_python(tmp_path / "python3.12", f'exec "{sys.executable}" "$@"')
    assert shell("find_python", tmp_path).stdout.strip() == "python3.12"
    other = tmp_path / "other"
    fake_python(other, f'exec "{sys.executable}" "$@"')
    assert shell("find_python", tmp_path, PYTHON=str(other)).stdout.strip() == str(other)
    bad = shell("find_python", tmp_path, PYTHON=str(tmp_path / "none"))
    assert bad.returncode != 0 and f"PYTHON={tmp_path / 'none'}" in bad.stderr


def test_versions_name_what_is_no_checkout(tmp_path) -> None:
    done = run(["bash", SCRIPTS / "test_versions.sh", "--megatron-lm", tmp_path])
    assert done.returncode == 1 and f"--megatron-lm {tmp_path} holds no Megatron" in done.stderr


def test_every_mutation_still_applies() -> None:
    """What `scripts/mutants.py` replaces stands in the package exactly once."""
    spec = importlib.util.spec_from_file_location("mutations", SCRIPTS / "mutations.py")
    mutations = importlib.util.module_from_spec(spec)
    sys.modules["mutations"] = mutations
    spec.loader.exec_module(mutations)
    for mutation in mutations.MUTATIONS:
        text = (SCRIPTS.parent / "moonep_megatron" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, mutation.name
