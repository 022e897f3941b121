"""Replacements inside megatron-core for a CPU: names that only work with CUDA or Transformer Engine. `mpbridge.backend.devices` installs and removes them."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.upstream import Patch

_IMPORTED = (
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "optimizer.distrib_optimizer",
    "optimizer.layer_wise_optimizer",
    "distributed",
    "pipeline_parallel.schedules",
    "dist_checkpointing",
    "transformer.moe.moe_utils",
    "transformer.moe.token_dispatcher",
    "transformer.multi_latent_attention",
    "transformer.multi_token_prediction",
)

FUSED_ADAM_MODULE = "transformer_engine.pytorch.optimizers"
"""The module from which OptimizerConfig imports FusedAdam."""


def import_all() -> None:
    """Imports everything that will be patched before anything is replaced: a module first imported while patched would keep the replacements under its own names."""
    for name in _IMPORTED:
        _core(name)


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def patches(*, get_state: Any, set_state: Any, split_sizes: Any, stream: Any, coalescing: Any) -> Iterator[Patch]:
    """Replacements for as long as CUDA calls are redirected; the arguments replace its random states, its copies of split
    sizes, its streams and torch's manager of coalesced collectives."""
    random = _core("tensor_parallel.random")
    yield from aliases(
        {
            "_get_cuda_rng_state": get_state,
            "_set_cuda_rng_state": set_state,
            "_coalescing_manager": coalescing,
        }
    )
    moe_utils, dispatcher = _core("transformer.moe.moe_utils"), _core("transformer.moe.token_dispatcher")
    # 0.16.1 uses it without importing it if Transformer Engine is missing: NameError in the router; if present, it is a CUDA kernel
    yield moe_utils, "te_general_gemm", None
    yield from _tensor_list_patches()
    latent, ahead = _core("transformer.multi_latent_attention"), _core("transformer.multi_token_prediction")
    if not isinstance(latent.TELinear, type):
        # 0.16.1 mistakes the placeholder for Transformer Engine itself: TypeError from isinstance() in every MLA layer
        yield latent, "HAVE_TE", False
    if hasattr(ahead, "is_inference_column_parallel_linear"):
        # since 0.17 it calls isinstance() with a class that is None without Transformer Engine; there are no inference layers here
        yield ahead, "is_inference_column_parallel_linear", lambda module: False
    # gloo refuses parts of different sizes; its own reference sends each parameter from the rank that updated it
    layers = _core("optimizer.layer_wise_optimizer").LayerWiseDistributedOptimizer
    yield layers, "allgather_params", layers.broadcast_params
    for module in (moe_utils, dispatcher):
        if hasattr(module, "maybe_move_tensor_to_cpu"):
            yield module, "maybe_move_tensor_to_cpu", split_sizes
    # a class attribute that megatron-core sets when a dispatcher is created: patched whenever the layer is active, so that dispatchers of earlier layers get it too
    yield dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream
    # CPU and "CUDA" share one generator here, so its warning about that always applies
    # ("disabled" rather than "level": a logger caches what its level allows, even after the level is restored)
    yield logging.getLogger(random.__name__), "disabled", True


def aliases(replacements: Mapping[str, Any]) -> Iterator[Patch]:
    """The same names in every megatron-core module that imported them with "from ... import"."""
    # by the names in sys.modules: entered with every step, and thousands of modules that are not megatron-core's need not be looked at
    for place, module in list(sys.modules.items()):
        if place.startswith("megatron.") and module is not None:
            yield from ((module, name, new) for name, new in replacements.items() if name in vars(module))


def is_core(module: Any) -> bool:
    """Whether a module, or a module name, belongs to megatron-core."""
    return str(getattr(module, "__name__", module)).startswith("megatron.")


def fused_adam_patches(adam: type | None) -> Iterator[Patch]:
    """Makes megatron-core use `adam` as Transformer Engine's FusedAdam, without pretending that Transformer Engine is installed."""
    optimizer, distributed = _core("optimizer"), _core("optimizer.distrib_optimizer")
    for module in (optimizer, distributed):
        yield module, "Adam", adam
    yield optimizer, "USING_PYTORCH_OPTIMIZER", False
    yield distributed, "HAVE_APEX_OR_TE", True
    yield distributed, "USING_TE_OPTIMIZER", True
    for module in (optimizer, _core("optimizer.optimizer_config")):
        if hasattr(module, "is_te_min_version"):
            # called only to check that FusedAdam is new enough; without Transformer Engine it raises TypeError
            yield module, "is_te_min_version", lambda *args, **kwargs: True


def _tensor_list_patches() -> Iterator[Patch]:
    """megatron-core's own norms and scalings of tensor lists, in place of the CUDA kernels of an installed Transformer Engine or Apex."""
    utils = _core("utils")
    local = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
    }
    for module in (
        _core("optimizer.optimizer"),
        _core("optimizer.clip_grads"),
        _core("distributed.fsdp.src.megatron_fsdp.mixed_precision"),
    ):
        yield from ((module, name, new) for name, new in local.items() if name in vars(module))
