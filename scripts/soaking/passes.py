"""Steps of a soak on one rank, and the dense reference of those that are compared.

What a step is (layer, microbatches, token counts, routing) follows from the seed and its number, so
that every rank can compute the reference of all tokens; only the delays are a rank's own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from cases import ROUTINGS, Batch, Case, weights
from moe import build, expert_parameters, home_experts, stacked
from reference import Expert, dense_moe, error
from torch import Tensor

from moonep_megatron.plan import Plan
from soaking.settings import Settings

KINDS = tuple(ROUTINGS)
MOST_IN_FLIGHT = 3
# Relative L2 error of one tensor: the order of sums in fp32, a few roundings in bf16.
BOUNDS = {torch.float32: 1.5e-6, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}


class Soak:
    """Layers of one rank and their steps.

    Attributes:
        plans: clones of all plans since they were last taken away.
        worst: the largest relative error of each kind of tensor so far.
        problems: what was wrong, in sentences.
        compared: steps that were compared with the reference.
    """

    def __init__(self, settings: Settings, rank: int, device: torch.device) -> None:
        self.settings, self.rank, self.device = settings, rank, device
        self.dtype = torch.bfloat16 if settings.on_gpu else torch.float32
        self.late = random.Random(f"{settings.seed} {rank}")
        self.plans: list[Plan] = []
        self.worst: dict[str, float] = {}
        self.problems: list[str] = []
        self.compared = 0
        self.cases = [self._case(number) for number in range(settings.layers)]
        self.layers = [build(case, "moonep") for case in self.cases]
        for layer in self.layers:
            layer.dispatch = self._noting_plans(layer, layer.dispatch)

    def step(self, number: int) -> int:
        """Forwards of some microbatches, then their backwards; how many there were."""
        draw = random.Random(f"{self.settings.seed} step {number}")
        which = draw.randrange(len(self.layers))
        everyone = [self._batches(draw) for _ in range(draw.randint(1, MOST_IN_FLIGHT))]
        layer, case = self.layers[which], self.cases[which]
        inputs, outputs = [], []
        for batches in everyone:
            mine = batches[self.rank]
            hidden = mine.tokens_sH[:, None].clone().requires_grad_()
            probs = mine.dense_probs(case.experts).requires_grad_()
            layer.router.probs, layer.router.maps = [probs], [mine.routing_map(case.experts)]
            inputs.append((hidden, probs))
            self._be_late()
            outputs.append(layer(hidden)[0])
        for batches, output in zip(everyone, outputs, strict=True):
            self._be_late()
            output.backward(batches[self.rank].grad_sH[:, None])
        if number % self.settings.check_every == 0:
            found = self._found(layer, everyone, inputs, outputs)
            self._compare(number, found, self._expected(case, layer, everyone))
        layer.zero_grad(set_to_none=True)
        return len(everyone)

    def _case(self, number: int) -> Case:
        s = self.settings
        options = [("slots", s.slots), ("backend", s.backend), ("max_tokens", s.tokens)]
        if s.on_gpu:
            # Below the silence after which all are ended: a rank that hangs is named.
            options.append(("timeout", s.timeout))
        return Case(
            name=f"layer {number}",
            ranks=s.ranks,
            experts=s.experts,
            topk=s.topk,
            tokens=((s.tokens,) * s.ranks,),
            hidden=s.hidden,
            ffn=s.ffn,
            dtype=self.dtype,
            seed=s.seed + number,
            moonep=tuple(options),
        )

    def _noting_plans(self, layer: torch.nn.Module, dispatch: Callable[..., object]) -> object:
        def noting(*args: Tensor) -> object:
            answer = dispatch(*args)
            plan = layer.token_dispatcher.current_route().plan
            # Clones are made on the stream: nothing waits for them before the block's end.
            self.plans.append(
                replace(plan, **{f.name: getattr(plan, f.name).clone() for f in fields(plan)})
            )
            return answer

        return noting

    def _be_late(self) -> None:
        if self.late.random() < 0.2:
            time.sleep(self.settings.delay * self.late.random())

    def _batches(self, draw: random.Random) -> list[Batch]:
        """What every rank brings in one microbatch; nobody does in one of thirty."""
        s = self.settings
        kind, seed = draw.choice(KINDS), draw.randrange(1 << 30)
        most = 0 if draw.random() < 1 / 30 else s.tokens
        counts = [draw.choice((0, most, draw.randint(0, most))) for _ in range(s.ranks)]
        case = replace(self.cases[0], seed=seed, routing=(kind,), tokens=(tuple(counts),))
        return [self._batch(case, rank, kind, tokens) for rank, tokens in enumerate(counts)]

    def _batch(self, case: Case, rank: int, kind: str, tokens: int) -> Batch:
        g = torch.Generator().manual_seed(case.seed + rank)
        ids = ROUTINGS[kind](g, tokens, rank, case)
        probs = torch.rand(tokens, case.topk, generator=g) + 0.1
        hidden, grad = (torch.randn(tokens, case.hidden, generator=g) for _ in range(2))
        return Batch(
            tokens_sH=hidden.to(self.dtype),
            ids_sK=ids,
            probs_sK=probs / probs.sum(1, keepdim=True),
            grad_sH=grad.to(self.dtype),
        ).to(self.device)

    def _found(
        self,
        layer: torch.nn.Module,
        everyone: list[list[Batch]],
        inputs: list[tuple[Tensor, Tensor]],
        outputs: list[Tensor],
    ) -> dict[str, list[Tensor]]:
        """Outputs and gradients of this rank's tokens, and of each of its experts, by kind."""
        mine = [batches[self.rank] for batches in everyone]
        fc1, fc2 = (stacked([p.grad for p in fc]) for fc in expert_parameters(layer))
        return {
            "output": [output.detach()[:, 0] for output in outputs],
            "input gradient": [hidden.grad[:, 0] for hidden, _ in inputs],
            "probability gradient": [
                probs.grad.gather(1, batch.ids_sK)
                for (_, probs), batch in zip(inputs, mine, strict=True)
            ],
            "FC1 gradient": list(fc1),
            "FC2 gradient": list(fc2),
        }

    def _expected(
        self, case: Case, layer: torch.nn.Module, everyone: list[list[Batch]]
    ) -> dict[str, list[Tensor]]:
        expected: dict[str, list[Tensor]] = {name: [] for name in ("output", "input gradient")}
        expected["probability gradient"] = []
        fc1 = fc2 = torch.zeros((), dtype=torch.float64, device=self.device)
        for batches in everyone:
            whole = [torch.cat([vars(b)[f.name] for b in batches]) for f in fields(Batch)]
            tokens, ids, probs, grad = whole
            dense = dense_moe(Expert(), tokens, ids, probs, *weights(case), grad)
            first = sum(len(b.ids_sK) for b in batches[: self.rank])
            mine = slice(first, first + len(batches[self.rank].ids_sK))
            expected["output"].append(dense.output_TH[mine])
            expected["input gradient"].append(dense.grad_tokens_TH[mine])
            expected["probability gradient"].append(dense.grad_probs_TK[mine])
            fc1, fc2 = fc1 + dense.grad_fc1_EIH, fc2 + dense.grad_fc2_EHF
        home = home_experts(layer)
        return expected | {"FC1 gradient": list(fc1[home]), "FC2 gradient": list(fc2[home])}

    def _compare(
        self, number: int, found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]
    ) -> None:
        self.compared += 1
        for name, values in expected.items():
            for value, actual in zip(values, found[name], strict=True):
                off = error(actual, value)
                self.worst[name] = max(self.worst.get(name, 0.0), off)
                # Written so that a NaN is wrong.
                if not off <= BOUNDS[self.dtype]:
                    self.problems.append(
                        f"rank {self.rank}, step {number}: {name} is off by {off:.1e} relative, "
                        f"above {BOUNDS[self.dtype]:.1e}"
                    )
