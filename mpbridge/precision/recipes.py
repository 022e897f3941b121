"""The built-in recipes, as data.

The first fifteen are Megatron Bridge's names with their meanings (read at 067f987d, 2026-08-22), plus fp32. `DIFFERENCES` lists every value that
is not theirs, with the reason. nemotron_3_ultra_bf16_with_nvfp4_mixed is a later one of theirs. The last ones distinguish what a 16-bit recipe's name leaves open: storage, reduction and optimizer states.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.recipe import Recipe

BRIDGE = "Megatron Bridge mixed_precision.py at 067f987d"

RecipeFields = Mapping[str, Any]
_BF16: RecipeFields = {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16", "grad_reduce_in_fp32": True}
_WIDE: RecipeFields = {
    "bf16": True, "params_dtype": "fp32", "pipeline_dtype": "bf16", "grad_reduce_in_fp32": True, "main_params_dtype": "fp32",
}  # fmt: skip
_FP16: RecipeFields = {"fp16": True, "params_dtype": "fp16", "pipeline_dtype": "fp16", "grad_reduce_in_fp32": False}
_DELAYED: RecipeFields = {
    "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "fp8_param_gather": True,
}  # fmt: skip
_CURRENT: RecipeFields = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}
_BLOCKWISE: RecipeFields = {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False}
_MXFP8: RecipeFields = {
    "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True,
}  # fmt: skip
_SUPER: RecipeFields = {
    "modules": {"*.linear_qkv": "bf16", "*.linear_proj": "bf16", "*mlp.fc[12]_latent_proj": "bf16", "mtp.*": "bf16", "*mixer.out_proj": "mxfp8"},
}  # fmt: skip
"""The exceptions of Megatron Bridge's performance recipes for Nemotron 3 Super (perf_recipes/nemotronh/te_quant.cfg); the first match decides."""
_NVFP4: RecipeFields = {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param_gather": False}


def _edges(first: int, last: int) -> RecipeFields:
    return {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}


def _recipe(name: str, summary: str, *fields: RecipeFields, source: str = BRIDGE, **more: Any) -> Recipe:
    """A row: the later of its fields decide. more: of Recipe."""
    values: dict[str, Any] = {}
    for part in fields:
        values |= part
    make = functools.partial(MixedPrecisionConfig, **values)
    return Recipe(name=name, make=make, summary=summary, source=source, **more)


BUILT_IN: tuple[Recipe, ...] = (
    _recipe(
        "fp32",
        "everything in FP32: the reference",
        {"fp32": True, "params_dtype": "fp32", "pipeline_dtype": "fp32"}, aliases=("32", "float32", "fp32_full", "32_true"),
        status="validated", source="the definition; Megatron Bridge has the flag but no recipe",
    ),
    _recipe(
        "bf16_mixed",
        "BF16 compute and parameters, FP32 main weights, FP32 gradient reduction",
        _BF16, aliases=("bf16", "bfloat16", "bfloat16_mixed"), status="validated", source=f"{BRIDGE}; scripts/quickstart.sh trains it here",
    ),
    _recipe(
        "fp16_mixed",
        "FP16 compute and gradients, FP32 main weights, dynamic loss scale",
        _FP16, aliases=("fp16", "16", "16_mixed", "float16", "float16_mixed"), status="validated", source=f"{BRIDGE}; arXiv 1710.03740",
    ),
    _recipe(
        "bf16_with_fp8_delayed_scaling_mixed",
        "FP8 GEMMs, one scale per tensor from an amax history of 1024 steps",
        _BF16, _DELAYED, aliases=("fp8_ds", "fp8_delayed", "fp8_delayed_scaling"),
    ),
    _recipe(
        "fp16_with_fp8_delayed_scaling_mixed",
        "FP8 GEMMs from an amax history, around FP16",
        _FP16, _DELAYED,
    ),
    _recipe(
        "bf16_with_mxfp8_mixed",
        "FP8 (E4M3) GEMMs, one power-of-two scale for 32 neighbours",
        _BF16, _MXFP8, aliases=("fp8_mx", "mxfp8"),
    ),
    _recipe("fp16_with_mxfp8_mixed", "MXFP8 GEMMs around FP16", _FP16, _MXFP8),
    _recipe(
        "bf16_with_fp8_current_scaling_mixed",
        "FP8 GEMMs, one scale per tensor from the tensor itself; first and last layer in BF16",
        _BF16, _CURRENT, _edges(1, 1), aliases=("fp8_cs", "fp8_current", "fp8_current_scaling", "fp8"),
    ),
    _recipe(
        "nemotron_h_bf16_with_fp8_current_scaling_mixed",
        "FP8 with current scaling as Nemotron-H was trained; two BF16 layers at each end",
        _BF16, _CURRENT, _edges(2, 2), source=f"{BRIDGE}; arXiv 2504.03624",
    ),
    _recipe(
        "nanov2_bf16_with_fp8_current_scaling_mixed",
        "FP8 with blockwise scaling, despite its name (Nemotron Nano v2); two BF16 layers at each end",
        _BF16, _BLOCKWISE, {"fp8_param_gather": True}, _edges(2, 2), aliases=("nanov2_bf16_with_fp8_subchannel_scaling_mixed",),
        source=f"{BRIDGE}; arXiv 2508.14444",
    ),
    _recipe(
        "fp16_with_fp8_current_scaling_mixed",
        "FP8 with current scaling around FP16; first and last layer in FP16",
        _FP16, _CURRENT, _edges(1, 1),
    ),
    _recipe(
        "bf16_with_fp8_subchannel_scaling_mixed",
        "FP8 GEMMs, one scale for 128 activations or a 128x128 block of weights",
        _BF16, _BLOCKWISE, aliases=("fp8_sc", "fp8_blockwise", "fp8_subchannel"),
    ),
    _recipe("fp16_with_fp8_subchannel_scaling_mixed", "FP8 with blockwise scaling around FP16", _FP16, _BLOCKWISE),
    _recipe(
        "bf16_with_nvfp4_mixed",
        "FP4 GEMMs, one scale for 16 neighbours under a tensor scale, Hadamard transform and stochastic rounding",
        _BF16, _NVFP4, aliases=("nvfp4", "fp4"), source=f"{BRIDGE}; arXiv 2509.25149",
    ),
    _recipe(
        "nemotron_3_super_bf16_with_nvfp4_mixed",
        "NVFP4 as Nemotron 3 Super: 14 last layers, attention, latent projections, MTP in BF16; mixer.out_proj in MXFP8",
        _BF16, _NVFP4, _edges(0, 14), _SUPER, source=f"{BRIDGE} with perf_recipes/nemotronh/te_quant.cfg",
    ),
    _recipe(
        "nemotron_3_ultra_bf16_with_nvfp4_mixed",
        "NVFP4 with the last 16 layers in BF16 (Nemotron 3 Ultra)",
        _BF16, _NVFP4, _edges(0, 16), source="Megatron Bridge PR 5798; NVIDIA-NeMo/Nemotron ultra3 pretrain script",
    ),
    _recipe(
        "bf16_params_fp32_states",
        "BF16 storage, FusedAdam with FP32 states and 16-bit parameter remainders: 14 bytes per parameter, sharded",
        _BF16,
        {"use_precision_aware_optimizer": True, "store_param_remainders": True, "main_params_dtype": "fp32", "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"},
        aliases=("fsdp_fused_adam",), prefers="fsdp2", source="NeMo AutoModel mixed-precision guide, pattern A (PR 2248)",
    ),
    _recipe(
        "fp32_params_bf16_compute",
        "FP32 storage and torch AdamW, BF16 compute and gather, FP32 reduction: 16 bytes per parameter, sharded",
        _WIDE,
        aliases=("fsdp_adamw",), source="NeMo AutoModel mixed-precision guide, pattern B (PR 2248)",
    ),
    _recipe(
        "bf16_with_fp8_rowwise",
        "FP8 (E4M3) GEMMs by torchao, one power-of-two scale per row; FP32 storage and torch AdamW, for torch FSDP2",
        _WIDE, {"fp8": "e4m3", "fp8_recipe": "rowwise"}, aliases=("fp8_rowwise",), source="torchao float8 recipe rowwise; torchtitan docs/float8.md",
    ),
    _recipe(
        "bf16_with_fp8_rowwise_gw_hp",
        "the same with weight gradients in BF16: more accurate, and any number of tokens",
        _WIDE, {"fp8": "e4m3", "fp8_recipe": "rowwise_gw_hp"}, aliases=("fp8_rowwise_gw_hp",), source="torchao float8 recipe rowwise_with_gw_hp",
    ),
    _recipe(
        "full_bf16",
        "parameters, gradients and both moments in BF16, no main weights: 8 bytes per parameter, and it converges worse",
        _BF16,
        {"grad_reduce_in_fp32": False, "main_params_dtype": "bf16", "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        aliases=("bf16_full", "bf16_true"), source="torchtitan PR 1646",
    ),
    _recipe(
        "bf16_mixed_bf16_moments",
        "bf16_mixed with both Adam moments in BF16 and 16-bit parameter remainders: 6 + 6/N bytes per parameter",
        _BF16,
        {"use_precision_aware_optimizer": True, "main_params_dtype": "fp32", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
        aliases=("bf16_low_precision_moments",), source="DeepSeek-V3, arXiv 2412.19437, section 3.3.3",
    ),
    _recipe(
        "bf16_megatron_fsdp",
        "BF16 compute under Megatron-FSDP (ZeRO-3), one FP32 main copy held by the wrapper, FP32 gradients",
        _BF16,
        {"use_precision_aware_optimizer": True, "main_params_dtype": "fp32", "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32"},
        aliases=("megatron_fsdp_bf16_mixed",), prefers="megatron_fsdp", source="Megatron-LM PR 4133",
    ),
)  # fmt: skip

_INERT_FP8_RECIPE = "inert with FP8 off, and copied to optimizer.fp8_recipe it silently disables the precision-aware optimizer (megatron-core optimizer_config.py:355)"
_NO_FP4_GATHER = "megatron-core 0.16.1 has no FP4 parameter gather: no DDP field, and its distributed optimizer would size the buffer wrongly"
_NO_FIELD = "no field of theirs: their performance recipe adds it as model.quant_recipe, from te_quant.cfg"
_THEIR_NVFP4 = ("bf16_with_nvfp4_mixed", "nemotron_3_super_bf16_with_nvfp4_mixed")
DIFFERENCES: Mapping[tuple[str, str], str] = MappingProxyType(
    {(name, "fp8_recipe"): _INERT_FP8_RECIPE for name in ("bf16_mixed", "fp16_mixed", *_THEIR_NVFP4)}
    | {(name, field): _NO_FP4_GATHER for name in _THEIR_NVFP4 for field in ("fp4_param", "fp4_param_gather")}
    | {(_THEIR_NVFP4[1], "modules"): _NO_FIELD}
)
"""(recipe, field) -> why the value differs from Megatron Bridge's. A test compares every other value with theirs."""
