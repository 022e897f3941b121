"""Replacements, behind megatron-core's BackendSpecProvider, for modules of its local spec that do not work on a CPU, or are slow there."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule

from mpbridge.backend.devices.fused import BlockedAttention, RootMeanSquare
from mpbridge.backend.megatron.inside_model import experts_in_turn

LONGEST = 2048
"""Sequence length up to which probabilities are kept for the backward pass (2 bytes x heads x length**2 / 2 per sample in BF16)."""


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """megatron-core's core attention on a CPU: blocked products, or torch's flash kernel for dropout and for long sequences."""

    def __init__(
        self, config: Any, *, attention_dropout: float | None = None, softmax_scale: float | None = None, **unused: Any
    ) -> None:
        # unused: the layer's number, what attends to what, process groups, and the widths of keys and values, which megatron-core's own local attention
        # does not accept (so MLA needs this class)
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
        """[sequence, batch, heads x width] from query, key and value of [sequence, batch, heads, width]; the mask is always causal, and a given one is ignored."""
        shared = query.shape[2] // key.shape[2]
        if shared > 1:
            key, value = key.repeat_interleave(shared, dim=2), value.repeat_interleave(shared, dim=2)
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        dropout = self.dropout if self.training else 0.0
        if dropout or query.shape[0] > LONGEST:
            return self._flash(query, key, value, scale, dropout)
        out: torch.Tensor = BlockedAttention.apply(query, key, value, scale)  # type: ignore[no-untyped-call]
        return out

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, dropout: float
    ) -> torch.Tensor:
        if scale <= 0:  # torch's flash kernel multiplies its mask's minus infinity too, and returns NaN
            query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # if heads are split over tensor-parallel ranks, each draws its own dropout pattern; under sequence parallelism megatron-core forks the RNG state outside
        fork = get_cuda_rng_tracker().fork() if dropout and not self.config.sequence_parallel else nullcontext()
        with fork:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Empty: there are no parameters."""
        return {}


def attends_plainly(config: Any) -> bool:
    """Whether `CausalAttention` supports `config`: FP32 softmax, no window, no sink, no per-layer scaling."""
    plain = config.softmax_type == "vanilla" and config.window_size is None and not config.apply_query_key_layer_scaling
    return bool(plain and config.attention_softmax_in_fp32)


class LayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm; an input whose dtype differs from the weight's (an FP32 residual stream) is normalised in FP32 and returned in the weight's dtype.

    Transformer Engine's norms do the same; torch's reject it on a CPU.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalised over the last axis."""
        if input.dtype is self.weight.dtype:
            return super().forward(input)
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with other input dtypes handled as in `LayerNorm`; torch's own would pass FP32 on to the next linear."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised over the last axis."""
        if x.dtype is self.weight.dtype:
            if RootMeanSquare.takes(x, self.weight, self.eps):
                return RootMeanSquare.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call,no-any-return]
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

    linears: the column parallel and the row parallel one of every layer, which an emulation replaces.
    """

    def __init__(self, config: Any, linears: tuple[type, type] = (ColumnParallelLinear, RowParallelLinear)) -> None:
        self.config, self.linears = config, linears

    def column_parallel_linear(self) -> type:
        """The first of `linears`."""
        return self.linears[0]

    def row_parallel_linear(self) -> type:
        """The second of `linears`."""
        return self.linears[1]

    def layer_norm(self, **unused: bool) -> type:
        """torch's norm, chosen by the config's `normalization`."""
        return Norm

    def core_attention(self) -> type:
        """mpbridge's attention if it supports the config, otherwise megatron-core's own."""
        return CausalAttention if attends_plainly(self.config) else DotProductAttention

    def grouped_mlp_modules(self, *unused: bool, **named: bool) -> Any:
        """Always sequential experts: grouped GEMMs are CUDA kernels."""
        return experts_in_turn(*self.linears)
