"""megatron-core's process-wide names and state: replaced for a CPU or for meta tensors, saved and restored."""

import copy
import importlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mpbridge.common.upstream import Patch

# --- on a CPU: names that only work with CUDA or Transformer Engine. `mpbridge.backend.devices` installs and removes the replacements --------
_IMPORTED = (
    "models.gpt", "models.gpt.gpt_layer_specs", "optimizer", "optimizer.distrib_optimizer", "optimizer.layer_wise_optimizer", "distributed",
    "pipeline_parallel.schedules", "dist_checkpointing", "transformer.moe.moe_utils", "transformer.moe.token_dispatcher",
    "transformer.multi_latent_attention", "transformer.multi_token_prediction",
)  # fmt: skip

FUSED_ADAM_MODULE = "transformer_engine.pytorch.optimizers"
"""The module from which OptimizerConfig imports FusedAdam."""


def import_all() -> None:
    """Imports everything that will be patched before anything is replaced: a module first imported while patched would keep the replacements under its own names."""
    for name in _IMPORTED:
        _core(name)


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def cpu_patches(
    *, get_state: Any, set_state: Any, split_sizes: Any, stream: Any, coalescing: Any, rotary: Any, swiglu: Any
) -> Iterator[Patch]:
    """Replacements for as long as CUDA calls are redirected; the arguments replace its random states, its copies of split
    sizes, its streams and torch's manager of coalesced collectives, and wrap its rotary embedding and its MLP."""
    turns, mlp = _core("models.common.embeddings.rope_utils"), _core("transformer.mlp").MLP
    yield turns, "_apply_rotary_pos_emb_bshd", rotary(turns._apply_rotary_pos_emb_bshd)
    yield mlp, "forward", swiglu(mlp.forward)
    states = {"_get_cuda_rng_state": get_state, "_set_cuda_rng_state": set_state}
    yield from aliases(states | {"_coalescing_manager": coalescing})
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
    yield logging.getLogger(_core("tensor_parallel.random").__name__), "disabled", True


def advice() -> Iterator[Patch]:
    """Keeps back warnings that only tell whoever builds a model to build it otherwise (since 0.18), which no setting of a run can do."""
    for name in (
        "models.gpt.gpt_model",
        "models.hybrid.hybrid_layer_allocation",
        "distributed.distributed_data_parallel",
    ):
        logger = logging.getLogger(f"megatron.core.{name}")
        yield logger, "filters", [*logger.filters, lambda record: record.levelno != logging.WARNING]


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
    for place in ("optimizer.optimizer", "optimizer.clip_grads", "distributed.fsdp.src.megatron_fsdp.mixed_precision"):
        yield from ((_core(place), name, new) for name, new in local.items() if name in vars(_core(place)))


# --- building and stepping on meta tensors over fake process groups -------------------------------------------------------------------------
def meta_patches() -> Iterator[Patch]:
    """Replacements for the rest of the process: each simulated rank has its own process."""
    state = _core("parallel_state")
    make = state.create_group

    def create_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **others: Any) -> Any:
        # gloo groups need a real store (parallel_state.py)
        return make(ranks, backend=None, **others)

    yield state, "create_group", create_group
    dispatcher = _core("transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    yield dispatcher, "preprocess", balanced
    # what would be copied to the host is already there
    yield dispatcher, "_maybe_dtoh_and_synchronize", lambda self, point, tokens_per_expert=None: tokens_per_expert


def balanced(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
    """MoEAlltoAllTokenDispatcher.preprocess with a router that distributes tokens evenly: split sizes are data, which meta tensors do not have."""
    routed = routing_map.size(0) * self.config.moe_router_topk
    counts = [routed // self.num_experts + int(i < routed % self.num_experts) for i in range(self.num_experts)]
    each = [sum(counts[r * self.num_local_experts : (r + 1) * self.num_local_experts]) for r in range(self.ep_size)]
    mine = counts[self.local_expert_indices[0] : self.local_expert_indices[-1] + 1]
    self.num_out_tokens = routed
    self.input_splits, self.output_splits = each, [sum(mine)] * self.ep_size
    self.output_splits_tp = torch.tensor([sum(mine) * self.ep_size] * self.tp_size, device="cpu")  # read with tolist()
    self.num_global_tokens_per_local_expert = torch.tensor([mine] * (self.ep_size * self.tp_size), device="cpu")
    Chosen.count = routed
    return torch.tensor([count * self.ep_size * self.tp_size for count in mine], device="cpu")


class Chosen:
    """The number of elements that a boolean mask of the router selects."""

    count = 0


# --- state that an engine changes and megatron-core never restores --------------------------------------------------------------------------
State = list[tuple[Any, str, Any]]
"""(owner, name, value)."""

ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Environment variables that megatron-core sets for Transformer Engine from model.attention_backend, and never resets."""

_BUFFERS = {
    "_GLOBAL_MEMORY_BUFFER": "_set_global_memory_buffer",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "_set_global_symmetric_memory_buffer",  # gone since 0.17
}
"""Buffers that belong to an engine, not to its layout, since they hold its activations. Name -> function that creates a new one."""


def process_wide() -> State:
    """The current parallel state, random state trackers and scales of auxiliary losses."""
    experts, ahead = _core("transformer.moe.moe_utils"), _core("transformer.multi_token_prediction")
    modules = (_core("parallel_state"), _core("tensor_parallel.random"))
    return _values(*modules, experts.MoEAuxLossAutoScaler, ahead.MTPLossAutoScaler)


def layout() -> State:
    """The process groups of the current parallel layout, without the buffers of the engine that uses it."""
    return [entry for entry in _values(_core("parallel_state")) if entry[1] not in _BUFFERS]


def fresh_buffers() -> None:
    """Creates new buffers for the next engine of a layout that is reused."""
    state = _core("parallel_state")
    for make in _BUFFERS.values():
        if hasattr(state, make):
            getattr(state, make)()


def forget_angles() -> None:
    """Empties the caches of the rotary embeddings' methods, which belong to the classes and hold modules and process groups of engines that no longer exist.

    A gloo group that is still referenced keeps its three threads (rotary_pos_embedding.py and yarn_rotary_pos_embedding.py: lru_cache around forward).
    """
    embeddings = "models.common.embeddings"
    plain, yarn = _core(f"{embeddings}.rotary_pos_embedding"), _core(f"{embeddings}.yarn_rotary_pos_embedding")
    for kind in (plain.RotaryEmbedding, yarn.YarnRotaryEmbedding):
        for method in vars(kind).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


def forget_router_losses() -> None:
    """Empties megatron-core's tracker of the routers' losses: it holds process groups, and its length is the depth of the first model that wrote to it."""
    tracker = getattr(_core("transformer.moe.moe_utils"), "_MOE_LAYER_WISE_LOGGING_TRACKER", None)
    if tracker is not None:
        tracker.clear()
    else:  # since 0.17 an object in a separate module
        _core("transformer.moe.moe_logging").destroy_moe_metrics_tracker()


def restore(state: State) -> None:
    """Restores the values."""
    for owner, name, value in state:
        setattr(owner, name, value)


def _values(*owners: Any) -> State:
    """The values of upper-case names of modules, and of the two others that hold state."""
    others = ("main_loss_backward_scale", "_global_process_group_list")
    return [
        (owner, name, copy.copy(value) if isinstance(value, (list, dict)) else value)
        for owner in owners
        for name, value in vars(owner).items()
        if (name.isupper() or name in others) and not callable(value)
    ]
