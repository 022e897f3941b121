"""Identifies the kind of loop from its objects: one table, of which the first row that fits counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpbridge.common.errors import BadValue
from mpbridge.observe.audit.flags import inner_optimizers
from mpbridge.observe.witnessing.core import CoreFsdp2Loop, CoreFsdpLoop, CoreLoop
from mpbridge.observe.witnessing.deepspeed import UnshardedLoop, Zero3Loop, ZeroLoop
from mpbridge.observe.witnessing.loops import Loop, chunks
from mpbridge.observe.witnessing.plain import TorchLoop
from mpbridge.observe.witnessing.sharded import Fsdp1Loop, Fsdp2Loop


def _core(optimizer: Any) -> bool:
    return "MegatronOptimizer" in _classes(optimizer) or hasattr(optimizer, "chained_optimizers")


def _zero(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.runtime")


def _unsharded(optimizer: Any) -> bool:
    """DeepSpeed's `FP16_UnfusedOptimizer` and `FP16_Optimizer`; the BF16 optimizer has FP32 groups too, and partitions of them."""
    copies = hasattr(optimizer, "fp32_groups") or hasattr(optimizer, "fp32_groups_flat")
    return copies and hasattr(optimizer, "fp16_groups") and not hasattr(optimizer, "fp32_groups_flat_partition")


def _dtensors(model: Any) -> bool:
    return any(hasattr(one, "_local_tensor") for one in model.parameters())


def _fsdp1(model: Any) -> bool:
    names = {name for module in model.modules() for name in _classes(module)}
    return "FullyShardedDataParallel" in names and any(hasattr(module, "_handle") for module in model.modules())


KINDS: tuple[tuple[type[Loop], Callable[[Any, Any], bool]], ...] = (
    (CoreFsdpLoop, lambda model, optimizer: _core(optimizer) and hasattr(model, "param_and_grad_buffer")),
    (CoreFsdp2Loop, lambda model, optimizer: _core(optimizer) and _dtensors(model)),
    (CoreLoop, lambda model, optimizer: _core(optimizer)),
    (Zero3Loop, lambda model, optimizer: _zero(optimizer) and hasattr(optimizer, "fp32_partitioned_groups_flat")),
    (UnshardedLoop, lambda model, optimizer: _zero(optimizer) and _unsharded(optimizer)),
    (ZeroLoop, lambda model, optimizer: _zero(optimizer)),
    (Fsdp1Loop, lambda model, optimizer: _fsdp1(model)),
    (Fsdp2Loop, lambda model, optimizer: _dtensors(model)),
    (TorchLoop, lambda model, optimizer: True),
)
"""Kind -> whether the first model chunk and the optimizer belong to it."""


def loop_of(model: Any, optimizer: Any, *, scaler: Any = None, group: Any = None) -> Loop:
    """The kind of loop that these objects belong to. Raises BadValue for objects that are not a model and an optimizer."""
    for chunk in chunks(model):
        if not isinstance(chunk, torch.nn.Module):
            what = type(chunk).__name__
            raise BadValue(f"witness() got a model of class {what}, expected a torch.nn.Module or a list of them")
    if "DeepSpeedOptimizerWrapper" in _classes(optimizer) and _zero(inside := getattr(optimizer, "optimizer", None)):
        optimizer = inside  # accelerate's wrapper
    if not _core(optimizer) and not _zero(optimizer):
        several = optimizer if isinstance(optimizer, (list, tuple)) else inner_optimizers(optimizer)
        if not several or not all(hasattr(one, "param_groups") for one in several):
            what = type(optimizer).__name__
            raise BadValue(f"witness() got an optimizer of class {what}, expected one with param_groups")
        # accelerate's optimizers carry theirs
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
    first = next(chunks(model))
    kind = next(kind for kind, fits in KINDS if fits(first, optimizer))
    return kind(model, optimizer, scaler=scaler, group=group)


def _classes(thing: Any) -> set[str]:
    return {base.__name__ for base in type(thing).__mro__}
