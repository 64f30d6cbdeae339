"""Train Megatron-LM's own pretrain_gpt.py, unchanged, under alltoall and under moonep.

    python scripts/pretrain_megatron.py --megatron-lm ../Megatron-LM --ranks 2 --steps 50

Starts the ranks itself, one run after another, on mock data and from one seed:

stock       torchrun pretrain_gpt.py ...                          alltoall, without this package
alltoall    torchrun -m moonep_megatron.run pretrain_gpt.py ...   the same through our runner
moonep      the same line with --moe-token-dispatcher-type moonep
enabled     torchrun on a copy of pretrain_gpt.py that calls moonep_megatron.enable() at its top

Fails (exit code 1) when a loss of any iteration differs from that of the first run. What stands
behind `--` goes to every run as it is. Needs the checkout, and no tokenizer or data.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torchrun
from megatron_lm import launch, log
from rich.console import Console
from rich.table import Table

RUNS = ("stock", "alltoall", "moonep", "enabled")
RELATIVE_LOSS = {"fp32": 1e-4, "bf16": 1e-2}
"""How far losses may differ at any iteration; bf16 rounds each product to 3 digits."""
LOSS = "lm loss"
TOP = "import moonep_megatron; moonep_megatron.enable()\n"

MODEL = """
--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4
--seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0
--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 256
--moe-router-load-balancing-type none --moe-router-dtype fp32
--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023
--lr 2e-4 --min-lr 2e-4 --lr-decay-style constant --seed 1234
--log-interval 1 --eval-iters 0 --eval-interval 100000
--use-distributed-optimizer --no-gradient-accumulation-fusion
"""
# Without Transformer Engine and Apex, Megatron has none of these.
LOCAL = """
--transformer-impl local --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion
--no-bias-swiglu-fusion
"""
TE = "--transformer-impl transformer_engine --moe-grouped-gemm"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are stopped too
    runs: dict[str, dict[str, Any]] = {}
    problems = []
    console.print(f"FLAGS: {shlex.join(shared_flags(args))}", soft_wrap=True)
    for name in args.runs:
        line = launch_line(args, name).replace(shlex.join(shared_flags(args)), "FLAGS")
        console.print(f"[bold]{name:8}[/bold] {line}", soft_wrap=True)
        try:
            runs[name] = train(args, name)
        except RuntimeError as error:  # the other runs may still say something
            console.print(error, soft_wrap=True, markup=False)
            problems.append(f"{name} did not run to its end")
    if runs:
        problems += check(runs, RELATIVE_LOSS[args.dtype])
        write(args, runs, problems)
        report(console, args, runs)
    for problem in problems:
        console.print(f"[red]wrong:[/red] {problem}", soft_wrap=True)
    if not problems:
        console.print("[green]The same losses in every run.[/green]")
    return 1 if problems else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--megatron-lm", type=Path, required=True, help="a checkout of Megatron-LM")
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="in this order (all four)")
    add("--ranks", type=int, default=2, help="processes, and expert-parallel size (2)")
    add("--steps", type=int, default=50, help="training iterations (50)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--same-gpu", action="store_true", help="all ranks on one GPU, over gloo")
    place.add_argument("--cpu", action="store_true", help="no GPU: stand-ins for CUDA, over gloo")
    add("--backend", choices=("auto", "symmetric", "collective"), help="of moonep (auto)")
    add("--te", action="store_true", help="Transformer Engine's layers and grouped experts")
    add("--dtype", choices=tuple(RELATIVE_LOSS), default="fp32", help="of the model (fp32)")
    add("--timeout", type=float, default=600.0, help="seconds a run may take (600)")
    add("--logs", type=Path, help="keep the runs' output and event files here")
    add("--json", type=Path, help="write all numbers here")
    add("more", nargs="*", metavar="-- FLAG", help="flags of Megatron for every run")
    args = parser.parse_args(argv)
    args.megatron_lm = args.megatron_lm.resolve()
    if not (args.megatron_lm / "pretrain_gpt.py").is_file():
        parser.error(f"--megatron-lm {args.megatron_lm} holds no pretrain_gpt.py")
    for flag in ("ranks", "steps"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag} {getattr(args, flag)} must be at least 1")
    if args.cpu and args.backend == "symmetric":
        parser.error("--backend symmetric needs GPUs: leave out --cpu")
    if args.te and args.cpu:
        parser.error("--te needs GPUs: leave out --cpu")
    if args.cpu:
        args.backend = "collective"  # auto would look at the GPU that --cpu pretends
    return args


def shared_flags(args: argparse.Namespace) -> list[str]:
    """The flags that every run has."""
    words = (MODEL + (TE if args.te else LOCAL)).split()
    words += ["--train-iters", str(args.steps), "--global-batch-size", str(4 * args.ranks)]
    words += ["--expert-model-parallel-size", str(args.ranks)]
    words += ["--bf16"] if args.dtype == "bf16" else []
    words += ["--distributed-backend", "gloo" if args.same_gpu or args.cpu else "nccl"]
    return words + args.more


def flags(args: argparse.Namespace, name: str) -> list[str]:
    """The flags of one run; between alltoall and moonep one word differs."""
    words = shared_flags(args)
    if name != "stock" and args.backend:
        words += ["--moe-moonep-backend", args.backend]
    if name == "enabled":
        words += ["--moe-moonep-log-maxvio"]
    moonep = name in ("moonep", "enabled")
    return [*words, "--moe-token-dispatcher-type", "moonep" if moonep else "alltoall"]


def script(args: argparse.Namespace, name: str, folder: Path) -> list[str]:
    """What torchrun is told to run: the checkout's script by one of the two ways in."""
    original = args.megatron_lm / "pretrain_gpt.py"
    if name == "enabled":
        copy = folder / "pretrain_gpt.py"
        copy.write_text(TOP + original.read_text())
        return [str(copy)]
    runner = [] if name == "stock" else ["-m", "moonep_megatron.run"]
    return [*runner, str(original)]


