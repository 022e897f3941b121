"""Why a fact of a recipe is otherwise in another stack, or the nearest equivalent there: one row per fact, one table for all stacks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.meaning import Meaning

_SCALER = "torch's GradScaler halves at every overflow and has no minimum"
_AWARE = "it has an effect only with --use-precision-aware-optimizer"
_ONE_DTYPE = "the whole model is in one dtype"
_WIDE = "norms, softmax and loss run in FP32, in more memory"
REASONS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    # row of a comparison -> stacks, '' for those that are not named -> the reason
    "storage": {"megatron-lm": "checkpoints hold 16-bit parameters and FP32 main weights"},
    "main": {
        "": "they start from FP32 values, not from values rounded to 16 bits, and 16-bit gradients are cast up before they are added",
        "megatron-lm": "Megatron-LM's main weights start from the parameters rounded to 16 bits",
    },
    "autocast": {
        "megatron-lm": "no flag; weights and activations are cast by the model instead",
        "megatron-bridge": "autocast_enabled has no effect on megatron-core there (its name is enable_autocast)",
        "automodel": "distributed.autocast_dtype exists, but no language-model recipe reads it",
        "lightning transformers": _WIDE,
        "deepspeed": "torch_autocast, with FP32 storage, instead of bf16.enabled",
    },
    "wire": {"torchtitan": "mixed_precision_reduce takes float32 only", "lightning": "torch DDP reduces in the parameter's dtype"},
    "accumulator": {
        "": "the reduced gradient accumulates in the parameter's dtype",
        "megatron-lm megatron-bridge": "one setting for both; only Megatron-FSDP's three dtypes separate them (--engine megatron_fsdp)",
        "deepspeed": "",
    },
    "exp_avg": {"megatron-lm": _AWARE},
    "exp_avg_sq": {"megatron-lm": _AWARE},
    "sharded": {"deepspeed": "written for ZeRO 1, whose accumulator can be FP32; imported, it becomes a recipe of the megatron-core engine"},
    "reuse_grad_buffer": {"megatron-lm": "the switch has an effect only with --fp8-format"},
    "loss_scale": {
        "": _SCALER,
        "automodel torchtitan": "it has no loss scaler: small FP16 gradients vanish",
        "accelerate": f"{_SCALER}; fp8 has no scaler at all",
        "lightning": f"FSDPPrecision accepts no custom scaler, and the FP8 plugin has none; {_SCALER}",
        "transformers": f"no argument of it reaches the scaler; {_SCALER}",
        "deepspeed": "only fp16 has a loss scale; its initial value is a power of two, its window and minimum are whole numbers above 0",
    },
    "keep_fp32": {
        "": "one dtype for every parameter",
        "megatron-bridge": "one dtype for every parameter: FP32 adapters end in BF16 too (ParallelLinearAdapter, then Float16Module)",
        "automodel": "a module keeps the dtype of its checkpoint: store them in FP32 there",
        "fsdp2 accelerate": "pass them as ignored_params: neither cast nor sharded",
        "transformers": "the model's own _keep_in_fp32_modules",
        "deepspeed": "data_types.keep_in_fp32_modules keeps buffers of named modules, no parameters",
    },
    "frozen": {
        "": "no setting of precision: the script sets requires_grad",
        "megatron-bridge": "its peft section freezes the base",
        "automodel": "its peft section freezes the base",
    },
    "output": {"": "no setting: as computed"},
    "pipeline": {
        "": "stages send what they computed",
        "megatron-lm": "no flag; FP32 under --fp32-residual-connection, else the parameters' dtype",
        "automodel": "distributed.pipeline derives it",
        "accelerate lightning transformers": "it has no pipeline for training",
    },
    "logits": {
        "": "the model's code decides, or its loss upcasts them afterwards",
        "megatron-lm": "the flag exists from core 0.20 on",
        "megatron-bridge": "an argument of GPTModel that its providers do not set",
        "fsdp2": "cast the output layer's result, or give that module an mp_policy of its own",
        "deepspeed": _ONE_DTYPE,
    },
    "router": {
        "": "the model's code decides",
        "torchtitan": "its router computes in FP32",
        "deepspeed": "its TopKGate computes in FP32 where the model uses deepspeed.moe, else the model's code decides",
    },
    "residual_fp32": {"": "the blocks' inputs are cast to the compute dtype", "transformers deepspeed": _ONE_DTYPE},
    "softmax_fp32": {"": "the attention kernel decides"},
    "optimizer": {
        "": "it is not written: the script makes the optimizer, and bytes are those of Adam",
        "fsdp2": "torch's own takes whole matrices, not the shards of fully_shard",
        "automodel torchtitan": "no class of that arithmetic is known to be there",
        "deepspeed": "its own of that name, where it has one, multiplies and scales otherwise",
        "megatron-lm": "--optimizer knows it from core 0.18 on",
    },
    "quantization": {
        "megatron-lm": "--fp8-recipe tensorwise",
        "megatron-bridge": "fp8_recipe: tensorwise",
        "automodel": "te_fp8.recipe: mxfp8, or BF16",
        "torchtitan": "Float8LinearConverter with recipe_name='rowwise'",
        "fsdp2": "torchao's rowwise or mxfp8",
        "accelerate": "TERecipeKwargs(use_mxfp8_block_scaling=True)",
        "lightning": "TransformerEnginePrecision with DelayedScaling",
        "transformers": "accelerate launch --mixed_precision fp8, which decides by its own file",
        "deepspeed": "16-bit GEMMs",
    },
    "modules": {
        "megatron-lm": "--te-precision-config-file names a scaling and a format for whole linears, of layers counted from the start; give --config for its depth",
        "megatron-bridge": "model.quant_recipe is a Python object there: use the precision.yaml of --to megatron-lm with load_quantization_recipe",
        "automodel": "fp8.filter_fqns excludes modules by substrings of the model's own names",
        "torchtitan": "several converters, whose fqns and filter_fqns are substrings of the model's own names",
        "fsdp2 accelerate": "torchao's filter function takes the model's own names",
        "lightning": "TransformerEnginePrecision(replace_layers=False) on a model whose linears are Transformer Engine's where you want them",
        "transformers": "accelerate's own file of FP8 settings",
        "deepspeed": "16-bit GEMMs",
    },
    "edge layers": {
        "automodel": "fp8.filter_fqns needs the numbers of the last layers: pass --config, whose depth is then used",
        "accelerate": "TERecipeKwargs converts every layer",
        "lightning": "TransformerEnginePrecision(replace_layers=False) on a model whose other layers are Transformer Engine's",
    },
})  # fmt: skip


def reasons(stack: str, theirs: Meaning) -> dict[str, str]:
    """Row -> the reason in a stack whose meaning is `theirs`."""
    found: dict[str, str] = {}
    for row, texts in REASONS.items():
        own = next((text for stacks, text in texts.items() if stack in stacks.split()), None)
        found[row] = texts.get("", "") if own is None else own
    if found["main"] == REASONS["main"][""] and (theirs.main is not None or theirs.storage is not DType.FP32):
        found["main"] = ""  # it is about FP32 parameters that are updated themselves
    return {row: text for row, text in found.items() if text}
