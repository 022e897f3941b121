"""Modules that replace what megatron-core's own local spec cannot do on a CPU, behind its BackendSpecProvider."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP


class Norm:
    """torch's LayerNorm or RMSNorm, also under sequence parallelism (megatron-core's own wrapper refuses that)."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
        """The norm module that `config.normalization` names."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            # finalize_model_grads sums the gradients of parameters so marked over the tensor-parallel group
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class FusedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's scaled_dot_product_attention: softmax in FP32, no [s, s] scores in memory."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[sequence, batch, heads x width] from query, key and value of [sequence, batch, heads, width]; the mask is causal whatever is given."""
        length, batch = query.shape[:2]
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # dropout patterns differ between tensor-parallel ranks where heads do; under sequence parallelism megatron-core forks outside
        fork = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else nullcontext()
        with fork:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=dropout, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Nothing: no parameters."""
        return {}


def attends_plainly(config: Any) -> bool:
    """Whether `FusedAttention` computes what `config` asks for: FP32 softmax, no window, no sink, no per-layer scaling."""
    plain = config.softmax_type == "vanilla" and config.window_size is None and not config.apply_query_key_layer_scaling
    return bool(plain and config.attention_softmax_in_fp32)


class CpuSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """megatron-core's local modules with norm, attention and experts that run on a CPU in every parallel layout.

    A subclass that returns other linears (`column_parallel_linear`, `row_parallel_linear`) changes every linear of every layer: the emulation does.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """torch's norm, chosen by the config's `normalization`."""
        return Norm

    def core_attention(self) -> type:
        """Fused attention where it computes the same, else megatron-core's own."""
        return FusedAttention if attends_plainly(self.config) else DotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, Any]:
        """One expert after the other: grouped GEMMs are CUDA kernels."""
        return SequentialMLP, MLPSubmodules(linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear())
