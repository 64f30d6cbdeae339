"""What a run of bench_layer.py measures: shapes, routings and variants of the layer."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

CASES = ("one", "even")
# Dispatchers, in the order in which they run: moonep last, its buffers stay.
DISPATCHERS = (
    "alltoall",
    "allgather",
    "flex",
    "moonep-collective",
    "moonep-redispatch",
    "moonep",
)
# Forms of moonep that are measured only when asked for, and how the plot shows them.
FORMS = {"moonep-collective": ":", "moonep-redispatch": "-."}
IDEAL = "ideal"


@dataclass(frozen=True)
class Shape:
    """H row width, F expert FFN width, E experts, K experts a token, S tokens of a rank."""

    name: str
    width: int
    ffn: int
    experts: int
    topk: int
    tokens: int

    @property
    def rows(self) -> int:
        """N = S*K, the rows of a balanced rank."""
        return self.tokens * self.topk

    @property
    def expert_values(self) -> int:
        """Numbers in the weights of one expert: FC1 [2F, H] and FC2 [H, F]."""
        return 3 * self.width * self.ffn

    def __str__(self) -> str:
        return (
            f"{self.name}: H={self.width} F={self.ffn} E={self.experts} K={self.topk} "
            f"S={self.tokens}"
        )


SHAPES = {
    "A": Shape("A", 4096, 14336, 8, 2, 8192),  # Mixtral 8x7B
    "B": Shape("B", 2048, 768, 128, 8, 8192),  # Qwen3-30B-A3B
    "C": Shape("C", 7168, 2048, 64, 8, 8192),  # DeepSeek-V3, a quarter of its experts
    "K": Shape("K", 2048, 1024, 896, 16, 4096),  # many experts over narrow (latent) rows
    "tiny": Shape("tiny", 64, 32, 8, 2, 64),
}


@dataclass(frozen=True)
class Case:
    """One routing.

    Attributes:
        kind: ``balanced``; ``one`` and ``even``, rank 0 gets ``value`` times the mean rows, the
            surplus on as few of its experts as possible, or on all; ``maxvio``, expert 0 gets
            1 + ``value`` times the mean.
    """

    kind: str
    value: float

    def __str__(self) -> str:
        return "balanced" if self.kind == "balanced" else f"{self.kind} {self.value:g}"


BALANCED = Case("balanced", 1.0)


def cases_of(
    shape: Shape, factors: tuple[float, ...], kinds: tuple[str, ...], maxvios: tuple[float, ...]
) -> list[Case]:
    """The routings to measure, each once: factor 1 of any kind and maxvio 0 are one.

    An expert can't be chosen by a token twice, so maxvio ends at E/K - 1: higher ones become that.
    """
    top = shape.experts / shape.topk - 1
    wanted = [Case(kind, factor) for kind in kinds for factor in factors]
    wanted += [Case("maxvio", min(value, top)) for value in maxvios]
    flat = [BALANCED if _is_balanced(case) else case for case in wanted]
    return sorted(dict.fromkeys(flat), key=lambda case: case != BALANCED)


def _is_balanced(case: Case) -> bool:
    return case.value == (0 if case.kind == "maxvio" else 1)


@dataclass(frozen=True, order=True)
class Variant:
    """A way to compute the layer.

    Attributes:
        dispatcher: of DISPATCHERS, or ``ideal``: the experts alone, balanced rows in place.
        experts: ``te``, Transformer Engine's grouped experts; ``ours``, the products that moonep
            uses, under any dispatcher.
    """

    dispatcher: str
    experts: str

    def __str__(self) -> str:
        return f"{self.dispatcher}/{self.experts}"


def variants(dispatchers: tuple[str, ...], experts: tuple[str, ...]) -> list[Variant]:
    """The ideal first, then every dispatcher with each kind of experts; moonep has its own."""
    made = [Variant(IDEAL, kind) for kind in ("ours", *experts)]
    for name in (name for name in DISPATCHERS if name in dispatchers):
        kinds = ("ours",) if name.startswith("moonep") else experts
        made += [Variant(name, kind) for kind in kinds]
    return list(dict.fromkeys(made))


def importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all ranks have to know.

    Attributes:
        experts: kinds of experts of Megatron's dispatchers.
        slots: B of moonep, none for E/R.
        iterations, warmups: timed ones and those before, of every routing.
        profile: count host synchronisations, and time the transfers that nothing hides.
        trace: a Chrome trace and a picture of one pass of moonep go here.
    """

    device: str
    ranks: int
    shapes: tuple[Shape, ...]
    dispatchers: tuple[str, ...]
    experts: tuple[str, ...]
    factors: tuple[float, ...]
    kinds: tuple[str, ...]
    maxvios: tuple[float, ...]
    slots: int | None
    iterations: int
    warmups: int
    profile: bool
    trace: Path | None

    def cases(self, shape: Shape) -> list[Case]:
        return cases_of(shape, self.factors, self.kinds, self.maxvios)
