"""Replacements inside megatron-core that let it build and step on meta tensors over fake process groups."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from mpbridge.common.upstream import Patch


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def patches() -> Iterator[Patch]:
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
    self.output_splits_tp = [sum(mine) * self.ep_size] * self.tp_size
    self.num_global_tokens_per_local_expert = torch.tensor([mine] * (self.ep_size * self.tp_size), device="cpu")
    Chosen.count = routed
    return torch.tensor([count * self.ep_size * self.tp_size for count in mine], device="cpu")


class Chosen:
    """The number of elements that a boolean mask of the router selects."""

    count = 0
