"""What the slots of one layer hold on every rank, and whether it is still true.

Letters as in `moonep_megatron.backends.base`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moonep_megatron.plan import Plan
from moonep_megatron.reuse import Held
from moonep_megatron.slots import SlotPool

FC1, FC2 = 0, 1


class Residents:
    """The tags of all ranks' slots of one layer, read anew before every decision.

    A copy is there where the receiver's tag has this layer, the expert, and the present version of
    its home's weights. Nothing else decides: no plan, and nothing kept from an earlier call.

    Args:
        slots: this rank's slots of the layer, with tags.
        version: the present version of this rank's home weights; it changes when they may have.
        homes: n.
        gather: an int64 [x] of every rank, stacked by rank.
    """

    def __init__(
        self,
        slots: SlotPool,
        version: Callable[[], int],
        homes: int,
        gather: Callable[[Tensor], Tensor],
    ) -> None:
        assert slots.tags is not None
        self.slots, self._version, self._homes, self._gather = slots, version, homes, gather
        self._tags: Tensor = slots.tags
        self._pairs: list[tuple[int, int]] = []
        self._planned_with: list[int] = []

    def look(self, layer: int) -> Tags:
        """The tags and versions of all ranks now. Collective."""
        mine = torch.cat([torch.tensor([self._version()]), self._tags.view(-1)])
        everyone = self._gather(mine).tolist()
        return Tags(layer, self._homes, [row[0] for row in everyone], [row[1:] for row in everyone])

    def held(self, layer: int) -> Held:
        """What a plan may prefer. Collective."""
        tags = self.look(layer)
        pairs = self._pairs if tags.versions == self._planned_with else []
        self._planned_with = tags.versions
        experts = [
            [tags.expert(rank, slot) for slot in range(self.slots.count)]
            for rank in range(len(tags.versions))
        ]
        return Held(experts, pairs)

    def planned(self, plan: Plan) -> None:
        """Remember who gave to whom, for the next plan."""
        donor_Rn = torch.where(
            plan.foreign_expert_Rn < 0, -1, plan.foreign_expert_Rn // self._homes
        )
        donors = enumerate(donor_Rn.amax(1).tolist())
        self._pairs = [(donor, receiver) for receiver, donor in donors if donor >= 0]

    def clear(self, slot: int, projection: int) -> None:
        """Say that a slot's weights are about to change."""
        self._tags[slot, projection] = -1

    def mark(self, slot: int, projection: int, tag: tuple[int, int, int]) -> None:
        """Say what a slot holds now."""
        self._tags[slot, projection] = torch.tensor(tag)


class Tags:
    """The tags of all ranks at one moment."""

    def __init__(self, layer: int, homes: int, versions: list[int], tags: list[list[int]]) -> None:
        self.layer, self.homes, self.versions, self._tags = layer, homes, versions, tags

    def wanted(self, expert: int) -> tuple[int, int, int]:
        """The tag of a present copy of an expert."""
        return self.layer, expert, self.versions[expert // self.homes]

    def has(self, rank: int, slot: int, projection: int, expert: int) -> bool:
        """Whether a slot of a rank holds a present copy."""
        return self._tag(rank, slot, projection) == self.wanted(expert)

    def expert(self, rank: int, slot: int) -> int:
        """The expert of which a slot holds both projections, present ones; -1 for none."""
        expert = self._tag(rank, slot, FC1)[1]
        present = expert >= 0 and all(self.has(rank, slot, p, expert) for p in (FC1, FC2))
        return expert if present else -1

    def _tag(self, rank: int, slot: int, projection: int) -> tuple[int, int, int]:
        at = 3 * (2 * slot + projection)
        layer, expert, version = self._tags[rank][at : at + 3]
        return layer, expert, version
