"""What must alternate on memory that ranks share, watched on the host."""

from __future__ import annotations


class Turns:
    """What passes have begun and not ended: each beginning waits on the device for an ending.

    A pass that fails in between would leave the next one waiting for its peers, who wait as well.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], int] = {}

    def begin(self, what: str, memory: object, layer: int) -> None:
        """A dispatch, pre-sum or push on this memory.

        Raises:
            RuntimeError: the last one has not ended.
        """
        failed = self._open.get((what, id(memory)))
        if failed is not None:
            raise RuntimeError(
                f"a pass of layer {failed} failed or was cut off after its {what}; the memory that "
                "its ranks share cannot be used again in this process: restart from a checkpoint"
            )
        self._open[what, id(memory)] = layer

    def end(self, what: str, memory: object) -> None:
        """Its rows have been freed or gathered, its slots freed."""
        del self._open[what, id(memory)]
