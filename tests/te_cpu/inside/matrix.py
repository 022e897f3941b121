"""What has to train over Transformer Engine's modules, audited in every step: recipes, models, optimizers and storage forms, in one process."""

import importlib
import math

import pytest

from mpbridge import pretrain
from mpbridge.backend.models.gpt import layer_specs
from mpbridge.common.errors import MpbridgeError
from mpbridge.common.probe import installed, this_machine
from mpbridge.planning.capability import can_run
from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve
from mpbridge.te_cpu.played import now
from mpbridge.training.process import process_group
from tests.te_cpu.two_ranks import BLOCKWISE, DELAYED, MXFP8, NVFP4, OVERLAP, TENSORWISE, WHOLE

from .training import BLACKWELL, tiny

DEEP = "model.num_layers=4"
SMALL = (
    "model.num_layers=2", "model.moe_layer_freq=[0,1]", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.moe_ffn_hidden_size=128",
    "model.moe_shared_expert_intermediate_size=128", "model.max_sequence_length=64", "data.seq_length=64", "model.moe_grouped_gemm=true",
)  # fmt: skip
SHORT = ("mixed_precision.fp8_amax_history_len=4", "train.micro_batch_size=1")
AWARE = ("optimizer.use_precision_aware_optimizer=true",)
RECOMPUTE = ("model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1")
REST = "mixed_precision.fp8_param_gather=true"
PLAIN = "mixed_precision.fp8_param_gather=false"


def trains(recipe: str, *overrides: str, model: str = "gpt_tiny") -> None:
    """Three steps, each audited; the loss falls. A time limit's SIGTERM ends a run early, which is no fault of the recipe."""
    summary = pretrain(tiny(recipe, "train.audit=stop", "audit.every=1", *overrides, model=model), quiet=True)
    assert summary.stopped is None, f"{recipe}: stopped by {summary.stopped} after step {summary.iterations}"
    assert math.isfinite(summary.last_loss)
    assert summary.last_loss < summary.first_loss


HOPPERS = {  # each setting in one run (delayed with overlap and blockwise: training.py; delayed without overlap: measured.py)
    "delayed, a short history": (DELAYED, PLAIN, *SHORT),
    "delayed, a short history, recomputed": (DELAYED, *RECOMPUTE, *SHORT),
    "tensorwise, overlap on, first and last layers in BF16": (TENSORWISE, DEEP, *OVERLAP),
    "blockwise at rest": (BLOCKWISE, REST),
    "precision-aware, FP8 and BF16 moments": ("bf16_mixed", *AWARE, "optimizer.exp_avg_dtype=fp8", "optimizer.exp_avg_sq_dtype=bf16"),
    "modules, plain DDP": (
        "bf16_mixed", "ddp.use_distributed_optimizer=false", "mixed_precision.modules={'*.mlp.linear_fc1': tensorwise, '*.mlp.linear_fc2': tensorwise}",
    ),
    "FP16 around FP8": ("fp16_with_fp8_current_scaling_mixed", WHOLE, "mixed_precision.initial_loss_scale=1024"),
}  # fmt: skip
BLACKWELLS = {  # (mxfp8 with a reused gradient buffer and nvfp4: training.py)
    "mxfp8, not at rest": (MXFP8, PLAIN, "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag=false"),
    "nvfp4, first and last layers in BF16": (NVFP4, DEEP, "mixed_precision.first_last_layers_bf16=true"),
}
if now().release >= (2, 12):  # a rule forbids it before: Transformer Engine's cached weight has no column copy
    BLACKWELLS["nvfp4, recomputed"] = (NVFP4, *RECOMPUTE)
EXPERTS = {"mxfp8": (MXFP8, *OVERLAP), "nvfp4": (NVFP4,)} if BLACKWELL else {
    "delayed": (DELAYED,), "blockwise": (BLOCKWISE,)}  # fmt: skip
"""(tensorwise, by expert parallelism too: two_ranks.py)"""


