"""examples/pretrain.sh: its command line for every model, which Megatron reads, and bad input."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from argument_files import FILES, megatron, parameters, settings, too_old
from fresh import python
from megatron.core import package_info

from moonep_megatron import run

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from megatron_lm.launch import core_version

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "pretrain.sh"
STEMS = [file.stem for file in FILES]
INSTALLED = str(Path(package_info.__file__).parents[2])
HELD_GB = 95
"""What weights, gradients and optimizer states may take of a GPU's 141 GB."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a torchrun that prints its arguments as JSON, and a checkout, spaces in their paths."""
    folder = tmp_path_factory.mktemp("a folder")
    (folder / "bin").mkdir()
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    torchrun.chmod(0o755)
    (folder / "checkout").mkdir()
    (folder / "checkout" / "pretrain_gpt.py").touch()
    return folder


def start(folder, *words, **variables):
    """Run the script as a user does; a variable that is None is not set."""
    given = {"MEGATRON_LM": folder / "checkout", "DATA": "mock", "MASTER": "node-0"} | variables
    known = ("MEGATRON_LM", "DATA", "TOKENIZER", "NODES", "GPUS", "MASTER", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in known}
    clean["PATH"] = f"{folder / 'bin'}{os.pathsep}{clean['PATH']}"
    return subprocess.run(
        ["bash", SCRIPT, *words],
        env=clean | {name: str(value) for name, value in given.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def torchrun(folder, *words, **variables):
    """What torchrun is given."""
    done = start(folder, *words, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def after(words, flag):
    return words[words.index(flag) + 1]


def script_words(words):
    """The command line of pretrain_gpt.py as our runner makes it, the argument file's flags too."""
    first = words.index("-m")
    assert words[first : first + 2] == ["-m", "moonep_megatron.run"]
    assert Path(after(words, "--arguments")).is_absolute()  # found from any folder
    command = run.parse(words[first + 2 :])
    assert Path(command.target).name == "pretrain_gpt.py"
    return command.words


def ranks(words):
    return int(after(words, "--nnodes")) * int(after(words, "--nproc-per-node"))


# Command lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", STEMS)
def test_one_word_differs_from_alltoall(folder, stem):
    ours, theirs = (torchrun(folder, stem, name) for name in ("moonep", "alltoall"))
    differing = [
        place for place, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1
    ]
    (place,) = differing
    assert ours[place - 1 : place + 1] == ["--moe-token-dispatcher-type", "moonep"]
    assert theirs[place] == "alltoall"
    assert torchrun(folder, stem) == ours
    lines = [line for line in SCRIPT.read_text().splitlines() if '$dispatcher" #' in line]
    assert len(lines) == 1


def test_nodes_meet(folder):
    one = torchrun(folder, "mixtral_8x7b", NODES=1, GPUS=4, MASTER=None)
    assert "--standalone" in one and ranks(one) == 4 and "--rdzv-endpoint" not in one
    many = torchrun(folder, "mixtral_8x7b", NODES=3, MASTER_PORT=77)
    assert after(many, "--rdzv-endpoint") == "node-0:77" and ranks(many) == 24
    assert after(many, "--rdzv-backend") == "c10d" and "--standalone" not in many


def test_data_and_more_flags_reach_megatron(folder):
    words = script_words(
        torchrun(folder, "tiny", "moonep", "--lr", "1", "--save", "a b",
                 DATA="0.3 one 0.7 two", TOKENIZER="some/tokenizer")
    )  # fmt: skip
    at = words.index("--data-path")
    assert words[at : at + 5] == ["--data-path", "0.3", "one", "0.7", "two"]
    assert after(words, "--tokenizer-model") == "some/tokenizer" and "--mock-data" not in words
    assert words[-4:] == ["--lr", "1", "--save", "a b"]


def test_the_command_is_shown(folder):
    shown = start(folder, "tiny").stdout.splitlines()[0]
    assert (
        shown.startswith("torchrun --nnodes 1 ") and "--moe-token-dispatcher-type moonep" in shown
    )


@pytest.mark.parametrize(
    ("words", "variables", "problem"),
    [
        ([], {}, "MEGATRON_LM=DIR DATA=PREFIX"),
        (["--lr", "1"], {}, "MEGATRON_LM=DIR DATA=PREFIX"),
        (["other"], {}, "unknown config other"),
        (["tiny", "deepep"], {}, "unknown dispatcher deepep: moonep or alltoall"),
        (["tiny"], {"MEGATRON_LM": None}, "set MEGATRON_LM to a checkout"),
        (["tiny"], {"MEGATRON_LM": "/nowhere"}, "MEGATRON_LM=/nowhere holds no pretrain_gpt.py"),
        (["tiny"], {"DATA": None}, "set DATA to"),
        (["tiny"], {"DATA": "one"}, "set TOKENIZER to"),
        (["deepseek_v3"], {"MASTER": None}, "set MASTER to the host name of one of the 32 nodes"),
    ],
)  # fmt: skip
def test_bad_input_is_named(folder, words, variables, problem):
    done = start(folder, *words, **variables)
    assert done.returncode == 2 and problem in done.stderr and not done.stdout


def test_shell():
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
        assert not done.stdout


# As Megatron reads them --------------------------------------------------------------------------


def read(commands):
    """In a process of its own: settings, or an error, of each [words, ranks]; printed as JSON."""
    results = []
    for words, world in commands:
        try:
            results.append(_read(words, world))
        except BaseException as error:
            results.append(f"{type(error).__name__}: {error}")
    print("\n" + json.dumps(results))


def _read(words, world):
    args, config = megatron(words, world)
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.training import arguments

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(
        0, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    return settings(args, config) | {
        "parser": arguments.__file__,
        "world_size": args.world_size,
        "data_parallel": args.data_parallel_size,
        "microbatches": calculator.get_num_microbatches(),
        "stages": args.pipeline_model_parallel_size,
    }


def _checkout():
    named = os.environ.get("MEGATRON_LM")
    return pytest.param(
        named,
        id="checkout",
        marks=pytest.mark.skipif(not named, reason="MEGATRON_LM names no checkout"),
    )


@pytest.fixture(scope="module", params=[pytest.param(None, id="installed"), _checkout()])
def accepted(folder, request):
    """Settings of every model and dispatcher, read by the installed parser or a checkout's."""
    version = core_version(Path(request.param)) if request.param else package_info.__version__
    stems = [stem for stem in STEMS if not too_old(stem, version)]
    keys = [(stem, name) for stem in stems for name in ("moonep", "alltoall")]
    lines = [torchrun(folder, *key) for key in keys]
    # Two that cannot be: Megatron says so of one, and this package of the other.
    for flags in (("--pipeline-model-parallel-size", "16"), ("--moe-expert-capacity-factor", "1")):
        lines.append(torchrun(folder, "mixtral_8x22b", "moonep", *flags))
    commands = [(script_words(line), ranks(line)) for line in lines]
    code = "import json, sys\n"
    code += f"sys.path.insert(0, {request.param!r})\n" if request.param else ""
    done = python("-c", code + f"import test_examples\ntest_examples.read({commands!r})")
    assert done.returncode == 0, done.stderr
    *results, stages, capacity = json.loads(done.stdout.splitlines()[-1])
    assert "divisible by the pipeline-model-parallel size" in stages
    assert "--moe-token-dispatcher-type moonep" in capacity
    for result in results:
        assert isinstance(result, dict), result
        assert result["parser"].startswith(request.param or INSTALLED)
    return dict(zip(keys, results, strict=True))


def skip_if_left_out(accepted, stem):
    if (stem, "moonep") not in accepted:
        pytest.skip("this Megatron-LM lacks flags of the file")


@pytest.mark.parametrize("stem", STEMS)
def test_megatron_accepts(accepted, stem):
    skip_if_left_out(accepted, stem)
    ours, theirs = (accepted[stem, name] for name in ("moonep", "alltoall"))
    assert {key for key in ours if ours[key] != theirs[key]} == {"moe_token_dispatcher_type"}
    assert ours["moe_token_dispatcher_type"] == "moonep"


@pytest.mark.parametrize("stem", STEMS)
def test_parallel_sizes_fit_the_model(accepted, stem):
    skip_if_left_out(accepted, stem)
    c = accepted[stem, "moonep"]
    experts, stages = c["expert_model_parallel_size"], c["stages"]
    assert c["num_moe_experts"] % experts == 0
    assert c["world_size"] % (experts * stages) == 0
    # With chunks a stage Megatron wants whole rounds of the pipeline.
    chunked = c["virtual_pipeline_model_parallel_size"] is not None
    assert c["microbatches"] % (stages if chunked else 1) == 0
    assert c["microbatches"] >= stages


def state_gb(c):
    """GB of a rank's bf16 weights and fp32 gradients, and of its share of Adam's fp32 states.

    Ranks with the same weights divide the states among them; stages are taken as equal.
    """
    total, active, _ = parameters(c)  # they differ by the experts that a token does not choose
    experts, chosen = c["num_moe_experts"], c["moe_router_topk"]
    expert = (total - active) * experts / (experts - chosen)
    spread = c["expert_model_parallel_size"]
    held = expert / spread * (2 + 4 + 12 / (c["data_parallel"] / spread))
    held += (total - expert) * (2 + 4 + 12 / c["data_parallel"])
    return held / c["stages"] / 1e9


def test_a_rank_has_room(accepted):
    ours = {stem: c for (stem, name), c in accepted.items() if name == "moonep"}
    held = {stem: state_gb(c) for stem, c in ours.items() if stem != "tiny"}
    print({stem: round(gb) for stem, gb in held.items()})
    assert max(held.values()) < HELD_GB
    said = re.search(r"states take (\d+) to (\d+) GB a rank", SCRIPT.read_text())
    assert [int(said[1]), int(said[2])] == [round(min(held.values())), round(max(held.values()))]


@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM names no checkout")
def test_of_a_real_checkout(tmp_path):
    """Two iterations of the tiny model on CPU ranks; the same losses from both dispatchers."""
    stand_ins = ROOT / "scripts" / "megatron_lm" / "stand_ins"
    checkout = Path(os.environ["MEGATRON_LM"]).resolve()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{stand_ins}{os.pathsep}{checkout}",
        "STAND_IN": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MEGATRON_LM": str(checkout),
        "DATA": "mock",
        "GPUS": "2",
    }
    words = """
    --expert-model-parallel-size 2 --distributed-backend gloo --moe-moonep-backend collective
    --global-batch-size 4 --train-iters 2 --lr-warmup-iters 1 --eval-iters 0 --no-bias-swiglu-fusion
    """
    losses = []
    for dispatcher in ("moonep", "alltoall"):
        done = subprocess.run(
            ["bash", SCRIPT, "tiny", dispatcher, *words.split()],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses.append(re.findall(r"lm loss: (\S+)", done.stdout))
    assert len(losses[0]) == 2
    assert [float(x) for x in losses[0]] == pytest.approx([float(x) for x in losses[1]], rel=1e-4)
