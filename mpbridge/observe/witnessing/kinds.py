"""Identifies the kind of loop from its objects."""

from __future__ import annotations

from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.numerics.observation.updates import inner_optimizers
from mpbridge.observe.witnessing.core import CoreLoop
from mpbridge.observe.witnessing.core_sharded import CoreFsdp2Loop, CoreFsdpLoop
from mpbridge.observe.witnessing.loops import Loop, chunks
from mpbridge.observe.witnessing.plain import TorchLoop
from mpbridge.observe.witnessing.sharded import Fsdp1Loop, Fsdp2Loop
from mpbridge.observe.witnessing.zero import ZeroLoop
from mpbridge.observe.witnessing.zero3 import Zero3Loop


def loop_of(model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> Loop:
    """The kind of loop that these objects belong to. Raises BadValue for objects that are not a model and an optimizer."""
    for chunk in chunks(model):
        if not isinstance(chunk, torch.nn.Module):
            raise BadValue(
                f"witness() got a model of class {type(chunk).__name__}, expected a torch.nn.Module or a list of them"
            )
    names = {base.__name__ for base in type(optimizer).__mro__}
    first = next(chunks(model))
    if "MegatronOptimizer" in names or hasattr(optimizer, "chained_optimizers"):
        return _core_kind(first)(model, optimizer, scaler=scaler, group=group)
    zero = getattr(optimizer, "optimizer", optimizer) if "DeepSpeedOptimizerWrapper" in names else optimizer
    if type(zero).__module__.startswith("deepspeed.runtime"):
        kind: type[Loop] = Zero3Loop if hasattr(zero, "fp32_partitioned_groups_flat") else ZeroLoop
        return kind(model, zero, scaler=scaler, group=group)
    inner = list(inner_optimizers(optimizer)) if not isinstance(optimizer, (list, tuple)) else optimizer
    if not inner or not all(hasattr(one, "param_groups") for one in inner):
        raise BadValue(
            f"witness() got an optimizer of class {type(optimizer).__name__}, expected one with param_groups"
        )
    own = getattr(optimizer, "scaler", None)  # accelerate's optimizers carry theirs
    return _torch_loop(model, optimizer, scaler=own if scaler is None else scaler, group=group)


def _core_kind(first: Any) -> type[Loop]:
    """The kind of loop by the model's wrapper."""
    if hasattr(first, "param_and_grad_buffer"):
        return CoreFsdpLoop
    return CoreFsdp2Loop if any(hasattr(one, "_local_tensor") for one in first.parameters()) else CoreLoop


def _torch_loop(model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> TorchLoop:
    """The loop of this kind of wrapper."""
    first = model[0] if isinstance(model, (list, tuple)) else model
    modules = list(first.modules())
    names = {base.__name__ for module in modules for base in type(module).__mro__}
    if "FullyShardedDataParallel" in names and any(hasattr(module, "_handle") for module in modules):
        kind: type[TorchLoop] = Fsdp1Loop
    elif any(hasattr(parameter, "_local_tensor") for parameter in first.parameters()):
        kind = Fsdp2Loop
    else:
        kind = TorchLoop
    return kind(model, optimizer, scaler=scaler, group=group)
