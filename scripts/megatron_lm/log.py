"""What Megatron's training loop prints of every iteration, read back."""

from __future__ import annotations

import re

# Ranks write to one stream: whatever else a line holds, an entry ends with its own bars.
_ENTRY = re.compile(r"iteration +(\d+)/ *\d+ \|((?: [^|\n]+ \|)+)")


def iterations(log: str) -> list[dict[str, float]]:
    """One dict an iteration, in order: ``iteration`` and every number under the name printed."""
    found = []
    for entry in _ENTRY.finditer(log):
        values = {"iteration": float(entry[1])}
        for field in entry[2].split("|"):
            name, _, value = field.rpartition(":")
            try:
                values[name.strip()] = float(value)
            except ValueError:
                continue  # a part without a number
        found.append(values)
    return found
