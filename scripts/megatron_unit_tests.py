"""Run Megatron's own unit tests of dispatchers and MoE layers against moonep.

    python scripts/megatron_unit_tests.py --megatron-lm ../Megatron-LM --markdown results.md

The tests come from a Megatron-LM checkout, unchanged; wherever they ask for alltoall or allgather
they get moonep, with whole experts (expert TP 1). They run once more with alltoall in that place,
so that what fails with both shows for what it is. Fails (exit code 1) when a test fails that is
neither refused by moonep by name nor fails with alltoall, too.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torchrun
from megatron_lm import launch
from rich.console import Console
from rich.table import Table

FOLDER = "tests/unit_tests/transformer/moe"
FILES = (
    *("token_dispatcher", "a2a_token_dispatcher", "moe_layer", "moe_layer_discrepancy"),
    *("shared_experts", "latent_moe_layer", "upcycling", "aux_loss"),
)
ENDS = {
    "passed": "passed",
    "refused": "refused by moonep, which names the setting",
    "skipped": "skipped by Megatron",
    "alltoall": "fails with alltoall, too",
    "other": "asks for no dispatcher that moonep replaces",
    "failed": "failed",
}
_REFUSED = re.compile(r"--moe-token-dispatcher-type moonep: (.*?) is not supported: (.*?);", re.S)


@dataclass(frozen=True)
class Result:
    """What became of one test: ``end`` is a key of ENDS."""

    test: str
    end: str
    why: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are stopped too
    outcomes = {}
    for dispatcher in ("alltoall", "moonep"):
        console.print(f"{dispatcher} on {args.ranks} ranks ...")
        try:
            outcomes[dispatcher] = run(args, dispatcher)
        except RuntimeError as error:
            console.print(error, soft_wrap=True, markup=False)
            return 1
    results = judge(outcomes["moonep"], outcomes["alltoall"])
    report(console, args, results)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    if args.markdown:
        args.markdown.write_text(markdown(results))
    return 1 if any(result.end == "failed" for result in results) else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--megatron-lm", type=Path, required=True, help="a checkout of Megatron-LM")
    add("--ranks", type=int, default=8, help="processes (8, as many tests want)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--same-gpu", action="store_true", help="all ranks on one GPU, over gloo")
    place.add_argument("--cpu", action="store_true", help="no GPU: stand-ins for CUDA, over gloo")
    add("--timeout", type=float, default=1200.0, help="seconds a run of all tests may take (1200)")
    add("--json", type=Path, help="write what became of every test here")
    add("--markdown", type=Path, help="write a table of all test functions here")
    add("more", nargs="*", metavar="-- ARGUMENT", help="arguments of pytest, as -k")
    args = parser.parse_args(argv)
    args.megatron_lm = args.megatron_lm.resolve()
    args.files = [f"{FOLDER}/test_{name}.py" for name in FILES]
    args.files = [file for file in args.files if (args.megatron_lm / file).is_file()]
    if not args.files:
        parser.error(f"--megatron-lm {args.megatron_lm} holds no unit tests in {FOLDER}")
    if args.ranks < 1:
        parser.error(f"--ranks {args.ranks} must be at least 1")
    return args


def run(args: argparse.Namespace, dispatcher: str) -> dict[str, dict[str, Any]]:
    """By test, its outcome, why, and the dispatchers it asked for: of the rank that did worst.

    Raises:
        RuntimeError: pytest did not run the tests to their end.
    """
    stand_in = "same-gpu" if args.same_gpu else "cpu" if args.cpu else None
    env = launch.environment(args.megatron_lm, args.ranks, stand_in)
    env["PYTHONPATH"] += f":{Path(__file__).parent}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env |= {"UNIT_TESTS_DISPATCHER": dispatcher, "UNIT_TESTS_RESULTS": temporary}
        code = launch.run(
            [
                *torchrun.command(args.ranks),
                *("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
                *("-p", "megatron_lm.unit_test_plugin", *args.files, *args.more),
            ],
            log=folder / "log.txt",
            env=env,
            cwd=args.megatron_lm,
            timeout=args.timeout,
        )
        files = sorted(folder.glob("rank*.jsonl"))
        lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        numbers = {len(some) for some in lines}
        # A failed test is a result; anything else that ends pytest is not.
        if code is None or len(lines) != args.ranks or len(numbers) != 1:
            text = (folder / "log.txt").read_text(errors="replace")
            why = f"not done in {args.timeout:g} s" if code is None else f"exit code {code}"
            tail = "\n".join(text.splitlines()[-40:])
            raise RuntimeError(f"the tests with {dispatcher} did not end ({why}):\n{tail}")
    return merge(lines)


def merge(ranks: list[list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """A test has passed if it has on every rank."""
    order = ("passed", "skipped", "failed")
    merged: dict[str, dict[str, Any]] = {}
    for line in (line for rank in ranks for line in rank):
        known = merged.setdefault(line["test"], line)
        if order.index(line["outcome"]) > order.index(known["outcome"]):
            merged[line["test"]] = line
    return merged


def judge(moonep: dict[str, dict[str, Any]], alltoall: dict[str, dict[str, Any]]) -> list[Result]:
    return [_judge(name, ours, alltoall.get(name)) for name, ours in moonep.items()]


def _judge(test: str, ours: dict[str, Any], theirs: dict[str, Any] | None) -> Result:
    why = ours["why"].strip()
    if ours["outcome"] == "skipped":
        return Result(test, "skipped", why)
    if ours["outcome"] == "passed":
        return Result(test, "passed" if _replaced(ours) else "other")
    if refused := _REFUSED.search(why):
        return Result(test, "refused", f"{refused[1]}: {' '.join(refused[2].split())}")
    if theirs and theirs["outcome"] == "failed":
        return Result(test, "alltoall", why.partition("\n")[0])
    return Result(test, "failed", why)


def _replaced(line: dict[str, Any]) -> bool:
    return bool({"alltoall", "allgather"} & set(line["asked"]))


def report(console: Console, args: argparse.Namespace, results: list[Result]) -> None:
    where = "CPUs" if args.cpu else "one GPU" if args.same_gpu else "GPUs"
    core = launch.core_version(args.megatron_lm)
    table = Table(title=f"Unit tests of Megatron-Core {core} on {args.ranks} ranks, {where}")
    table.add_column("file", no_wrap=True)
    for end in ENDS:
        table.add_column(end, justify="right")
    files = dict.fromkeys(result.test.partition("::")[0] for result in results)
    for file in files:
        of_file = Counter(r.end for r in results if r.test.startswith(f"{file}::"))
        table.add_row(file, *(str(of_file[end]) for end in ENDS))
    console.print(table)
    for end, meaning in ENDS.items():
        some = Counter(result.why for result in results if result.end == end and result.why)
        if some and end != "failed":
            console.print(f"\n[bold]{end}[/bold]: {meaning}")
            for why, number in some.most_common():
                console.print(f"  {number:4} {why}", markup=False, soft_wrap=True)
    for result in results:
        if result.end == "failed":
            console.print(f"FAILED {result.test}: {result.why}", markup=False, soft_wrap=True)


def markdown(results: list[Result]) -> str:
    """A line a test function: how many of its cases ended how, and why not."""
    functions: dict[str, list[Result]] = {}
    for result in results:
        functions.setdefault(result.test.partition("[")[0], []).append(result)
    lines = ["| test | passed | not run | why |", "| --- | --- | --- | --- |"]
    for name, some in functions.items():
        passed = sum(result.end in ("passed", "other") for result in some)
        reasons = Counter(_reason(r) for r in some if r.end not in ("passed", "other"))
        why = "; ".join(f"{reason} ({number})" for reason, number in reasons.items())
        lines.append(f"| `{name}` | {passed} | {len(some) - passed} | {why} |")
    return "\n".join(lines) + "\n"


def _reason(result: Result) -> str:
    words = {"skipped": "Megatron skips it: ", "alltoall": "fails with alltoall, too: "}
    why = f"{words.get(result.end, result.end + ': ')}{result.why}"
    return why.replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
