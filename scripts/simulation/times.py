"""Predicted time of one MoE layer, forward and backward, under three ways to route.

Letters: S tokens a rank, K experts a token, H row width, F expert FFN width, R ranks. SwiGLU
experts, bf16 rows and weights, fp32 gradients of duplicates.

The model knows what differs between the three: rows of the busiest rank, bytes over the busiest
link, weights of duplicates. It leaves out routing, permutation and activation, and lets every link
and every GEMM run at one rate. Each of the four exchanges of rows (dispatch and combine, forward
and backward) is exposed; weights of duplicates go over the link behind the rows and beside the
GEMMs, so they cost time only where they outlast them.

- *alltoall*: the busiest rank computes and receives all that is routed to it.
- *moonep*: every rank computes S*K rows, the fullest one up to the slack more; a token crosses to a
  rank once.
- *balanced*: the router is forced to spread its rows evenly (another model then), over alltoall.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXCHANGES = 4
# Kernels in a row that cannot overlap: exchanges and products, and what moonep has more.
LAUNCHES = {"alltoall": 24, "balanced": 24, "moonep": 36}


@dataclass(frozen=True)
class Model:
    """Shape of the layer and the constants; GB/s and TFLOP/s are 1e9 and 1e12."""

    width: int = 7168
    ffn: int = 2048
    topk: int = 8
    tokens: int = 8192
    node: int = 8
    link: float = 340.0
    network: float = 45.0
    tflops: float = 700.0
    launch: float = 5.0

    @property
    def expert_values(self) -> int:
        return 3 * self.width * self.ffn

    def pushed_mb(self, duplicates: int) -> float:
        """Weights that one push of so many duplicates moves; each way through a layer has one."""
        return duplicates * 2 * self.expert_values / 1e6

    def gemm_ms(self, rows: float, passes: int) -> float:
        """1 pass forward, 2 backward: data and weight gradients."""
        return 1e3 * passes * rows * 2 * self.expert_values / (self.tflops * 1e12)

    def bytes_ms(self, near: float, far: float) -> float:
        """Both at once: the slower of the link and the network."""
        return 1e3 * max(near / (self.link * 1e9), far / (self.network * 1e9))

    def rows_ms(self, rows: float, ranks: int) -> float:
        """One exchange in which some rank sends or receives ``rows`` rows, spread over all."""
        node = min(self.node, ranks)
        row = 2 * self.width / ranks
        return self.bytes_ms(rows * row * (node - 1), rows * row * (ranks - node))

    def times(self, row: dict[str, Any]) -> dict[str, float]:
        """Milliseconds of a row of `quality.judge`."""
        ranks, rows = row["ranks"], self.tokens * self.topk
        launch = {name: 1e-3 * self.launch * count for name, count in LAUNCHES.items()}
        hot, full = rows * row["hottest_rank"], rows * row["fullest_rank"]
        # ranks that a token with K experts reaches, on average, where each is as likely
        reached = ranks * (1 - (1 - 1 / ranks) ** self.topk)
        once = rows * min(1.0, reached / self.topk)

        near, far = row["near_busiest"], row["far_busiest"]
        weights = 2 * self.expert_values
        push = self.bytes_ms(weights * near, weights * far)
        pull = 2 * push  # fp32
        moonep = EXCHANGES * self.rows_ms(once, ranks)
        moonep += max(self.gemm_ms(full, 1), push) + max(self.gemm_ms(full, 2), push + pull)
        return {
            "alltoall_ms": self._plain(hot, ranks) + launch["alltoall"],
            "moonep_ms": moonep + launch["moonep"],
            "balanced_ms": self._plain(rows, ranks) + launch["balanced"],
        }

    def _plain(self, rows: float, ranks: int) -> float:
        return EXCHANGES * self.rows_ms(rows, ranks) + self.gemm_ms(rows, 3)
