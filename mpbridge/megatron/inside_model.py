"""The inside of megatron-core's modules: hooks that have no public name, and what differs between its versions when a layer is specified."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter

LocalMatmul = Callable[..., torch.Tensor]
"""(input, weight, *, bias, tp_group, sequence_parallel ...) -> input Wt: the local matrix product of a parallel linear, without its communication."""


class OwnProduct:
    """Mixed in before one of megatron-core's parallel linears: `product` decides how its local matrix product is computed."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain: LocalMatmul = super()._forward_impl  # type: ignore[misc]
        return self.product(plain, input, weight, *args, **kwargs)

    def product(
        self, plain: LocalMatmul, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The product; `plain` is megatron-core's own, with the same arguments."""
        return plain(input, weight, *args, **kwargs)


def first_microbatch(chunks: Iterable[torch.nn.Module]) -> None:
    """Tells modules that keep quantized weights from micro-batch to micro-batch that the next one is the first of a step: they quantize anew.

    The schedules do so only where the config's `fp8` or `fp4` is set (`set_is_first_microbatch`, megatron-core 0.16.1 to 0.20 transformer/module.py): under
    a `quant_recipe` alone Transformer Engine's modules would train for ever on the weights of the first step.
    """
    for chunk in chunks:
        modules: Iterable[Any] = chunk.modules()
        for module in modules:
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True


def release(chunks: Iterable[Any]) -> None:
    """Takes megatron-core's DistributedDataParallel's hooks off the gradients, so that a model that nobody uses can be freed; other chunks are left alone.

    The hooks hold the wrapper, and torch holds them in C++ with every graph that a parameter is a leaf of: one tensor that is kept with its graph (a token
    dispatcher keeps its last probabilities, a distributed optimizer its slices of FP32 parameters) leads back to the model in a circle that Python's
    collector cannot see. The model would live, and with it the threads of its process groups, as long as the process.
    """
    for chunk in chunks:
        for node in getattr(chunk, "grad_accs", ()):
            # a node's hooks are in one dictionary, which only the handle of a hook leads to
            node.register_hook(_nothing).hooks_dict_ref().clear()


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def multiply_in(output_layer: Any, dtype: torch.dtype) -> None:
    """Makes the output layer multiply, and so return, in `dtype`; parameters and gradients keep theirs."""
    multiply = output_layer._forward_impl

    def forward(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return multiply(input.to(dtype), weight.to(dtype), *args, **kwargs)

    output_layer._forward_impl = forward


def experts_in_turn(column: type, row: type) -> Any:
    """What `grouped_mlp_modules` of a backend returns for experts computed one after the other: since 0.17 a builder, before a pair."""
    parts = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    if "moe_use_legacy_grouped_gemm" in inspect.signature(LocalSpecProvider.grouped_mlp_modules).parameters:
        return SequentialMLP, parts
    return partial(SequentialMLP, submodules=parts)


@contextmanager
def latent_attention_takes(column: type) -> Iterator[None]:
    """While layers are built: megatron-core's MLA checks its down projections against a list of classes, which knows no subclass (emulated linears)."""
    listed = multi_latent_attention.ColumnParallelLinear
    multi_latent_attention.ColumnParallelLinear = column
    try:
        yield
    finally:
        multi_latent_attention.ColumnParallelLinear = listed


def router_biases_in_fp32(model: torch.nn.Module) -> None:
    """megatron-core does it in the first forward pass; a load-balancing bias is FP32 from the start."""
    for router in model.modules():
        if isinstance(router, TopKRouter):
            router._maintain_float32_expert_bias()
