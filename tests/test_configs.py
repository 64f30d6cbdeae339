"""The argument files: Megatron accepts each with `moonep`, and each is the model that it names.

Megatron's own parser, validation and configuration run on every file, as its training scripts run
them.
"""

import dataclasses

import pytest
import torch
import yaml
from argument_files import CONFIGS, FILES, megatron, parameters, settings, too_old
from megatron.core.package_info import __version__
from ranks import run_ranks

from moonep_megatron.config import load_arguments


@dataclasses.dataclass(frozen=True)
class Published:
    """Parameters in units of 1e9, and the accuracy to which they are published.

    The total's is relative, that of the active ones absolute.
    """

    total: float
    active: float
    active_within: float
    counts_embedding: bool = True  # among the active ones
    mtp: float = 0.0
    total_within: float = 0.01


# Mixtral: the announcements of both models. Qwen3: the model cards of both. OLMoE, DeepSeek-V2-Lite
# and Kimi K2: the model cards, whose figures have few digits. gpt-oss: the model card.
# DeepSeek-V3: the description of the weight files beside its model card (of its versions, the one
# that counts the output layer and not the input embedding as active).
PUBLISHED = {
    "mixtral_8x7b": Published(46.7, 12.9, 0.01 * 12.9),
    "mixtral_8x22b": Published(141.0, 39.0, 0.01 * 39.0),
    "qwen3_30b_a3b": Published(30.5, 3.3, 0.1),  # published to one digit
    "qwen3_235b_a22b": Published(235.0, 22.0, 0.01 * 22.0),
    "olmoe_1b_7b": Published(6.9, 1.3, 0.05),  # published to one digit
    "deepseek_v2_lite": Published(15.7, 2.4, 0.06, counts_embedding=False),
    "kimi_k2": Published(1000.0, 32.0, 0.5, counts_embedding=False, total_within=0.03),
    "gpt_oss_20b": Published(20.91, 3.61, 0.01, counts_embedding=False, total_within=0.001),
    "deepseek_v3": Published(671.0, 36.6, 0.01 * 36.6, counts_embedding=False, mtp=11.5),
}


def read(stems):
    """Run Megatron over the files (in a process of its own): per stem, settings or an error."""
    results = {}
    for stem in stems:
        try:
            results[stem] = settings(*megatron(load_arguments(CONFIGS / f"{stem}.yaml")))
        except BaseException as error:
            results[stem] = f"{type(error).__name__}: {error}"
    return results


def skip_if_too_old(stem):
    if too_old(stem, __version__):
        pytest.skip(f"Megatron-LM {__version__} lacks flags of this file")


@pytest.fixture(scope="module")
def accepted():
    (results,) = run_ranks(1, read, [file.stem for file in FILES], timeout=240)
    return results


def test_every_file_is_checked():
    assert {file.stem for file in FILES} == {*PUBLISHED, "tiny", "kimi_k3_like"}


@pytest.mark.parametrize("stem", [file.stem for file in FILES])
def test_megatron_accepts(accepted, stem):
    skip_if_too_old(stem)
    assert isinstance(accepted[stem], dict), accepted[stem]
    assert accepted[stem]["moe_token_dispatcher_type"] == "moonep"
    assert accepted[stem]["expert_tensor_parallel_size"] == 1
    words = yaml.safe_load((CONFIGS / f"{stem}.yaml").read_text())
    assert accepted[stem]["max_tokens"] == words["seq-length"] * words["micro-batch-size"]


def read_file(path):
    _, config = megatron(load_arguments(path))
    return config.activation_func.__name__, config.gated_linear_unit


@pytest.mark.parametrize(
    ("flag", "function"),
    [
        ("swiglu", ("silu", True)),
        ("quick-geglu", ("quick_gelu", True)),
        ("squared-relu", ("squared_relu", False)),
        (None, ("gelu", False)),
    ],
)
def test_every_activation_that_a_flag_names(flag, function, tmp_path):
    words = yaml.safe_load((CONFIGS / "tiny.yaml").read_text())
    del words["swiglu"]
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(words | ({flag: True} if flag else {})))
    assert run_ranks(1, read_file, file) == [function]


@pytest.mark.parametrize("stem", PUBLISHED)
def test_parameters_are_as_published(accepted, stem):
    skip_if_too_old(stem)
    published = PUBLISHED[stem]
    total, active, mtp = (count / 1e9 for count in parameters(accepted[stem]))
    print(f"{stem}: {total:.3f} total, {active:.3f} active, {mtp:.3f} MTP")
    assert total == pytest.approx(published.total, rel=published.total_within)
    if not published.counts_embedding:
        active -= accepted[stem]["vocab_size"] * accepted[stem]["hidden_size"] / 1e9
    assert active == pytest.approx(published.active, abs=published.active_within)
    if published.mtp:
        assert mtp == pytest.approx(published.mtp, rel=0.01)


@pytest.mark.parametrize("stem", [file.stem for file in FILES])
def test_one_line_differs_from_alltoall(stem):
    lines = (CONFIGS / f"{stem}.yaml").read_text().splitlines()
    ours = [line for line in lines if "moonep" in line and not line.startswith("#")]
    # More slots than fit are worth a second line.
    more = ["moe-moonep-slots: 16"] if stem == "kimi_k3_like" else []
    assert ours == ["moe-token-dispatcher-type: moonep", *more]


# The count itself is checked against models that Megatron builds: one as it is, and one of each
# other kind made small.
SMALL = {
    "hidden-size": 64,
    "num-attention-heads": 4,
    "kv-channels": 16,
    "ffn-hidden-size": 96,
    "moe-ffn-hidden-size": 32,
    "num-experts": 8,
    "vocab-size": 128,
    "expert-model-parallel-size": 1,
    "no-gradient-accumulation-fusion": True,
    "no-persist-layer-norm": True,
    "no-masked-softmax-fusion": True,
    "use-cpu-initialization": True,
}
LATENT = {
    "num-layers": 4,
    "moe-layer-freq": "([0]+[1]*3)",
    "q-lora-rank": 24,
    "kv-lora-rank": 16,
    "qk-head-dim": 12,
    "qk-pos-emb-head-dim": 8,
    "v-head-dim": 20,
    "moe-shared-expert-intermediate-size": 40,
}
LEFT_OUT = ("pipeline", "mtp", "overlap", "use-distributed-optimizer", "bf16")


@pytest.mark.parametrize(
    ("stem", "changes"),
    [
        ("tiny", {"expert-model-parallel-size": 1}),
        ("qwen3_30b_a3b", SMALL | {"num-layers": 2, "num-query-groups": 2}),
        ("deepseek_v3", SMALL | LATENT),
        (
            "gpt_oss_20b",
            SMALL | {"num-layers": 2, "num-query-groups": 2, "softmax-type": "vanilla"},
        ),
    ],
)
def test_count_equals_a_model_of_megatrons(stem, changes, tmp_path):
    skip_if_too_old(stem)
    words = yaml.safe_load((CONFIGS / f"{stem}.yaml").read_text())
    words = {k: v for k, v in words.items() if not k.startswith(LEFT_OUT)} | changes
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(words))
    ((counted, built),) = run_ranks(1, count_both, file, timeout=120)
    assert counted == built


class NoParameters(torch.nn.Module):
    """In place of attention itself: without Transformer Engine there is none for MLA."""

    def __init__(self, *_, **__):
        super().__init__()


def count_both(path):
    """Parameters by our formula, and of the model that Megatron builds."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    args, config = megatron(load_arguments(path))
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = NoParameters
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )
    return parameters(settings(args, config))[0], sum(p.numel() for p in model.parameters())