@pytest.mark.parametrize("name", BLACKWELLS if BLACKWELL else HOPPERS)
def test_it_trains_and_every_audit_passes(name) -> None:
    recipe, *overrides = (BLACKWELLS if BLACKWELL else HOPPERS)[name]
    trains(recipe, *overrides)


@pytest.mark.played("blackwell")
def test_a_matrix_built_within_attention_is_no_product_of_it() -> None:
    """Transformer Engine builds NVFP4's Hadamard matrix where it first quantizes: in core attention, if the linears before it stay in BF16."""
    importlib.import_module("transformer_engine.pytorch.tensor.nvfp4_tensor").get_rht_matrix.cache_clear()
    trains(NVFP4, "mixed_precision.modules={'*.linear_qkv': bf16, '*.linear_proj': bf16}")


@pytest.mark.parametrize(
    "scaling", [pytest.param(name, marks=pytest.mark.slow if name == "mxfp8" else ()) for name in EXPERTS]
)
def test_grouped_experts_train(scaling) -> None:
    recipe, *overrides = EXPERTS[scaling]
    trains(recipe, *SMALL, *overrides, model="moe_tiny")


def test_layers_of_experts_normalize_queries_and_keys_as_the_model_asks() -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import L2Norm

    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, num_moe_experts=2, moe_layer_freq=[0, 1], qk_l2_norm=True
    )
    with process_group(False):
        parallel_state.initialize_model_parallel()
        try:
            layers = layer_specs(config, None, None)[0].layer_specs
        finally:
            parallel_state.destroy_model_parallel()
    for layer in layers:
        kinds = layer.submodules.self_attention.submodules
        assert (kinds.q_layernorm, kinds.k_layernorm) == (L2Norm, L2Norm)


@pytest.mark.played("hopper")
def test_a_router_in_transformer_engines_library_is_no_fault(monkeypatch) -> None:
    """megatron-core multiplies routers by its general_gemm where that can be imported: 0.16 beside releases before 2.11, later ones always."""
    from megatron.core.transformer.moe import moe_utils
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    multiplied = []

    def gemm(one, other, out_dtype=None, **more):
        multiplied.append(more["layout"])
        return general_gemm(one, other, out_dtype=out_dtype, **more)

    monkeypatch.setattr(moe_utils, "te_general_gemm", gemm, raising=False)
    trains(DELAYED, *SMALL, model="moe_tiny")
    assert {"TN", "NN", "NT"} <= set(multiplied)


def native(name: str) -> bool:
    return can_run(resolve(get_mixed_precision_config(name)), this_machine(), installed()).native


def settings_of(name: str, model: str) -> list[str]:
    """What a recipe of the registry needs beside TINY to train that model."""
    policy = resolve(get_mixed_precision_config(name))
    more = list(OVERLAP) if policy.reuse_grad_buffer else []
    if model == "moe_tiny":
        more += SMALL
    # edge layers of a recipe leave something to quantize
    layers = 2 + sum(policy.ends) if policy.ends and sum(policy.ends) > 4 else 6
    deep = [f"model.num_layers={layers}"]
    deep += [f"model.moe_layer_freq={[0] + [1] * (layers - 1)}"] if model == "moe_tiny" else []
    sharded = policy.stored or name in ("bf16_mixed_bf16_moments", "bf16_megatron_fsdp")
    more += deep + ([] if sharded else ["ddp.use_distributed_optimizer=false"])
    if name.startswith("fp16"):
        more.append("mixed_precision.initial_loss_scale=1024")
    return more


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt_tiny", "moe_tiny"])
@pytest.mark.parametrize("name", [name for name in recipes if native(name)])
def test_every_recipe_of_the_registry_trains(name, model) -> None:
    trains(name, *settings_of(name, model), model=model)


@pytest.mark.played("hopper")  # a Blackwell runs them all
def test_a_recipe_of_another_machine_is_refused_before_anything_is_built() -> None:
    with pytest.raises(MpbridgeError, match="Blackwell"):
        trains(MXFP8, *OVERLAP)
