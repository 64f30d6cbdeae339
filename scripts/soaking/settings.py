"""What all ranks of a soak have to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One soak; widths in elements, times in seconds.

    Attributes:
        passes: forwards with their backwards, in steps of up to three that are in flight at once.
        seconds: end after so long, at the end of a block, also with passes left; None for never.
        tokens: S; a rank brings 0..S.
        delay: most seconds that a rank waits before a forward or backward, now and then.
        check_every: steps from one comparison with the dense reference to the next.
        block: steps from one exchange of plan hashes, and one look at memory, to the next.
        warmup: steps after which memory must not grow.
    """

    backend: str
    ranks: int
    passes: int
    seconds: float | None
    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    slots: int
    layers: int
    delay: float
    seed: int
    check_every: int
    block: int
    warmup: int

    # Seconds that a kernel waits for another rank, whose first pass may compile all kernels.
    timeout = 150.0

    @property
    def on_gpu(self) -> bool:
        return self.backend == "symmetric"
