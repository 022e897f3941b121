"""Derived flags, read from the live objects: the fields that the recipe wrote, those that megatron-core or the optimizer derived from them, the loss scaler, and the updates that optimizers count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mpbridge.backend.devices.products import reduced
from mpbridge.backend.megatron.inside_optimizer import parts
from mpbridge.common.formats import DType, say
from mpbridge.observe.audit.promise import Promises
from mpbridge.precision.megatron_spec.fields import TABLE
from mpbridge.precision.policy import LossScale
from mpbridge.precision.sync.plan import plan, show


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The torch optimizers in a list or inside wrappers (megatron-core's, accelerate's, Fabric's, DeepSpeed's), or the optimizer itself."""
    chained = list(optimizer) if isinstance(optimizer, (list, tuple)) else parts(optimizer)
    if chained != [optimizer]:
        return [inner for one in chained for inner in inner_optimizers(one)]
    inner = getattr(optimizer, "optimizer", None)
    return inner_optimizers(inner) if inner is not None else [optimizer] if optimizer is not None else []


class Updates:
    """How many updates each inner optimizer counted, against how many were applied since it was first asked."""

    def __init__(self) -> None:
        self._applied = 0
        self._first: dict[int, tuple[int, int]] = {}
        """Optimizer index -> (applied, counted) when it first had a count."""

    def applied(self, engine: Any) -> None:
        """Records an applied update."""
        self._applied += 1
        for number, count in _counts(engine):
            self._first.setdefault(number, (self._applied, count))

    def faults(self, engine: Any) -> list[str]:
        """Optimizers whose own count of updates differs."""
        found = []
        for number, count in _counts(engine):
            applied, first = self._first.get(number, (self._applied, count))
            due, took = self._applied - applied, count - first
            if took != due:
                found.append(f"optimizer {number}: counted {took} updates, {due} were applied")
        return found


def _counts(engine: Any) -> list[tuple[int, int]]:
    """(index, count) of the inner optimizers that count: torch's per parameter, FusedAdam per group. A parameter without a gradient is skipped, so the largest
    count is the optimizer's."""
    found = []
    for number, inner in enumerate(inner_optimizers(engine.optimizer)):
        steps = [group["step"] for group in inner.param_groups if "step" in group]
        steps += [state["step"] for state in inner.state.values() if "step" in state]
        if steps:
            found.append((number, int(max(float(step) for step in steps))))
    return found


def configs(engine: Any) -> dict[str, Any]:
    """The live config objects: {'model': TransformerConfig, 'optimizer': OptimizerConfig, 'ddp': DistributedDataParallelConfig}, those that exist."""
    first = engine.model[0] if engine.model else None
    kept = getattr(engine, "configs", None)
    # the live objects' own configs come first: they are in effect
    found = {
        "model": getattr(first, "config", None) or getattr(kept, "model", None),
        "optimizer": getattr(engine.optimizer, "config", None) or getattr(kept, "optimizer", None),
        "ddp": getattr(first, "ddp_config", None) or getattr(kept, "ddp", None),
    }
    return {name: config for name, config in found.items() if config is not None}


def different(engine: Any) -> tuple[int, list[str]]:
    """(number of fields the policy decides on the live configs, those with a different value, as 'model.bf16: promised true, found false').

    The differences are what the policy would still have to write; after a build there are none.
    """
    objects, run = configs(engine), engine.run
    made = plan(run.policy, realization="emulated" if getattr(run, "emulate", False) else "native", **objects)
    wrong = [f"{one.name}: promised {show(one.after)}, found {show(one.before)}" for one in made.writes]
    looked = sum(1 for row in TABLE if row.target in objects and hasattr(objects[row.target], row.field))
    # torch settings that compute FP32 products in TF32 or BF16 although the policy promises FP32
    products = (
        f"products of FP32 factors: promised fp32, found {found} (torch.set_float32_matmul_precision('highest') restores FP32)"
        for found in reduced(run.policy).values()
    )
    return looked + 1, [*wrong, *_kept(run, objects), *products]


def flags_of(engine: Any, promises: Promises) -> tuple[int, list[str]]:
    """(number of flags read, those that contradict the promises) of the configs, the optimizers and the loss scaler."""
    looked, wrong = different(engine)
    more, contradictions = optimizer_faults(engine, promises)
    return looked + more, wrong + contradictions + scaler_faults(engine, promises.policy.loss_scale)


def _kept(run: Any, objects: dict[str, Any]) -> Iterator[str]:
    """Precision fields that this policy leaves alone: they keep the author's value, or megatron-core's default."""
    written = {(one.target, one.field) for one in getattr(run.plan, "writes", ())}
    for row in TABLE:
        target = objects.get(row.target)
        left = row.field in WATCHED and (row.target, row.field) not in written
        if not left or not hasattr(target, row.field):
            continue
        wanted = run.inputs.get(row.target, {}).get(row.field, row.default)
        found = getattr(target, row.field)
        if say(found) != say(wanted):
            yield f"{row.target}.{row.field}: promised {say(wanted)}, found {say(found)}"


