"""Starts scripts of a Megatron-LM checkout on the ranks of this machine."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import torchrun

STAND_INS = Path(__file__).with_name("stand_ins")


def environment(checkout: Path, ranks: int, stand_in: str | None) -> dict[str, str]:
    """For ranks that find the checkout's Megatron first; ``stand_in`` as in sitecustomize.py."""
    paths = [str(checkout), os.environ.get("PYTHONPATH", "")]
    forced = {}
    if stand_in:
        paths.insert(0, str(STAND_INS))
        forced["STAND_IN"] = stand_in
    if stand_in == "cpu":
        forced["CUDA_VISIBLE_DEVICES"] = ""
    if stand_in == "same-gpu":
        forced["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    forced["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Megatron insists on it where it cannot look at the GPU, and it costs nothing here.
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return connections | torchrun.environment(ranks) | forced


def core_version(checkout: Path) -> str:
    """Of the Megatron-Core in a checkout, with its commit where git knows it."""
    return runpy.run_path(str(checkout / "megatron" / "core" / "package_info.py"))["__version__"]


def run(
    command: list[str], *, log: Path, env: dict[str, str], cwd: Path, timeout: float
) -> int | None:
    """The exit code, or None after ``timeout`` seconds; however this ends, the ranks do too."""
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)
        return torchrun.wait(process, timeout)
