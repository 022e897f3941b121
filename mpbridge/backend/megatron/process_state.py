"""megatron-core's process-wide state, which an engine changes and megatron-core never restores."""

from __future__ import annotations

import copy
from typing import Any

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
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    return _values(parallel_state, random, MoEAuxLossAutoScaler, MTPLossAutoScaler)


def layout() -> State:
    """The process groups of the current parallel layout, without the buffers of the engine that uses it."""
    from megatron.core import parallel_state

    return [entry for entry in _values(parallel_state) if entry[1] not in _BUFFERS]


def fresh_buffers() -> None:
    """Creates new buffers for the next engine of a layout that is reused."""
    from megatron.core import parallel_state

    for make in _BUFFERS.values():
        if hasattr(parallel_state, make):
            getattr(parallel_state, make)()


def forget_angles() -> None:
    """Empties the caches of the rotary embeddings' methods, which belong to the classes and hold modules and process groups of engines that no longer exist.

    A gloo group that is still referenced keeps its three threads (rotary_pos_embedding.py and yarn_rotary_pos_embedding.py: lru_cache around forward).
    """
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    for kind in (rotary_pos_embedding.RotaryEmbedding, yarn_rotary_pos_embedding.YarnRotaryEmbedding):
        for method in vars(kind).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()


def forget_router_losses() -> None:
    """Empties megatron-core's tracker of the routers' losses: it holds process groups, and its length is the depth of the first model that wrote to it."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):
        moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    else:  # since 0.17 an object in a separate module
        from megatron.core.transformer.moe import moe_logging

        moe_logging.destroy_moe_metrics_tracker()


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
