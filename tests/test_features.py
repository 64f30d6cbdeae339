"""The table of features: its tests and refusals exist, and the README shows it."""

import argparse
import ast
from functools import cache
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from moonep_megatron import features
from moonep_megatron.config import add_arguments
from moonep_megatron.features import FEATURES
from moonep_megatron.refusals import REFUSED

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
REFUSED_FIELDS = {row.field for row in REFUSED}
# Limits of our own settings and of shapes, which no feature of Megatron's stands behind.
NO_FEATURE = {
    "num_moe_experts",
    "moe_moonep_slots",
    "moe_moonep_check_plan",
    "moe_moonep_redispatch",
    "moe_moonep_reuse",
    "moe_router_force_biased",
    "activation_func_clamp_value",
    "enable_autocast",
    "distributed_timeout_minutes",
    "distributed_timeout_seconds_after_init",
    "moe_pad_experts_for_cuda_graph_inference",
    "save_activations_interval",
    "save_dgrads_interval",
    "save_tokens_per_expert_interval",
}


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_is_tested_or_refused(feature):
    assert bool(feature.tests) != bool(feature.rows), "supported or refused, one of the two"
    for test in feature.tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in functions(file), f"there is no {test}"
    assert set(feature.rows) <= REFUSED_FIELDS
    assert feature.line.count("|") - feature.setting.count("|") == 5


def test_every_refusal_belongs_to_a_feature():
    rows = [row for feature in FEATURES for row in feature.rows]
    assert set(rows) | NO_FEATURE == REFUSED_FIELDS
    assert not set(rows) & NO_FEATURE
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_flags_exist():
    """Of the reference version of Megatron, or ours."""
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    flags = {option for action in parser._actions for option in action.option_strings}
    words = {word.strip(",") for feature in FEATURES for word in feature.setting.split()}
    # Newer than the reference version.
    newer = {"--moe-dispatch-fwd-dtype", "--moe-combine-bwd-dtype"}
    assert {word for word in words if word.startswith("--")} - flags <= newer


def test_readme_shows_the_table():
    text = README.read_text()
    shown = text[text.find(features.BEGIN) : text.find(features.END) + len(features.END)]
    assert shown == features.markdown(), (
        "README.md does not show the table of features: put the first table that "
        "`python -m moonep_megatron` prints there, markers included"
    )
