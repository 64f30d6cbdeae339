"""Popularity of experts that drifts from layer to layer, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KINDS = ("zipf", "dirichlet")


@dataclass(frozen=True)
class Synthetic:
    """A data set whose rows are drawn for the number of ranks: M = R * rows a rank.

    *zipf*: expert number i in an order has popularity (i+1)**-exponent; the order is that of scores
    which keep 0.9 of themselves a step. *dirichlet*: a draw with this concentration, of which each
    step keeps 0.7.
    """

    kind: str
    experts: int
    layers: int
    seed: int
    exponent: float = 0.8
    concentration: float = 1.0

    @property
    def name(self) -> str:
        value = self.exponent if self.kind == "zipf" else self.concentration
        return f"{self.kind}-{value:g}-{self.experts}"

    def total_LE(self, rows: int) -> np.ndarray:
        """int64 [layers, experts]: ``rows`` routed rows a layer, the same for the same seed."""
        draw = np.random.default_rng([self.seed, self.experts, KINDS.index(self.kind)])
        steps = self._zipf(draw) if self.kind == "zipf" else self._dirichlet(draw)
        return np.stack([draw.multinomial(rows, step / step.sum()) for step in steps])

    def _zipf(self, draw: np.random.Generator) -> list[np.ndarray]:
        popularity = np.arange(1, self.experts + 1) ** -self.exponent
        scores, steps = draw.standard_normal(self.experts), []
        for _ in range(self.layers):
            steps.append(popularity[np.argsort(np.argsort(scores))])
            scores = 0.9 * scores + np.sqrt(1 - 0.9**2) * draw.standard_normal(self.experts)
        return steps

    def _dirichlet(self, draw: np.random.Generator) -> list[np.ndarray]:
        steps = [draw.dirichlet(np.full(self.experts, self.concentration))]
        while len(steps) < self.layers:
            fresh = draw.dirichlet(np.full(self.experts, self.concentration))
            steps.append(0.7 * steps[-1] + 0.3 * fresh)
        return steps
