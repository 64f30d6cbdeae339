"""Runs a Megatron script with the dispatcher `moonep`: `enable()`, then the script as `__main__`.

    torchrun … -m moonep_megatron.run [--arguments FILE.yaml] pretrain_gpt.py --num-layers 4 …

The script sees the command line, and finds its neighbours on `sys.path`, as if Python itself had
started it. `--arguments` puts the flags of an argument file (see `configs/`) in front of the
script's own, so that those on the command line win.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import NamedTuple, NoReturn

from moonep_megatron.config import load_arguments
from moonep_megatron.enable import enable

USAGE = (
    "usage: python -m moonep_megatron.run [--arguments FILE.yaml]… (SCRIPT.py | -m MODULE) "
    "[arguments of the script …]"
)


class Command(NamedTuple):
    """What to run: a module or the path of a script, and the words of its command line."""

    target: str
    is_module: bool
    words: list[str]


def _usage_error(problem: str) -> NoReturn:
    print(f"{USAGE}\nmoonep_megatron.run: {problem}", file=sys.stderr)
    raise SystemExit(2)


def parse(argv: list[str]) -> Command:
    """Split our options from the script and its command line.

    Raises:
        SystemExit: with usage on standard error, if there is nothing to run.
        ValueError: an argument file is not one.
    """
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            print(USAGE)
            raise SystemExit(0)
        if not word.startswith("-"):
            return Command(word, False, words + rest)
        if word not in ("-m", "--arguments"):
            _usage_error(f"unknown option {word}: options of the script go behind it")
        if not rest:
            _usage_error(f"{word} needs a value")
        value = rest.pop(0)
        if word == "-m":
            return Command(value, True, words + rest)
        words += load_arguments(value)
    _usage_error("no script to run")


def main() -> None:
    """Enable `moonep` and run the script that the command line names."""
    target, is_module, words = parse(sys.argv[1:])
    if not is_module and not os.path.isfile(target):
        _usage_error(f"there is no script {target}")
    sys.argv[:] = [target, *words]
    if not is_module and not sys.flags.safe_path:
        # Before Megatron is imported: the script may lie beside a Megatron of its own.
        sys.path[0] = os.path.dirname(os.path.realpath(target))
    enable()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