def launch_line(args: argparse.Namespace, name: str) -> str:
    """The command as users type it."""
    runner = "" if name in ("stock", "enabled") else "-m moonep_megatron.run "
    words = shlex.join(flags(args, name))
    return f"torchrun --nproc-per-node {args.ranks} {runner}pretrain_gpt.py {words}"


def train(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """One run to its end; what its log says of every iteration.

    Raises:
        RuntimeError: it failed, took too long or logged other iterations than asked for.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.logs or Path(temporary)).resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "log.txt"
        stand_in = "same-gpu" if args.same_gpu else "cpu" if args.cpu else None
        code = launch.run(
            [*torchrun.command(args.ranks), *script(args, name, folder), *flags(args, name)],
            log=file,
            env=launch.environment(args.megatron_lm, args.ranks, stand_in),
            cwd=folder,
            timeout=args.timeout,
        )
        text = file.read_text(errors="replace")
    if code != 0:
        why = f"exit code {code}" if code is not None else f"not done in {args.timeout:g} s"
        raise RuntimeError(f"the {name} run failed ({why}); its output:\n{_gist(text)}")
    entries = log.iterations(text)
    if [entry["iteration"] for entry in entries] != list(range(1, args.steps + 1)):
        raise RuntimeError(f"the {name} run logged other iterations than 1 to {args.steps}")
    numbers = {key: [entry.get(key) for entry in entries] for key in entries[0]}
    return {"launch": launch_line(args, name), **numbers}


def _gist(text: str) -> str:
    """Rank 0's own words where it left some: the cause stands above torchrun's summary."""
    lines = text.splitlines()
    ours = [line for line in lines if line.startswith("[rank0]")] or lines
    return "\n".join(ours[-40:])


def difference(run: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest relative difference of a loss over all iterations; NaN is the worst."""
    pairs = zip(run[LOSS], other[LOSS], strict=True)
    return max((abs(a - b) / abs(a) for a, b in pairs), key=lambda x: (math.isnan(x), x))


def check(runs: dict[str, dict[str, Any]], tolerance: float) -> list[str]:
    """What is wrong, in sentences."""
    first, *others = runs
    problems = []
    for name in others:
        apart = difference(runs[first], runs[name])
        if not apart <= tolerance:  # a NaN is wrong, too
            problems.append(
                f"losses of {name} differ from {first} by {apart:.1e} relative, above {tolerance:g}"
            )
    for name, run in runs.items():
        if not run[LOSS][-1] < run[LOSS][0]:
            problems.append(f"{name} learned nothing: loss {run[LOSS][0]} to {run[LOSS][-1]}")
    return problems


def write(args: argparse.Namespace, runs: dict[str, dict[str, Any]], problems: list[str]) -> None:
    if not args.json:
        return
    first = next(iter(runs))
    result = {
        "core": launch.core_version(args.megatron_lm),
        "machine": machine(args),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "largest_relative_difference": {n: difference(runs[first], run) for n, run in runs.items()},
        "problems": problems,
        "runs": runs,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1))


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Device and versions, asked in another process, which leaves the GPU when it ends."""
    if args.cpu:
        return {"device": "CPU"}
    question = (
        "import json, torch; print(json.dumps({'device': torch.cuda.get_device_name(), "
        "'torch': torch.__version__}))"
    )
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, check=True)
    return json.loads(done.stdout)


def report(console: Console, args: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> None:
    first, core = next(iter(runs)), launch.core_version(args.megatron_lm)
    where = "CPUs" if args.cpu else "one GPU" if args.same_gpu else f"{args.ranks} GPUs"
    table = Table(
        title=f"pretrain_gpt.py, Megatron-Core {core}, {args.ranks} ranks on "
        f"{where}, {args.dtype}, {args.steps} iterations; hottest rank x mean and duplicates: "
        "means over layers and iterations"
    )
    table.add_column("run", no_wrap=True)
    for column in ("first loss", "last loss", "rel. diff.", "ms", "hottest rank", "duplicates"):
        table.add_column(column, justify="right")
    for name, run in runs.items():
        pace = sorted(run["elapsed time per iteration (ms)"])[len(run[LOSS]) // 2]
        table.add_row(
            name,
            f"{run[LOSS][0]:.6f}",
            f"{run[LOSS][-1]:.6f}",
            f"{difference(runs[first], run):.1e}",
            f"{pace:.1f}",
            *_balance(run),
        )
    console.print(table)


def _balance(run: dict[str, Any]) -> tuple[str, str]:
    """Means over the run: the hottest rank without and with us, and duplicates, of a layer."""
    if "moonep_maxvio" not in run:
        return "", ""
    without, ours, copies = (
        sum(run[f"moonep_{name}"]) / len(run[LOSS])
        for name in ("hottest_rank_without", "hottest_rank", "duplicates")
    )
    return f"{without:.2f} -> {ours:.2f}", f"{copies:.1f}"


if __name__ == "__main__":
    sys.exit(main())
