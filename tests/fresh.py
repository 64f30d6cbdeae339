"""A fresh Python, for what must not depend on what the session has imported or changed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent


def python(*words, timeout=240):
    """Run Python in a fresh process that can import these tests; returns the finished process."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _environment():
    path = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


# The child goes on behind the loop, as a script that ends as scripts do: nothing catches its
# exceptions, and its finalisation is Python's own.
_FORKING = """
import json, os, sys
{imports}
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
for number in (1, 2):
    os.dup2(os.open(job["files"][number - 1], os.O_WRONLY | os.O_CREAT), number)
exec(job["code"])
"""


class Warm:
    """As ``python("-c", code)``, forked from one process that has run the slow imports."""

    def __init__(self, imports):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _FORKING.format(imports=imports)],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code):
        """The finished process: its ``returncode``, ``stdout`` and ``stderr``."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("out", "err")]
            job = {"code": code, "files": list(map(str, files))}
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
            return subprocess.CompletedProcess([], code, *(file.read_text() for file in files))

    def close(self):
        self._process.communicate(timeout=30)