WATCHED = frozenset({"attention_softmax_in_fp32", "fp32_residual_connection", "moe_router_dtype"})
"""Fields whose default is itself a promise: they are not derived from other fields."""


def optimizer_faults(engine: Any, promises: Promises) -> tuple[int, list[str]]:
    """(number of flags read, contradictions): FusedAdam's master weights and decoupled gradients against the promised owner of the main weights."""
    owner, looked, wrong = promises.owner, 0, []
    flag = getattr(configs(engine).get("optimizer"), "use_precision_aware_optimizer_no_fp8_or_ds_fp8", None)
    for inner in inner_optimizers(engine.optimizer):
        masters, decoupled = getattr(inner, "master_weights", None), getattr(inner, "use_decoupled_grad", None)
        # an optimizer of FP32 parameters needs no main weights; one without parameters (empty shards) proves nothing
        updated = [parameter for group in inner.param_groups for parameter in group["params"]]
        kept = bool(promises.policy.keep_fp32) and all(parameter.dtype is torch.float32 for parameter in updated)
        if masters is not None and updated:
            looked += 1
            held = promises.kept(DType.FP32 if kept else promises.policy.params).get("main_params")
            if bool(masters) is not (held is not None and held.owner == "optimizer"):
                name = type(inner).__name__
                wrong.append(f"{name}.master_weights={bool(masters)}, but the {owner} own(s) the main weights")
        # megatron-core passes gradients by this flag, FusedAdam reads them by its own: when they differ, nothing trains and nothing is reported
        if decoupled is not None and flag is not None:
            looked += 1
            if bool(decoupled) is not bool(flag):
                name = type(inner).__name__
                wrong.append(f"{name}.use_decoupled_grad={bool(decoupled)}, megatron-core's own flag is {bool(flag)}")
    return looked, wrong


def scaler_of(engine: Any) -> Any:
    """The scaler whose scale multiplies the loss; None if there is none."""
    held = (getattr(one, "grad_scaler", None) for one in (engine.optimizer, *parts(engine.optimizer)))
    return next((scaler for scaler in held if scaler is not None), None)


def scaler_faults(engine: Any, promised: LossScale | None) -> list[str]:
    """What is not as promised about the scaler."""
    scaler, scale = scaler_of(engine), float(engine.optimizer.get_loss_scale())
    if promised is None:
        return [] if scale == 1.0 else [f"loss scale: promised none, found {scale:g}"]
    faults = []
    if not getattr(engine.configs.model, "grad_scale_func", None):
        faults.append("loss scale: the loss is not multiplied by it (model.grad_scale_func is not set)")
    if not promised.dynamic:
        wrong = [f"loss scale: promised {promised.static:g}, found {scale:g}"]
        return faults + ([] if scale == promised.static else wrong)
    if scaler is None:
        return [*faults, "loss scale: promised dynamic, found none"]
    rule = {"growth_interval": promised.window, "hysteresis": promised.hysteresis, "min_scale": promised.minimum}
    for name, wanted in rule.items():
        found = getattr(scaler, name, None)
        if found is not None and float(found) != float(wanted):
            faults.append(f"loss scale: promised {name} {wanted:g}, found {float(found):g}")
    if scale < promised.minimum:
        faults.append(f"loss scale: {scale:g} is below its minimum {promised.minimum:g}")
    return faults


class ScaleRule:
    """A reference of dynamic loss scaling, stepped alongside the run's own scaler: halved when overflows use up the hysteresis, doubled after a window of
    good steps (megatron-core's grad_scaler.py)."""

    def __init__(self, engine: Any, promised: LossScale) -> None:
        scaler = scaler_of(engine)
        self.rule = promised
        self.scale = float(engine.optimizer.get_loss_scale())
        self.good = int(getattr(scaler, "_growth_tracker", 0))
        self.patience = int(getattr(scaler, "_hysteresis_tracker", promised.hysteresis))

    def next(self, engine: Any, *, applied: bool, used: float) -> str:
        """The fault of the scale before or after a step; '' if there is none."""
        if used != self.scale:
            return f"the step used scale {used:g}, its rule gives {self.scale:g}"
        after = float(engine.optimizer.get_loss_scale())
        if applied:
            self._went_well()
        else:
            self._skipped(after)
        if after != self.scale:
            return f"the scale went from {used:g} to {after:g}, its rule gives {self.scale:g}"
        return ""

    def _went_well(self) -> None:
        self.good += 1
        if self.good == self.rule.window:
            self.good, self.patience, self.scale = 0, self.rule.hysteresis, self.scale * 2.0

    def _skipped(self, after: float) -> None:
        patience, scale = self.patience - 1, self.scale
        if patience <= 0:
            scale = max(scale * 0.5, self.rule.minimum)
        # to the scaler, an update skipped only for its norm, with finite gradients, is not an overflow
        if after != scale and after == self.scale:
            self._went_well()
        else:
            self.good, self.patience, self.scale = 0, patience, scale
