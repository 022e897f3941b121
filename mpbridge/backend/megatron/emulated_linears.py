"""The emulation in megatron-core: its parallel linears with quantized GEMMs, for `models.local_spec.CpuSpecProvider`.

How an engine uses it (`engines/registry.py` does it for every engine; `emulation_for` returns None if the run is not emulated or its
recipe quantizes nothing):

    emulation = emulation_for(run)                        # CoreEmulation | None
    provider  = CpuSpecProvider(config, emulation.parallel_linears)  # its layer specs have our linears
    model     = GPTModel(...)                             # as usual; wrap it in Float16Module, DDP ... as usual
    emulation.attach(chunks)                              # after building (before or after wrapping, before FSDP shards): names, hooks
    ...
    saved = emulation.sharded_state("emulation.")         # entries for megatron-core's dist_checkpointing, resharding included

Amaxes of delayed scaling are max-reduced over megatron-core's amax group (tensor x data x context).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock

from mpbridge.backend.megatron.inside_fsdp import bare_name
from mpbridge.backend.megatron.inside_model import LocalMatmul, OwnProduct
from mpbridge.common.errors import Refused
from mpbridge.numerics.emulation import STEP, Emulation
from mpbridge.numerics.gemm import Plug
from mpbridge.numerics.linear import apply
from mpbridge.numerics.observation.modules import is_layer
from mpbridge.planning.memory.names import any_gpt, unnamed
from mpbridge.precision.globs import MTP_PROJECTION

if TYPE_CHECKING:
    from mpbridge.precision.policy import Quant
    from mpbridge.precision.regions import Region
    from mpbridge.settings.container import Run


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
    """megatron-core's ColumnParallelLinear; quantized once `CoreEmulation.attach` has given it a plug."""


class EmulatedRowParallelLinear(_Emulated, RowParallelLinear):  # type: ignore[misc]
    """megatron-core's RowParallelLinear; quantized once `CoreEmulation.attach` has given it a plug."""


def places(chunk: torch.nn.Module) -> Iterator[tuple[_Emulated, str, str, int | None, int]]:
    """(linear, global name, name below its layer, 0-based layer, layers) of every emulated linear of a model chunk, in module order.

    Layer numbers are counted over the whole model; None for multi-token prediction, where megatron-core opens its quantization context without one.
    """
    for path, layer in chunk.named_modules():
        if not is_layer(layer):
            continue
        number, total = layer.layer_number - 1, layer.config.num_layers
        stem = bare_name(path)
        for below, linear in layer.named_modules():
            if isinstance(linear, _Emulated):
                ahead = stem.startswith("mtp")
                name = f"{stem}.{below}" if ahead else f"{stem.rpartition('.')[0]}.{number}.{below}"
                yield linear, name, below, None if ahead else number, total
    for path, module in chunk.named_modules():
        if isinstance(module, MultiTokenPredictionLayer) and isinstance(module.eh_proj, _Emulated):
            name = f"{bare_name(path)}.{MTP_PROJECTION}"
            yield module.eh_proj, name, MTP_PROJECTION, None, module.config.num_layers


def fused_norms(chunk: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, _Emulated]]:
    """(norm, linear) for which Transformer Engine's layer spec has one module: attention's input, a dense MLP's, a Mamba layer's."""
    for layer in chunk.modules():
        if not is_layer(layer):
            continue
        for ahead, part, behind in (
            ("input_layernorm", "self_attention", "linear_qkv"),
            ("pre_mlp_layernorm", "mlp", "linear_fc1"),
            ("norm", "mixer", "in_proj"),
        ):
            norm, linear = getattr(layer, ahead, None), getattr(getattr(layer, part, None), behind, None)
            if isinstance(linear, _Emulated) and isinstance(norm, (torch.nn.RMSNorm, torch.nn.LayerNorm)):
                yield norm, linear


def blocks(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The TransformerBlocks of a chunk, or a hybrid's stack: megatron-core opens delayed scaling's context around each."""
    hybrids = ("MambaStack", "HybridStack")
    return (one for one in chunk.modules() if isinstance(one, TransformerBlock) or type(one).__name__ in hybrids)


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


def emulation_for(run: Run) -> CoreEmulation | None:
    """The emulation that a run asks for; None if it is not emulated or its recipe quantizes nothing."""
    if not run.emulate or not run.policy.quantized:
        return None
    return CoreEmulation(
        run.policy,
        seed=run.train["seed"],
        release=run.te or run.facts.versions.transformer_engine,
        environment=run.facts.environment,
    )


class CoreEmulation(Emulation):
    """An emulation of megatron-core's models."""

    parallel_linears = EmulatedColumnParallelLinear, EmulatedRowParallelLinear
    """For a provider's `linears`."""

    def elsewhere(self, region: Region) -> bool:
        """See `Emulation.elsewhere`."""
        # as the rule module-rule-of-another-model, which warns: a hybrid's recipe is no mistake on a GPT
        return region not in unnamed(self.policy, any_gpt()[-1])

    def attach(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Gives the linears of built model chunks their quantizers, and hooks the contexts of delayed scaling. Raises BadValue for a region that
        matches no module of the whole model.
        """
        chunks = list(chunks)
        for chunk in chunks:
            for linear, name, below, layer, layers in places(chunk):
                self.add(linear, name, below, self.policy.gemms_at(below, layer, layers, name), layer, layers)
        self.freeze()
        self.group = amax_group(chunks[0])
        for chunk in chunks:
            for block in blocks(chunk):
                self.context_of(block)
            for norm, linear in fused_norms(chunk):
                self.fuse(norm, linear)

    def sharded_state(self, prefix: str = "emulation.") -> dict[str, Any]:
        """`state` as entries of a sharded state dict of megatron-core's dist_checkpointing; independent of the parallel layout.

        Quantizers' tensors are equal on all ranks of a pipeline stage, the step of the random bits on all ranks.
        """
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing import ShardedTensor

        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True).rank()
        replicas, make = {STEP: torch.distributed.get_rank()}, ShardedTensor.from_rank_offsets
        return {
            f"{prefix}{name}": make(f"{prefix}{name}", tensor, replica_id=replicas.get(name, stage))
            for name, tensor in self.state().items()
        }
