"""The FP32 residual stream: megatron-core rounds it to 16 bits in its first addition (fused_bias_dropout.py of 0.16.1), so mpbridge replaces the addition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

Add = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


def wide_add(training: bool, fused: bool) -> Add:
    """Replaces megatron-core's get_bias_dropout_add; the sum has the residual's dtype. fused: accepted because megatron-core passes it, and ignored."""

    def add(
        with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, probability: float
    ) -> torch.Tensor:
        x, bias = with_bias
        branch = F.dropout(x if bias is None else x + bias, p=probability, training=training)
        return residual + branch.to(residual.dtype)

    return add


def keep_wide(config: Any, spec: Any) -> None:
    """Makes every layer of a layer or block spec add in the residual's dtype, if the config has an FP32 residual stream."""
    if not config.fp32_residual_connection:
        return
    for layer in _layers(spec):
        for name in ("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda"):
            if callable(getattr(layer, name, None)) and "bias_dropout_add" in getattr(layer, name).__name__:
                setattr(layer, name, wide_add)


def _layers(spec: Any) -> Iterator[Any]:
    """The submodules of every transformer layer in a spec."""
    if hasattr(spec, "layer_specs"):
        for one in spec.layer_specs:
            yield from _layers(one)
    elif hasattr(getattr(spec, "submodules", None), "mamba_layer"):
        for one in vars(spec.submodules).values():
            yield from _layers(one)
    elif getattr(spec, "submodules", None) is not None:
        yield spec.submodules
