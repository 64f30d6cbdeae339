"""Stand-ins for Transformer Engine's grouped expert modules, with their attributes, on CPUs.

The classes carry upstream's names because the product knows expert modules by them. Their forward
passes are the plain loop, so that Megatron's alltoall runs on them too. Two forms of weights:
``weight0`` ... ``weight{n-1}`` [out,in], or one ``weight`` [n,out,in].
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class GroupedLinear(nn.Module):
    """n linear layers; rows are grouped by expert."""

    def __init__(
        self, n: int, inputs: int, outputs: int, config: TransformerConfig, single_weight: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.num_gemms, self.in_features, self.out_features = n, inputs, outputs
        self.use_bias = config.add_bias_linear
        self.single_grouped_weight = single_weight
        self.fuse_wgrad_accumulation = config.gradient_accumulation_fusion
        shape = (n, outputs, inputs) if single_weight else (outputs, inputs)
        shapes = dict.fromkeys(["weight"] if single_weight else self._names("weight"), shape)
        if self.use_bias:
            shapes |= dict.fromkeys(self._names("bias"), (outputs,))
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            # As Megatron marks expert parameters: their gradients reduce over expert data parallel.
            parameter.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(name, parameter)

    def forward(self, rows_MH: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        weights = self.weight if self.single_grouped_weight else self._all("weight")
        parts = rows_MH.split(counts)
        return torch.cat([part @ w.T for part, w in zip(parts, weights, strict=True)]), None

    def biases(self, counts: list[int]) -> Tensor | float:
        """Those of every row."""
        if not self.use_bias:
            return 0.0
        return torch.stack(self._all("bias")).repeat_interleave(torch.tensor(counts), dim=0)

    def _names(self, kind: str) -> list[str]:
        return [f"{kind}{i}" for i in range(self.num_gemms)]

    def _all(self, kind: str) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self._names(kind)]


class TEColumnParallelGroupedLinear(GroupedLinear):
    pass


class TERowParallelGroupedLinear(GroupedLinear):
    pass


class TEGroupedMLP(MegatronModule):
    """Megatron's experts module over the grouped linears above."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
        single_weight: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.input_size = config.hidden_size
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        inner, ffn = config.moe_ffn_hidden_size, config.moe_ffn_hidden_size
        if config.gated_linear_unit:
            inner *= 2
        rest: dict[str, Any] = dict(config=config, single_weight=single_weight)
        self.linear_fc1 = TEColumnParallelGroupedLinear(
            num_local_experts, config.hidden_size, inner, **rest
        )
        self.linear_fc2 = TERowParallelGroupedLinear(
            num_local_experts, ffn, config.hidden_size, **rest
        )
        self.activation_func = config.activation_func
        self.activation_recompute = False
        self.offload_expert_fc1 = self.offload_moe_act = False

    def forward(self, rows_MH: Tensor, counts_n: Tensor, probs_M: Tensor) -> tuple[Tensor, None]:
        counts = counts_n.tolist()
        inner_MI, _ = self.linear_fc1(rows_MH, counts)
        inner_MI = inner_MI + self.linear_fc1.biases(counts)
        act = self.config.activation_func
        if self.config.gated_linear_unit:
            gate_MF, linear_MF = inner_MI.chunk(2, dim=-1)
            inner_MF = act(gate_MF) * linear_MF
        else:
            inner_MF = act(inner_MI)
        scaled_MF = (inner_MF * probs_M[:, None]).to(inner_MF.dtype)
        out_MH, _ = self.linear_fc2(scaled_MF, counts)
        biases = self.linear_fc2.biases(counts) * probs_M[:, None]
        return (out_MH + biases).to(out_MH.dtype), None
