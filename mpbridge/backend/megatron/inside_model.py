"""Internals of megatron-core's modules: hooks without a public name, and differences between its versions in how layers are specified."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from mpbridge.common.upstream import replaced

LocalMatmul = Callable[..., torch.Tensor]
"""(input, weight, *, bias, tp_group, sequence_parallel ...) -> input W^T: the local matrix product of a parallel linear, without its communication."""


class OwnProduct:
    """Mixin placed before one of megatron-core's parallel linears: `product` determines how its local matrix product is computed."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain: LocalMatmul = super()._forward_impl  # type: ignore[misc]
        return self.product(plain, input, weight, *args, **kwargs)

    def product(
        self, plain: LocalMatmul, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The product; `plain` is megatron-core's own, with the same arguments."""
        return plain(input, weight, *args, **kwargs)


def first_microbatch(chunks: Iterable[torch.nn.Module]) -> None:
    """Tells modules that cache quantized weights over micro-batches that the next one is the first of a step, so that they quantize again.

    The schedules do so only if the config's `fp8` or `fp4` is set (`set_is_first_microbatch`, megatron-core 0.16.1 to 0.20 transformer/module.py): with
    only a `quant_recipe`, Transformer Engine's modules would train on the weights of the first step forever.
    """
    for chunk in chunks:
        modules: Iterable[Any] = chunk.modules()
        for module in modules:
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True


def release(chunks: Iterable[Any]) -> None:
    """Removes the hooks of megatron-core's DistributedDataParallel from the gradients, so that an unused model can be freed; other chunks are left alone.

    The hooks reference the wrapper, and torch holds them in C++ with every graph that has a parameter as a leaf: a single tensor kept with its graph (a token
    dispatcher keeps its last probabilities, a distributed optimizer its slices of FP32 parameters) closes a reference cycle to the model that Python's
    garbage collector cannot see. The model, and the threads of its process groups, would live as long as the process.
    """
    for chunk in chunks:
        for node in getattr(chunk, "grad_accs", ()):
            # a node's hooks are in one dictionary, which is reachable only through the handle of a hook
            node.register_hook(_nothing).hooks_dict_ref().clear()


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def multiply_in(output_layer: Any, dtype: torch.dtype) -> None:
    """Makes the output layer compute, and so return, in `dtype`; parameters and gradients keep their dtypes."""
    multiply = output_layer._forward_impl

    def forward(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return multiply(input.to(dtype), weight.to(dtype), *args, **kwargs)

    output_layer._forward_impl = forward


def experts_in_turn(column: type, row: type) -> Any:
    """What a backend's `grouped_mlp_modules` returns for sequential experts: since 0.17 a builder, before that a pair."""
    parts = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    if "moe_use_legacy_grouped_gemm" in inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters:
        return SequentialMLP, parts
    return partial(SequentialMLP, submodules=parts)


@contextmanager
def made_of(provider: Any) -> Iterator[None]:
    """In the block megatron-core's local specifications, which accept no provider, are of `provider`'s modules; None: as they are."""
    layer = gpt_layer_specs.get_gpt_layer_local_spec

    def named(num_experts: int | None = None, **asked: Any) -> ModuleSpec:
        spec = layer(num_experts=num_experts, **asked)
        if num_experts:
            # checkpoints name norms as Transformer Engine's modules do, so that CPU and GPU can read each other's; before experts it fuses none
            spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        return spec

    own = (
        (gpt_layer_specs, "LocalSpecProvider", lambda: provider),
        (gpt_layer_specs, "get_gpt_layer_local_spec", named),
    )
    with nullcontext() if provider is None else replaced(*own):
        yield


def latent_attention_takes(column: type) -> AbstractContextManager[None]:
    """Context for building layers: megatron-core's MLA checks its down projections against a list of classes and rejects subclasses (emulated linears)."""
    return replaced((multi_latent_attention, "ColumnParallelLinear", column))


def multiplies_routers(config: Any) -> bool:
    """Whether megatron-core multiplies routers by Transformer Engine's general_gemm, where it found that (moe_utils.py RouterGatingLinearFunction)."""
    return (
        getattr(moe_utils, "te_general_gemm", None) is not None and getattr(config, "moe_router_dtype", None) != "fp64"
    )


def router_biases_in_fp32(model: torch.nn.Module) -> None:
    """Casts load-balancing biases to FP32 right away; megatron-core does it in the first forward pass."""
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router._maintain_float32_expert_bias()
