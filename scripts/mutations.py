"""The ways in which `scripts/mutants.py` breaks the package."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """Replace ``old``, which occurs exactly once in ``file``, by ``new``; then run ``tests``."""

    name: str
    file: str
    old: str
    new: str
    tests: str


EXPERTS, COLLECTIVE = "experts.py", "backends/collective.py"
BIASES = "tests/test_layer.py::test_biases"
MUTATIONS = (
    Mutation(
        "duplicate gradient dropped",
        COLLECTIVE,
        "(targets_n[expert] if into is None else into).add_(gradient)",
        "pass",
        "tests/test_layer.py::test_every_skew[2]",
    ),
    Mutation(
        "pull added twice",
        COLLECTIVE,
        "(targets_n[expert] if into is None else into).add_(gradient)",
        "(targets_n[expert] if into is None else into).add_(gradient, alpha=2)",
        "tests/test_gradients.py::test_every_place_of_gradients[main_grad]",
    ),
    Mutation(
        "local-first off",
        "plan.py",
        "local_RE = torch.minimum(counts_RE, rows_RE)",
        "local_RE = torch.zeros_like(rows_RE)",
        "tests/test_plan.py",
    ),
    Mutation(
        "source order shuffled",
        "plan.py",
        "left_start_ER = left_ER.reshape(-1).cumsum(0).view_as(left_ER) - left_ER",
        "left_start_ER = (\n        left_ER.sum(1).cumsum(0)[:, None] - left_ER.cumsum(1)\n    )",
        "tests/test_plan.py",
    ),
    Mutation(
        "fusion flag unset",
        EXPERTS,
        "parameter.grad_added_to_main_grad = True",
        "parameter.grad_added_to_main_grad = False",
        "tests/test_gradients.py::test_every_place_of_gradients[fused]",
    ),
    Mutation(
        "dummy gradient None",
        EXPERTS,
        "return _dummies[key].detach()",
        "return None",
        "tests/test_gradients.py::test_every_place_of_gradients[fused]",
    ),
    Mutation(
        "probability gradient dropped",
        EXPERTS,
        "return None, d_receive_MH, sweep.d_probs_N, *returned",
        "return None, d_receive_MH, torch.zeros_like(sweep.d_probs_N), *returned",
        "tests/test_layer.py::test_every_skew[2]",
    ),
    Mutation(
        "stale weights pushed",
        EXPERTS,
        "weights = {p: homes[p].weights() for p in projections}",
        "weights = {\n"
        "        p: homes[p].__dict__.setdefault('old', [w.clone() for w in homes[p].weights()])\n"
        "        for p in projections\n"
        "    }",
        "tests/test_gradients.py::test_optimizer_steps_equal_those_of_alltoall",
    ),
    Mutation(
        "parameter all-gather not awaited",
        "layer.py",
        "self.home.replay_pre_hooks()",
        "pass",
        "tests/test_gradients.py::test_optimizer_steps_equal_those_of_alltoall",
    ),
    Mutation(
        "a wave skipped in forward",
        EXPERTS,
        "for wave in range(call.route.waves):\n        if call.route.waves > 1:",
        "for wave in range(min(call.route.waves, 1)):\n        if call.route.waves > 1:",
        "tests/test_layer.py::test_waves_of_few_slots",
    ),
    Mutation(
        "a wave skipped in backward",
        EXPERTS,
        "for wave in range(call.route.waves):\n            self._slot_weights(wave)",
        "for wave in range(min(call.route.waves, 1)):\n            self._slot_weights(wave)",
        "tests/test_layer.py::test_waves_of_few_slots",
    ),
    Mutation(
        "one row too many on a rank",
        "caps.py",
        "return [share + (d < extra) for d in range(ranks)]",
        "found = [share + (d < extra) for d in range(ranks)]\n"
        "        if ranks > 1 and share:\n"
        "            found[0], found[-1] = found[0] + 1, found[-1] - 1\n"
        "        return found",
        "tests/test_layer.py::test_every_skew[3]",
    ),
    Mutation(
        "buffers without the slack",
        "backends/base.py",
        "grouped = most_rows(max_tokens * topk, slack)",
        "grouped = max_tokens * topk",
        "tests/test_slack.py::test_layers_against_the_dense_reference[2]",
    ),
    Mutation(
        "slack above what was asked",
        "caps.py",
        "rows = surplus[donor]\n",
        "rows = max(surplus[donor] - 1, 1)\n",
        "tests/test_slack.py::test_caps_against_the_slow_reference",
    ),
    Mutation(
        "a kept copy outlives an optimizer step",
        "weights.py",
        "kwargs: Any) -> None:\n    weights_changed()",
        "kwargs: Any) -> None:\n    pass",
        "tests/test_reuse.py::test_steps_are_seen_where_nothing_else_tells",
    ),
    Mutation(
        "a tag without its version",
        "backends/residents.py",
        "return self._tag(rank, slot, projection) == self.wanted(expert)",
        "return self._tag(rank, slot, projection)[:2] == self.wanted(expert)[:2]",
        "tests/test_reuse.py::test_stale_copies_are_never_used",
    ),
    Mutation(
        "tags of one projection for both",
        "backends/residents.py",
        "at = 3 * (2 * slot + projection)",
        "at = 3 * (2 * slot)",
        "tests/test_reuse.py::test_layers_against_the_dense_reference[2]",
    ),
    Mutation(
        "a tag on the device without its version",
        "../kernels/tags.py",
        " and there[2] == wanted[2]",
        "",
        "tests/test_emulated_push.py::test_only_a_changed_version_is_seen",
    ),
    Mutation(
        "a tag on the device without its layer",
        "../kernels/tags.py",
        "there[0] == wanted[0] and ",
        "",
        "tests/test_emulated_push.py::test_other_layers_tags_do_not_count",
    ),
    Mutation(
        "missing copies not pushed",
        "../kernels/push_weights.py",
        "count, total = tags.read_missing(copies, missing, backward)",
        "count, total = Int32(0), Int32(0)",
        "tests/test_emulated_push.py::test_only_a_changed_version_is_seen",
    ),
    Mutation(
        "a held expert leaves its slot",
        "../kernels/keeping.py",
        "            if slot >= 0:\n                stays",
        "            slot = Int32(-1)\n            if slot >= 0:\n                stays",
        "tests/test_emulated_kernels.py::test_foreign_experts_stay_in_their_slots",
    ),
    Mutation(
        "slots not refilled in backward",
        EXPERTS,
        "_push_all(call, backward=True)",
        "pass",
        "tests/test_layer.py::test_every_skew[3]",
    ),
    Mutation(
        "slot gradients accumulated over passes",
        EXPERTS,
        "self._weights(FC1, call.slots.grad1[:count], bounds, accumulate=False)",
        "self._weights(FC1, call.slots.grad1[:count], bounds, accumulate=True)",
        "tests/test_layer.py::test_every_skew[3]",
    ),
    Mutation(
        "home gradient overwrites the pulled one",
        EXPERTS,
        "self._weights(projection, into, bounds, accumulate=True)",
        "self._weights(projection, into, bounds, accumulate=False)",
        "tests/test_gradients.py::test_every_place_of_gradients[fused]",
    ),
    Mutation(
        "order of home experts ignored",
        COLLECTIVE,
        "home_order_Rn=home_order_Rn.cpu()",
        "home_order_Rn=None",
        "tests/test_layer.py::test_activations_in_every_form_of_weights",
    ),
    Mutation(
        "probability applied twice on the input",
        "layer.py",
        "probs = torch.ones_like(probs)",
        "probs = probs.clone()",
        "tests/test_layer.py::test_clamp_offset_and_probabilities_on_the_input",
    ),
    Mutation(
        "clamp of the linear half forgotten",
        "activation.py",
        "gate.clamp(max=clamp), linear.clamp(min=-clamp, max=clamp)",
        "gate.clamp(max=clamp), linear",
        "tests/test_layer.py::test_clamp_offset_and_probabilities_on_the_input",
    ),
    Mutation(
        "token limit not checked",
        COLLECTIVE,
        "self.max_tokens is not None and tokens > self.max_tokens",
        "self.max_tokens is None",
        "tests/test_faults.py::test_more_tokens_than_max_tokens",
    ),
    Mutation(
        "ids out of range not refused",
        COLLECTIVE,
        "bad = ((ids_sK < -1) | (ids_sK >= self.num_experts)).sum()",
        "bad = (ids_sK < -9).sum()",
        "tests/test_faults.py::test_ids_out_of_range",
    ),
    Mutation(
        "a rank with nothing to send leaves an exchange",
        COLLECTIVE,
        "if self.size == 1:\n            return x\n",
        "if self.size == 1:\n            return x\n"
        "        if not len(x):\n            return x.new_zeros(sum(received), *x.shape[1:])\n",
        "tests/test_layer.py::test_s0_rank",
    ),
    Mutation(
        "frozen experts get gradients",
        "weights.py",
        'getattr(p, "main_grad", None) if p.requires_grad else None for p in parameters',
        'getattr(p, "main_grad", None) for p in parameters',
        "tests/test_weights.py::test_frozen_experts_get_no_gradient[after-all]",
    ),
    Mutation(
        "slots kept as a buffer",
        "layer.py",
        "self.router_histogram: Tensor | None = None",
        "self.router_histogram = None\n        self.register_buffer('slot', torch.zeros(1))",
        "tests/test_checkpoint.py::test_slot_is_not_expert",
    ),
    Mutation(
        "a grouped row takes its neighbour's probability",
        COLLECTIVE,
        "probs_N.index_copy_(0, route.received_entry_C, arrived_C)",
        "probs_N.index_copy_(0, route.received_entry_C, arrived_C.roll(1))",
        "tests/test_dispatcher.py::test_every_entry_is_computed_once_by_its_expert",
    ),
    Mutation(
        "recompute stops before the gather",
        "dispatcher.py",
        "ctx.save_for_backward(sums_MH.new_empty(0))",
        "ctx.save_for_backward()",
        "tests/test_contract.py",
    ),
    Mutation(
        "rows lent while a checkpoint recomputes",
        "dispatcher.py",
        "_ = ctx.saved_tensors",
        "pass",
        "tests/test_contract.py",
    ),
    Mutation(
        "pre-sum without a gather",
        EXPERTS,
        "return any(leaves) or any(map(torch._C._will_engine_execute_node, nodes))",
        "return True",
        "tests/test_contract.py",
    ),
    Mutation(
        "lent rows kept for backward",
        EXPERTS,
        "else call.backend.keep(receive_MH)",
        "else receive_MH",
        "tests/test_contract.py",
    ),
    Mutation(
        "slots never freed",
        EXPERTS,
        "_end_beside(call)\n        return",
        "call.backend.join()\n        return",
        "tests/test_contract.py",
    ),
    Mutation(
        "a stream is joined that did nothing",
        EXPERTS,
        "if call.route.waves:\n",
        "if True:\n",
        "tests/test_contract.py::test_one_rank_joins_nothing",
    ),
    Mutation(
        "rows kept in evaluations",
        EXPERTS,
        "if call.differentiated and any(ctx.needs_input_grad):",
        "if any(ctx.needs_input_grad):",
        "tests/test_contract.py",
    ),
    Mutation(
        "two dtypes of gradients in one pull",
        EXPERTS,
        "wide = next((g.dtype for g in other.main_grads() or ()), wide)",
        "pass",
        "tests/test_contract.py",
    ),
    Mutation(
        "overlapped shared experts get no gradient for the layer's input",
        "dispatcher.py",
        "self.shared_experts.pre_forward_comm(hidden_states)",
        "self.shared_experts.pre_forward_comm(hidden_states.detach())",
        "tests/test_features_training.py::test_shared_experts",
    ),
    Mutation(
        "choices do not cross from a graph of the preprocessing",
        "dispatcher.py",
        '[f"choices.{field.name}" for field in fields(Choices)]',
        "[]",
        "tests/test_features_graphs.py::test_state_crosses_from_a_graph_in_tensors_alone",
    ),
    Mutation(
        "biases of duplicates have no gradient",
        "backends/base.py",
        "        dist.all_reduce(gradients_EW, group=self.group)\n",
        "",
        BIASES,
    ),
    Mutation(
        "bias of FC2 without its probability",
        "biases.py",
        "torch.where(select_NG, probs_N[:, None], 0)",
        "select_NG",
        BIASES,
    ),
    Mutation(
        "bias of FC2 not in the gradients of probabilities",
        EXPERTS,
        "        biases.add_to_d_probs(self.d_probs_N[:a], self.d_sums_MH)\n",
        "",
        BIASES,
    ),
)
