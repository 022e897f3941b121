"""The front end for megatron-core: its parallel linears with quantized GEMMs, provided by a BackendSpecProvider."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from mpbridge.emulation.gemm import Plug
from mpbridge.emulation.linear import apply
from mpbridge.errors import Refused
from mpbridge.megatron.inside_model import LocalMatmul, OwnProduct, experts_in_turn
from mpbridge.precision.globs import MTP_PROJECTION

if TYPE_CHECKING:
    from mpbridge.precision.policy import Quant


class _Emulated(OwnProduct):
    """Mixed into megatron-core's parallel linears: they keep weights, communication and checkpoints; only the local GEMMs are replaced.

    Under sequence parallelism the gathered input is quantized here. Transformer Engine quantizes the shard and gathers the codes, with amaxes
    max-reduced over the same ranks, and asserts that blocks do not cross shards: the numbers are the same.
    """

    plug: Plug | None = None
    unrounded: torch.Tensor | None = None
    """The input in FP32, stored here by the preceding norm if Transformer Engine quantizes that; consumed by the next product."""
    config: Any
    is_expert: bool

    @property
    def quant(self) -> Quant | None:
        """The rule that this linear's GEMMs run under, for the audit; None: high precision."""
        return None if self.plug is None else self.plug.quantizer.quant

    def product(
        self, plain: LocalMatmul, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The quantized product; high precision if nothing is quantized or the emulation is paused."""
        if self.plug is None or (self.plug.emulation.is_paused and self.plug.emulation.listener is None):
            return plain(input, weight, *args, **kwargs)
        if kwargs.get("gradient_accumulation_fusion"):
            raise Refused(
                "emulated linears have no fused gradient accumulation (set model.gradient_accumulation_fusion=false)"
            )
        group = kwargs.get("tp_group")
        high, self.unrounded = self.unrounded, None
        if kwargs.get("sequence_parallel"):
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
            high = None if high is None else gather_from_sequence_parallel_region(high, group=group)
        elif kwargs.get("allreduce_dgrad"):
            input = copy_to_tensor_model_parallel_region(input, group=group)
        recompute = self.config.recompute_granularity is not None
        bias = kwargs.get("bias")
        return apply(self.plug, input, weight, bias, expert=self.is_expert, recompute=recompute, high=high)


class EmulatedColumnParallelLinear(_Emulated, ColumnParallelLinear):  # type: ignore[misc]
    """megatron-core's ColumnParallelLinear; quantized once `Emulation.attach` has given it a plug."""


class EmulatedRowParallelLinear(_Emulated, RowParallelLinear):  # type: ignore[misc]
    """megatron-core's RowParallelLinear; quantized once `Emulation.attach` has given it a plug."""


class EmulatedBackend:
    """A BackendSpecProvider with our linears; norms, attention and the rest come from `base`."""

    def __init__(self, base: Any, column: type | None = None, row: type | None = None) -> None:
        self._base = base
        self._column, self._row = column or EmulatedColumnParallelLinear, row or EmulatedRowParallelLinear

    def column_parallel_linear(self) -> type:
        """The column parallel linear."""
        return self._column

    def row_parallel_linear(self) -> type:
        """The row parallel linear."""
        return self._row

    def fuse_layernorm_and_linear(self) -> bool:
        """False: norms stay separate modules."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """None: there is no fused module."""
        return

    def grouped_mlp_modules(self, *unused: bool, **named: bool) -> Any:
        """Sequential experts made of our linears, whatever the arguments: their GEMMs have the same operands, one expert at a time."""
        return experts_in_turn(self._column, self._row)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def places(chunk: torch.nn.Module) -> Iterator[tuple[_Emulated, str, str, int | None, int]]:
    """(linear, global name, name below its layer, 0-based layer, layers) of every emulated linear of a model chunk, in module order.

    Layer numbers are counted over the whole model; None for multi-token prediction, where megatron-core opens its quantization context without one.
    """
    for path, layer in chunk.named_modules():
        if not isinstance(layer, TransformerLayer):
            continue
        number, total = layer.layer_number - 1, layer.config.num_layers
        stem = _stem(path)
        for below, linear in layer.named_modules():
            if isinstance(linear, _Emulated):
                ahead = stem.startswith("mtp")
                name = f"{stem}.{below}" if ahead else f"{stem.rpartition('.')[0]}.{number}.{below}"
                yield linear, name, below, None if ahead else number, total
    for path, module in chunk.named_modules():
        if isinstance(module, MultiTokenPredictionLayer) and isinstance(module.eh_proj, _Emulated):
            name = f"{_stem(path)}.{MTP_PROJECTION}"
            yield module.eh_proj, name, MTP_PROJECTION, None, module.config.num_layers


def fused_norms(chunk: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, _Emulated]]:
    """(norm, linear) for which Transformer Engine's layer spec has one module: attention's input, and a dense MLP's."""
    for layer in chunk.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        pairs = (
            (layer.input_layernorm, getattr(layer.self_attention, "linear_qkv", None)),
            (layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None)),
        )
        for norm, linear in pairs:
            if isinstance(linear, _Emulated) and isinstance(norm, (torch.nn.RMSNorm, torch.nn.LayerNorm)):
                yield norm, linear


def _stem(path: str) -> str:
    """A module path without the names of wrappers around the model."""
    parts = path.split(".")
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def blocks(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The TransformerBlocks of a chunk: megatron-core opens delayed scaling's context around each."""
    return (module for module in chunk.modules() if isinstance(module, TransformerBlock))


def amax_group(chunk: torch.nn.Module) -> Any:
    """The group over which Transformer Engine reduces the amaxes of delayed scaling under megatron-core; None without parallel state.

    Tensor x data x context parallel ranks, or tensor x context if the model's config sets `tp_only_amax_red` (fp8_utils.py:621-625).
    """
    from megatron.core import parallel_state

    if not torch.distributed.is_initialized() or not parallel_state.model_parallel_is_initialized():
        return None
    config = next((block.config for block in blocks(chunk)), None)
    narrow = bool(getattr(config, "tp_only_amax_red", False))
    return parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=narrow)


def sharded(tensors: dict[str, torch.Tensor], common: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    """Entries for dist_checkpointing: `tensors` of this pipeline stage, equal on all its ranks, and `common` ones, equal on all ranks."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor

    stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True).rank()
    everywhere = torch.distributed.get_rank()
    entries = {f"{prefix}{name}": (tensor, stage) for name, tensor in tensors.items()}
    entries |= {f"{prefix}{name}": (tensor, everywhere) for name, tensor in common.items()}
    return {
        key: ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica)
        for key, (tensor, replica) in entries.items()
    }
