"""enable() and disable(): what changes in Megatron, in which order of imports, and how it ends.

They change names for the whole process, so every scenario runs in a process of its own: a fresh
one where it matters what has been imported, else a fork in which Megatron is imported and the
process groups of one rank exist. A scenario is a function below whose name starts with `_`.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest
from fresh import python
from ranks import run_ranks

# --- tools of the scenarios ----------------------------------------------------------------------


def groups():
    """Process groups of one process."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def config(dispatcher="moonep", **more):
    from megatron.core.transformer.transformer_config import TransformerConfig

    fixed = dict(num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True)
    moe = dict(num_moe_experts=4, add_bias_linear=False, moe_token_dispatcher_type=dispatcher)
    return TransformerConfig(**fixed | moe | more)


def raises(kind, text, function, *args, **kwargs):
    with pytest.raises(kind) as error:
        function(*args, **kwargs)
    assert text in str(error.value), str(error.value)


def gpt_layer(spec_module, groups_, dispatcher):
    """A GPT decoder layer's MoE part, built as Megatron builds it."""
    spec = spec_module.get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    return spec.submodules.mlp(config=config(dispatcher), pg_collection=groups_, is_mtp_layer=False)


def hybrid_mlp(stack):
    """The MoE layer's constructor inside the specification of a hybrid model."""
    return stack.submodules.moe_layer.submodules.mlp


def classes():
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from moonep_megatron.layer import MoonEPMoELayer

    return MoELayer, MoonEPMoELayer


# --- scenarios ----------------------------------------------------------------------------------


def _enabled_before_specifications_are_imported():
    import moonep_megatron

    assert "torch" not in sys.modules
    assert not [name for name in sys.modules if name.startswith("megatron")]
    moonep_megatron.enable()
    moonep_megatron.enable()
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.hybrid import hybrid_layer_specs

    stock, ours = classes()
    hybrid = (hybrid_layer_specs.hybrid_stack_spec, hybrid_layer_specs.hybrid_inference_stack_spec)
    assert [hybrid_mlp(spec).func for spec in hybrid] == [ours, ours]
    pg = groups()
    assert type(gpt_layer(gpt_layer_specs, pg, "moonep")) is ours
    assert type(gpt_layer(gpt_layer_specs, pg, "allgather")) is stock

    moonep_megatron.disable()
    assert [hybrid_mlp(spec).func for spec in hybrid] == [stock, stock]
    raises(ValueError, "Unsupported", gpt_layer, gpt_layer_specs, pg, "moonep")


def _enabled_after_specifications_are_imported():
    import typing

    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig

    import moonep_megatron

    stock, ours = classes()
    mlp = hybrid_mlp(hybrid_layer_specs.hybrid_stack_spec)
    submodules = mlp.keywords["submodules"]
    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    before = (
        typing.get_args(field.type),
        TransformerConfig.__post_init__,
        stock.__init__,
        moe_module_specs.MoELayer,
    )
    old_gpt_spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)

    moonep_megatron.enable()
    moonep_megatron.enable()
    assert typing.get_args(field.type) == (*before[0], "moonep")
    assert hybrid_mlp(hybrid_layer_specs.hybrid_stack_spec) is mlp
    assert mlp.func is ours
    assert mlp.keywords["submodules"] is submodules
    pg = groups()
    assert type(gpt_layer(gpt_layer_specs, pg, "moonep")) is ours
    assert type(gpt_layer(gpt_layer_specs, pg, "allgather")) is stock
    assert type(gpt_layer(gpt_layer_specs, pg, "alltoall")) is stock
    assert type(mlp(config=config("alltoall"), pg_collection=pg, is_mtp_layer=False)) is stock
    assert type(mlp(config=config(), pg_collection=pg, is_mtp_layer=False)) is ours

    # A specification that was built before enable() names Megatron's layer: it says so.
    old = old_gpt_spec.submodules.mlp
    raises(ValueError, "moonep_megatron.enable()", old, config=config(), pg_collection=pg)
    raises(ValueError, "python -m moonep_megatron.run", old, config=config(), pg_collection=pg)
    assert type(old(config=config("allgather"), pg_collection=pg)) is stock

    moonep_megatron.disable()
    after = (
        typing.get_args(field.type),
        TransformerConfig.__post_init__,
        stock.__init__,
        moe_module_specs.MoELayer,
    )
    assert after == before
    assert mlp.func is stock
    moonep_megatron.disable()
    moonep_megatron.enable()
    assert mlp.func is ours


