"""Ranks of this machine, started by torchrun: their environment, and their end."""

import os
import subprocess
import sys


def command(ranks: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={ranks}",
    ]


def environment(ranks: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # Nothing here needs multicast memory, and some machines refuse it.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    if sys.platform == "linux":
        # All ranks are here: do not depend on how the machine's name resolves.
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return defaults | os.environ


def wait(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The exit code, or None after ``timeout`` seconds; however this ends, the ranks do too."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its ranks, and kills them after 30 s
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                process.kill()
