"""The collective backend under the rules of the symmetric one, so that CPUs can test the callers.

Lent rows, sums and slots are NaN after their return, and what must alternate is held to it: the
symmetric backend's kernels would overwrite them, or wait for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moonep_megatron import layer as moonep_layer
from moonep_megatron.backends.collective import CollectiveBackend
from moonep_megatron.backends.turns import Turns


class StrictBackend(CollectiveBackend):
    """``calls`` lists the names of what was called on any layer's backend."""

    slot_chunks = (1,)
    turns: Turns
    calls: list[str]
    lent: Tensor | None
    pushed: Any
    beside: bool

    def dispatch(self, route, x_sH, probs_sK=None):
        self._begin("dispatch")
        StrictBackend.lent, probs_N = super().dispatch(route, x_sH, probs_sK)
        return StrictBackend.lent, probs_N

    def keep(self, lent):
        self.calls.append("keep")
        return lent.clone()

    def free_receive(self):
        self._end("dispatch", "free_receive")
        StrictBackend.lent.detach().fill_(float("nan"))

    def presum(self, route, rows_NH, d_probs_N=None):
        self._begin("pre-sum")
        return super().presum(route, rows_NH, d_probs_N).clone()

    def gather(self, route, sums_MH, d_probs_N=None):
        self._end("pre-sum", "gather")
        answer = super().gather(route, sums_MH, d_probs_N)
        sums_MH.detach().fill_(float("nan"))
        return answer

    def push_weights(self, route, wave, weights, slots, *, backward=False):
        self._begin("push")
        StrictBackend.pushed, StrictBackend.beside = slots, True
        super().push_weights(route, wave, weights, slots, backward=backward)

    def free_slots(self):
        self._end("push", "free_slots")
        for projection in range(2):
            StrictBackend.pushed.weights(projection).fill_(float("nan"))

    def pull_gradients(self, route, wave, slots, targets):
        self.calls.append("pull")
        assert len({target.dtype for targets_n in targets for target in targets_n}) == 1
        StrictBackend.beside = True
        super().pull_gradients(route, wave, slots, targets)

    def join(self):
        assert self.beside, "a CUDA graph may not wait for a stream that does nothing in it"
        StrictBackend.beside = False
        super().join()

    def _begin(self, what: str) -> None:
        self.calls.append(what)
        self.turns.begin(what, StrictBackend, self.layer)

    def _end(self, what: str, name: str) -> None:
        self.calls.append(name)
        self.turns.end(what, StrictBackend)


@contextmanager
def strict() -> Iterator[list[str]]:
    """Layers built within have this backend; the list of its calls. Nothing may be left open."""
    made = moonep_layer.make_backend

    def make(config: Any, group: Any, num_experts: int, **_: Any) -> StrictBackend:
        return StrictBackend(
            group,
            num_experts=num_experts,
            slots=config.slots or num_experts // group.size(),
            planner=config.planner,
            max_tokens=config.max_tokens,
        )

    StrictBackend.turns, StrictBackend.calls, StrictBackend.beside = Turns(), [], False
    moonep_layer.make_backend = make
    try:
        yield StrictBackend.calls
        torch.testing.assert_close(StrictBackend.turns._open, {})
        assert not StrictBackend.beside
    finally:
        moonep_layer.make_backend = made
