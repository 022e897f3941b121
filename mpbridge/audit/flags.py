"""Derived flags: the fields that the recipe wrote, and those that megatron-core or the optimizer derived from them, read from the live objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mpbridge.audit.promise import Promises
from mpbridge.formats import DType, say

MISSING = object()


def configs(engine: Any) -> dict[str, Any]:
    """The live config objects: {'model': TransformerConfig, 'optimizer': OptimizerConfig, 'ddp': DistributedDataParallelConfig}, those that exist."""
    first = engine.model[0] if engine.model else None
    kept = getattr(engine, "configs", None)
    # those that the live objects hold come first: they are in effect
    found = {
        "model": getattr(first, "config", None) or getattr(kept, "model", None),
        "optimizer": getattr(engine.optimizer, "config", None) or getattr(kept, "optimizer", None),
        "ddp": getattr(first, "ddp_config", None) or getattr(kept, "ddp", None),
    }
    return {name: config for name, config in found.items() if config is not None}


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers inside megatron-core's wrappers (ChainedOptimizer, DistributedOptimizer ...), or the optimizer itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained:
        return [inner for one in chained for inner in inner_optimizers(one)]
    inner = getattr(optimizer, "optimizer", None)
    return inner_optimizers(inner) if inner is not None else [optimizer] if optimizer is not None else []


def _written(engine: Any) -> Iterator[tuple[str, Any]]:
    """'model.bf16' -> value, for every write of the run's plan."""
    for write in getattr(getattr(engine.run, "plan", None), "writes", ()) or ():
        yield f"{write.target}.{write.field}", write.after


def _value(objects: Mapping[str, Any], path: str) -> Any:
    target, _, name = path.partition(".")
    owner = objects.get(target)
    if owner is None:
        return MISSING
    return owner.get(name, MISSING) if isinstance(owner, Mapping) else getattr(owner, name, MISSING)


def different(engine: Any) -> tuple[int, list[str]]:
    """(how many written fields were read, those whose live value is another, as 'model.bf16: promised true, found false')."""
    objects, looked, wrong = configs(engine), 0, []
    for path, after in _written(engine):
        found = _value(objects, path)
        if found is MISSING:
            continue
        looked += 1
        if say(found) != say(after):
            wrong.append(f"{path}: promised {say(after)}, found {say(found)}")
    return looked, wrong


def optimizer_faults(engine: Any, promises: Promises) -> tuple[int, list[str]]:
    """(how many flags were read, contradictions): FusedAdam's master weights and decoupled gradients against who was promised to own the main weights."""
    owner, looked, wrong = promises.owner, 0, []
    flag = getattr(configs(engine).get("optimizer"), "use_precision_aware_optimizer_no_fp8_or_ds_fp8", None)
    for inner in inner_optimizers(engine.optimizer):
        masters, decoupled = getattr(inner, "master_weights", None), getattr(inner, "use_decoupled_grad", None)
        # an optimizer of parameters kept in FP32 needs no main weights; one without parameters (empty shards) tells nothing
        updated = [parameter for group in inner.param_groups for parameter in group["params"]]
        kept = bool(promises.policy.keep_fp32) and all(parameter.dtype is torch.float32 for parameter in updated)
        if masters is not None and updated:
            looked += 1
            held = promises.kept(DType.FP32 if kept else promises.policy.params).get("main_params")
            if bool(masters) is not (held is not None and held.owner == "optimizer"):
                wrong.append(
                    f"{type(inner).__name__}.master_weights={bool(masters)}, but the {owner} own(s) the main weights"
                )
        # megatron-core hands gradients over by this flag, FusedAdam picks them up by its own: when they differ, nothing trains and nothing is reported
        if decoupled is not None and flag is not None:
            looked += 1
            if bool(decoupled) is not bool(flag):
                wrong.append(
                    f"{type(inner).__name__}.use_decoupled_grad={bool(decoupled)}, megatron-core's own flag is {bool(flag)}"
                )
    return looked, wrong
