"""Replacements, behind megatron-core's BackendSpecProvider, for modules of its local spec that do not work on a CPU, or are slow there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.dot_product_attention import DotProductAttention

from mpbridge.backend.megatron.inside_model import experts_in_turn
from mpbridge.backend.models.attention import CausalAttention, attends_plainly


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm; an input whose dtype differs from the weight's (an FP32 residual stream) is normalised in FP32 and returned in the weight's dtype.

    Transformer Engine's norms do the same; torch's reject it on a CPU.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalised over the last axis."""
        if input.dtype is self.weight.dtype:
            return super().forward(input)
        return F.layer_norm(input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps).to(
            self.weight.dtype
        )


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with other input dtypes handled as in `LayerNorm`; torch's own would pass FP32 on to the next linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised over the last axis."""
        if x.dtype is self.weight.dtype:
            return super().forward(x)
        return F.rms_norm(x.float(), list(self.normalized_shape), self.weight.float(), self.eps).to(self.weight.dtype)


class Norm:
    """LayerNorm or RMSNorm, also under sequence parallelism (megatron-core's own wrapper of torch's norms rejects that)."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """The norm module that `config.normalization` names."""
        norm = (RMSNorm if config.normalization == "RMSNorm" else LayerNorm)(hidden_size, eps=eps)
        for parameter in norm.parameters():
            # finalize_model_grads sums the gradients of parameters with this mark over the tensor-parallel group
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class CpuSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local modules, with norms, attention and experts that run on a CPU in every parallel layout.

    A subclass that returns other linears (`column_parallel_linear`, `row_parallel_linear`) changes every linear of every layer, which is what the emulation does.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """torch's norm, chosen by the config's `normalization`."""
        return Norm

    def core_attention(self) -> type:
        """mpbridge's attention if it supports the config, otherwise megatron-core's own."""
        return CausalAttention if attends_plainly(self.config) else DotProductAttention

    def grouped_mlp_modules(self, *unused: bool, **named: bool) -> Any:
        """Always sequential experts: grouped GEMMs are CUDA kernels."""
        return experts_in_turn(self.column_parallel_linear(), self.row_parallel_linear())
