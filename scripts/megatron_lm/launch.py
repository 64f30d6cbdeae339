"""Starts scripts of a Megatron-LM checkout on the ranks of this machine."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

STAND_INS = Path(__file__).with_name("stand_ins")


def environment(checkout: Path, ranks: int, stand_in: str | None) -> dict[str, str]:
    """For ranks that find the checkout's Megatron first; ``stand_in`` as in sitecustomize.py."""
    paths = [str(checkout), os.environ.get("PYTHONPATH", "")]
    values = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        # All ranks are here: do not depend on how the machine's name resolves.
        "GLOO_SOCKET_IFNAME": "lo",
        # Nothing here needs multicast memory, and some machines refuse it.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        # Megatron insists on it where it cannot look at the GPU, and it costs nothing here.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    forced = {}
    if stand_in:
        paths.insert(0, str(STAND_INS))
        forced["STAND_IN"] = stand_in
    if stand_in == "cpu":
        forced["CUDA_VISIBLE_DEVICES"] = ""
    if stand_in == "same-gpu":
        forced["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    forced["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return values | os.environ | forced


def core_version(checkout: Path) -> str:
    """Of the Megatron-Core in a checkout, with its commit where git knows it."""
    return runpy.run_path(str(checkout / "megatron" / "core" / "package_info.py"))["__version__"]


def torchrun(ranks: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={ranks}",
    ]


def run(
    command: list[str], *, log: Path, env: dict[str, str], cwd: Path, timeout: float
) -> int | None:
    """The exit code, or None after ``timeout`` seconds; however this ends, the ranks do too."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, text=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun passes it on, and kills its ranks after 30 s
                try:
                    process.wait(45)
                except subprocess.TimeoutExpired:
                    process.kill()
