"""The recipe object that megatron-core hands to Transformer Engine from our synced config is what the policy promises. Needs Transformer Engine, no GPU."""

import pytest

from mpbridge.precision.registry import get_mixed_precision_config, recipes
from mpbridge.precision.resolve import resolve

LAYERS = 16
"""Deep enough for the recipe with 14 BF16 layers to quantize something."""

CLASSES = {
    "delayed": "DelayedScaling", "tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}  # fmt: skip
"""Transformer Engine 2.11 common/recipe/__init__.py."""

POLICIES = {name: resolve(get_mixed_precision_config(name)) for name in sorted(recipes)}
QUANTIZED = [name for name, policy in POLICIES.items() if policy.quantized and policy.quant.row.core is not None]
"""By Transformer Engine; torchao's scalings have no word of megatron-core's."""


def scaled(*scalings: str) -> list[str]:
    return [name for name in QUANTIZED if POLICIES[name].quant.scaling in scalings]


def synced(name: str):
    from mpbridge.backend.megatron.targets import build
    from mpbridge.common.machines import machine
    from mpbridge.planning.capability import ASSUMED
    from mpbridge.precision.sync.plan import plan

    policy = resolve(get_mixed_precision_config(name), layers=LAYERS)
    inputs = {
        "model": {"num_layers": LAYERS, "hidden_size": 128, "num_attention_heads": 4},
        "optimizer": {"lr": 1e-3, "use_distributed_optimizer": True},
        "ddp": {"use_distributed_optimizer": True},
    }
    # built for a Blackwell that is not here: only recipe objects are made, no kernel runs
    return policy, build(inputs, plan(policy, **inputs), machine=machine("b200"), versions=ASSUMED).model


def core_recipe(config):
    import torch
    from megatron.core.fp4_utils import get_fp4_recipe
    from megatron.core.fp8_utils import get_fp8_recipe

    from mpbridge.backend.devices import device_layer

    # delayed scaling asks for the current device; without a GPU the CPU layer answers
    with device_layer(torch.cuda.is_available()):
        return get_fp8_recipe(config) if config.fp8 else get_fp4_recipe(config)


@pytest.mark.parametrize("name", QUANTIZED)
def test_te_recipe_is_of_the_promised_class_and_format(name, transformer_engine):
    from transformer_engine.common.recipe import Format

    policy, config = synced(name)
    recipe = core_recipe(config)
    quant = policy.quant
    assert CLASSES[quant.scaling] in {cls.__name__ for cls in type(recipe).__mro__}
    if quant.bits == 8:
        assert recipe.fp8_format is {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}[quant.format]
    else:
        assert recipe.fp4_format is Format.E2M1


@pytest.mark.parametrize("name", [n for n in QUANTIZED if POLICIES[n].fp8])
def test_te_picks_the_element_format_of_each_direction_that_the_policy_names(name, transformer_engine):
    from transformer_engine.pytorch.quantization import get_fp8_te_dtype

    policy, config = synced(name)
    recipe = core_recipe(config)
    for gradient in (False, True):
        te_dtype = get_fp8_te_dtype(recipe, fprop_tensor=not gradient)
        word = getattr(te_dtype, "name", str(te_dtype).rpartition(".")[2])  # from 2.20 an enumeration of numbers
        assert word.lower().removeprefix("kfloat8") == policy.fp8.element(gradient=gradient)


@pytest.mark.parametrize("name", scaled("delayed"))
def test_delayed_scaling_keeps_margin_history_and_algorithm(name, transformer_engine):
    policy, config = synced(name)
    recipe, promised = core_recipe(config), policy.fp8
    assert (recipe.margin, recipe.amax_history_len) == (promised.margin, promised.amax_history)
    assert recipe.amax_compute_algo == promised.amax_algo


@pytest.mark.parametrize("name", scaled("blockwise", "nvfp4"))
def test_block_extents_are_those_of_our_table(name, transformer_engine):
    policy, config = synced(name)
    recipe = core_recipe(config)
    activations, weights = policy.quant.row.blocks
    if policy.quant.scaling == "blockwise":
        assert (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim) == (1, 2, 1)
        assert (activations.across, weights.across) == (1, weights.along)
    else:
        assert recipe.fp4_quant_fwd_weight.fp4_2d_quantization is (weights.across > 1)
        assert recipe.fp4_quant_fwd_inp.fp4_2d_quantization is (activations.across > 1)
        assert recipe.fp4_quant_bwd_grad.stochastic_rounding
        assert recipe.fp4_quant_fwd_inp.random_hadamard_transform


@pytest.mark.parametrize("name", QUANTIZED)
def test_bf16_edge_layers_are_those_that_the_policy_counts(name, transformer_engine):
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    policy, config = synced(name)
    found = tuple(i for i in range(LAYERS) if is_first_last_bf16_layer(config, i))
    assert found == policy.bf16_layers(LAYERS)