def _configurations_are_checked_when_they_are_built():
    from megatron.core.transformer.enums import CudaGraphModule

    import moonep_megatron

    config(expert_tensor_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True)
    moonep_megatron.enable(moonep_megatron.MoonEPConfig(slots=2))
    made = config()
    assert made.moe_token_dispatcher_type == "moonep"
    # What Megatron grants to alltoall by name is granted …
    config(moe_shared_expert_overlap=True, moe_shared_expert_intermediate_size=16)
    # … and so are graphs over the experts, which it grants to none without a capacity …
    for modules in (["attn", "moe"], "attn,moe", [CudaGraphModule.moe]):
        graphed = dict(cuda_graph_impl="transformer_engine", cuda_graph_modules=modules)
        held = config(**graphed)
        assert CudaGraphModule.moe in held.cuda_graph_modules
        assert held.moe_expert_capacity_factor is None
        assert held.moe_pad_expert_input_to_capacity is False
        raises(AssertionError, "drop-padding", config, "alltoall", **graphed)
        padded = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
        raises(ValueError, "--moe-expert-capacity-factor", config, **graphed, **padded)
    # … what we do not support of it is refused by us …
    raises(ValueError, "--moe-expert-capacity-factor", config, moe_expert_capacity_factor=1.0)
    # … what it refuses for alltoall, by Megatron.
    raises(ValueError, "flex", config, moe_enable_deepep=True)
    tensor = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    raises(ValueError, "--expert-tensor-parallel-size", config, **tensor)
    config(**tensor, expert_tensor_parallel_size=1)
    raises(ValueError, "--moe-moonep-slots = 2", config, expert_model_parallel_size=4)
    raises(ValueError, "--num-experts", config, num_moe_experts=6, expert_model_parallel_size=4)
    # Megatron's own dispatchers are none of our business.
    shared = config("alltoall", moe_shared_expert_overlap=True,
                    moe_shared_expert_intermediate_size=16)  # fmt: skip
    assert shared.moe_token_dispatcher_type == "alltoall"
    # A configuration without experts has no dispatcher.
    config(num_moe_experts=None, moe_expert_capacity_factor=1.0)
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    raises(ValueError, "--moe-expert-capacity-factor", MLATransformerConfig, num_layers=1,
           hidden_size=16, num_attention_heads=2, num_moe_experts=4, multi_latent_attention=True,
           moe_token_dispatcher_type="moonep", moe_expert_capacity_factor=1.0)  # fmt: skip

    # A failure inside Megatron's own checks leaves the name as the user wrote it.
    broken = config("alltoall")
    broken.moe_token_dispatcher_type, broken.num_attention_heads = "moonep", 3
    broken.tensor_model_parallel_size = 2
    raises(ValueError, "", TransformerConfig.__post_init__, broken)
    assert broken.moe_token_dispatcher_type == "moonep"
    moonep_megatron.disable()
    config("alltoall", moe_expert_capacity_factor=1.0)


def _a_second_enable_changes_only_the_configuration():
    import moonep_megatron
    from moonep_megatron import config as moonep

    moonep_megatron.enable(moonep_megatron.MoonEPConfig(slots=1))
    moonep_megatron.enable()
    assert moonep.active().slots == 1
    moonep_megatron.enable(moonep_megatron.MoonEPConfig(slots=2))
    assert moonep.active().slots == 2
    moonep_megatron.disable()
    assert moonep.active().slots is None


def _megatron_already_knows_moonep():
    import logging
    import typing

    said = io.StringIO()
    logging.getLogger("moonep_megatron").addHandler(logging.StreamHandler(said))

    from megatron.core.transformer.transformer_config import TransformerConfig

    import moonep_megatron

    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    field.type = typing.Literal[(*typing.get_args(field.type), "moonep")]
    stock, _ = classes()
    before = TransformerConfig.__post_init__, stock.__init__
    moonep_megatron.enable()
    assert (TransformerConfig.__post_init__, stock.__init__) == before
    moonep_megatron.disable()
    assert "moonep" in typing.get_args(field.type)
    assert "dispatcher moonep of its own" in said.getvalue()


