"""The machine of a benchmark."""

import subprocess


def gpu_and_driver() -> list[str | None]:
    """Name of the first GPU and version of its driver, or None twice."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        name, driver = lines.stdout.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return [None, None]
    return [name, driver]
