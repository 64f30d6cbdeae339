"""A fresh Python, for what must not depend on what the session has imported or changed."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent


def python(*words, timeout=240):
    """Run Python in a fresh process that can import these tests; returns the finished process."""
    path = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
