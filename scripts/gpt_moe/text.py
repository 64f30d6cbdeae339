"""Bytes to train on: a file, or the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256
"""One token is one byte."""


def read_text(path: Path | None, seq: int) -> torch.Tensor:
    """The text as uint8 [bytes]; ``None`` stands for the standard library's top-level modules.

    Raises:
        ValueError: there is no text, or less than one sequence of ``seq`` + 1 bytes.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        text = b"".join(source.read_bytes() for source in sorted(root.glob("*.py")))
        where = f"the standard library in {root}"
    else:
        if not path.is_file():
            raise ValueError(f"--text {path} is not a file: name one that every rank can read")
        text, where = path.read_bytes(), f"--text {path}"
    if len(text) < seq + 1:
        raise ValueError(
            f"{where} has {len(text)} bytes, but --seq {seq} needs at least {seq + 1}: "
            "name a longer file with --text, or lower --seq"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(
    text: torch.Tensor, *, seed: int, step: int, samples: range, seq: int
) -> dict[str, torch.Tensor]:
    """Samples of one step's global batch: tokens, labels and positions, int64 [len(samples), seq].

    A sample depends on (seed, step, its number in the global batch) alone, so every way to share
    a global batch out over ranks trains on the same bytes, and a resumed run needs no data state.
    """
    last = len(text) - seq - 1
    starts = torch.randint(
        last + 1, (samples.stop,), generator=torch.Generator().manual_seed(seed * 1_000_003 + step)
    )
    windows = torch.stack([text[start : start + seq + 1] for start in starts[samples.start :]])
    windows = windows.long()
    return {
        "tokens": windows[:, :-1].contiguous(),
        "labels": windows[:, 1:].contiguous(),
        "position_ids": torch.arange(seq).expand(len(samples), seq).contiguous(),
    }