def _other_versions_are_refused_by_name():
    import megatron.core
    from megatron.core.transformer.transformer_config import TransformerConfig

    import moonep_megatron

    before = TransformerConfig.__post_init__
    for version in ("0.16.1", "0.17.0", "0.18.0rc1", "0.21.0", "0.21.0rc0", "1.0.0"):
        megatron.core.__version__ = version
        raises(ImportError, f"megatron-core {version} is not supported", moonep_megatron.enable)
        raises(ImportError, "pip install 'megatron-core>=0.18,<0.21'", moonep_megatron.enable)
        assert TransformerConfig.__post_init__ is before
    for version in ("0.18.0", "0.19.2", "0.20.0rc0", "0.20.0"):
        megatron.core.__version__ = version
        moonep_megatron.enable()
        moonep_megatron.disable()


def _a_failure_leaves_nothing_behind():
    import typing

    from megatron.core.transformer.transformer_config import TransformerConfig

    import moonep_megatron

    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    before = TransformerConfig.__post_init__
    sys.modules["moonep_megatron.layer"] = None
    raises(ImportError, "moonep_megatron.layer", moonep_megatron.enable)
    assert TransformerConfig.__post_init__ is before
    assert "moonep" not in typing.get_args(field.type)
    del sys.modules["moonep_megatron.layer"]
    moonep_megatron.enable()
    assert "moonep" in typing.get_args(field.type)


def _no_megatron_at_all():
    sys.modules["megatron"] = None
    import moonep_megatron

    raises(ImportError, "pip install 'megatron-core>=0.18,<0.21'", moonep_megatron.enable)


def _no_megatron_training():
    sys.modules["megatron.training"] = None
    import moonep_megatron
    from moonep_megatron import config as moonep

    moonep_megatron.enable(moonep_megatron.MoonEPConfig(planner="pairs"))
    assert config().moe_token_dispatcher_type == "moonep"
    assert moonep.active().planner == "pairs"


def _command_line():
    import moonep_megatron
    from moonep_megatron.config import from_arguments

    moonep_megatron.enable()
    args = parse("--moe-token-dispatcher-type moonep --moe-moonep-slots 3 --moe-moonep-log-maxvio")
    assert args.moe_token_dispatcher_type == "moonep"
    assert from_arguments(args) == moonep_megatron.MoonEPConfig(slots=3, log_maxvio=True)
    assert "invalid choice: 'fastest'" in parse("--moe-moonep-planner fastest")
    moonep_megatron.disable()
    assert "invalid choice: 'moonep'" in parse("--moe-token-dispatcher-type moonep")
    assert "unrecognized arguments: --moe-moonep-slots" in parse("--moe-moonep-slots 3")


def parse(words):
    """What Megatron's parser makes of a command line: arguments, or what it prints on leaving."""
    from megatron.training import arguments

    sys.argv = ["script", *words.split()]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return arguments.parse_args()
    except SystemExit:
        return said.getvalue()


FRESH = [_enabled_before_specifications_are_imported, _no_megatron_at_all]
FORKED = [
    _enabled_after_specifications_are_imported,
    _configurations_are_checked_when_they_are_built,
    _a_second_enable_changes_only_the_configuration,
    _megatron_already_knows_moonep,
    _other_versions_are_refused_by_name,
    _a_failure_leaves_nothing_behind,
    _no_megatron_training,
    _command_line,
]


def name(scenario):
    return scenario.__name__.strip("_")


@pytest.mark.parametrize("scenario", FRESH, ids=name)
def test_fresh(scenario):
    done = python("-c", f"import test_enable; test_enable.{scenario.__name__}()")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("scenario", FORKED, ids=name)
def test_forked(scenario):
    run_ranks(1, scenario, timeout=120)


def test_megatron_names_its_layer_for_specifications_in_one_place_only():
    import megatron.core

    core = Path(megatron.core.__file__).parent
    building = re.compile(r"(partial\(|module=|spec_module=)\s*MoELayer\b|\bMoELayer\(config")
    places = {
        str(path.relative_to(core))
        for path in core.rglob("*.py")
        if building.search(path.read_text())
    }
    assert places == {"models/gpt/moe_module_specs.py"}
