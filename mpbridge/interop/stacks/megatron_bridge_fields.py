"""The fields of Megatron Bridge's MixedPrecisionConfig, and its values of recipes that mpbridge states otherwise. Read at 067f987d."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "megatron-bridge"
CORE = "0.20.0"
"""The megatron-core that it belongs to."""
TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"


@dataclass(kw_only=True)
class BridgeFields:
    """The fields of Bridge's MixedPrecisionConfig, with its defaults; a script compares them with Bridge's source."""

    fp32: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype | None = None
    pipeline_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    autocast_enabled: bool = False
    grad_reduce_in_fp32: bool = True
    fp8: str | None = None
    fp8_recipe: str = "tensorwise"
    first_last_layers_bf16: bool = False
    fp8_margin: int = 0
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    fp8_dot_product_attention: bool = False
    fp8_multi_head_attention: bool = False
    fp8_param: bool | None = None
    fp8_param_gather: bool = False
    fp4: str | None = None
    fp4_recipe: str = "nvfp4"
    fp4_param: bool | None = None
    fp4_param_gather: bool = False
    loss_scale: float | None = None
    initial_loss_scale: float | None = 4294967296
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    reuse_grad_buf_for_mxfp8_param_ag: bool = False


FIELDS: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(BridgeFields)}

DIFFERS: dict[str, dict[str, Any]] = {
    "bf16_with_nvfp4_mixed": {"fp4_param_gather": True},
    "nemotron_3_super_bf16_with_nvfp4_mixed": {"fp4_param_gather": True, "modules": None},
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": {"fp4_param_gather": True},
}
"""Its values of recipes with the same name but different values in mpbridge; scripts/evidence/stacks/bridge_exports.py compares all of them."""
