"""What one rank sees of its own engine: plain data that can be sent to the others and judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.audit.flags import different, optimizer_faults
from mpbridge.audit.motion import Motion, reached, updates
from mpbridge.audit.promise import ABSENT, Promises
from mpbridge.audit.rules import rule_of
from mpbridge.audit.stored import elements, size, storage
from mpbridge.audit.watch import Watch, linears
from mpbridge.precision.words import rule_words

UNITS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""Relative rounding error of half a unit in the last place."""

ONCE = ("main_params", "exp_avg", "exp_avg_sq")
"""Roles of which a parameter has one tensor on a rank."""


@dataclass
class Tally:
    """Sums over the tensors of one role that have the same promise and the same storage."""

    count: int = 0
    elements: int = 0
    bytes: int = 0
    offenders: list[str] = field(default_factory=list)


@dataclass
class Observed:
    """One rank's observations."""

    tensors: dict[tuple[str, str, str], Tally] = field(default_factory=dict)
    """(role, promised, found) -> tally; promised is '' where the policy says nothing."""
    layouts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter -> role -> storage."""
    rules: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(promised, found) rule -> linears."""
    outputs: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(promised, found) dtype that linears returned -> linears."""
    autocast: Counter[str] = field(default_factory=Counter)
    wire: Counter[tuple[str, str]] = field(default_factory=Counter)
    flags: tuple[int, list[str]] = (0, [])
    moved: dict[str, bool] = field(default_factory=dict)
    expected: dict[str, bool] = field(default_factory=dict)
    """Parameter -> whether an update of this size cannot have been lost in rounding."""
    reached: dict[str, bool] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)


def look(
    engine: Any, promises: Promises, watch: Watch | None = None, motion: Motion | None = None, lr: float = 0.0
) -> Observed:
    """Everything this rank can see now; with `watch` what steps did, with `motion` what the last update moved. Reads only."""
    seen = Observed()
    live = list(engine.tensors())
    owned = _own_storage(live)
    grads = _storages(live, "grads")
    for one in live:
        if (
            one.role == "main_params"
            and one.tensor is not None
            and _pointer(one.tensor) in owned
            and promises.of("main_params", one.parameter) == ABSENT
        ):
            continue  # an engine may list the parameter itself where it is its own main copy
        # megatron-core's optimizers often read the gradient buffer itself: one tensor in two roles is counted once
        _add(seen, promises, one, free=one.role == "main_grads" and not grads.isdisjoint(_storage(one.tensor)))
    for path, module in linears(engine.model).items():
        key = (rule_words(promises.gemms(path)), rule_of(module, promises.emulated, ran=watch is not None))
        seen.rules.setdefault(key, []).append(path)
    looked, wrong = different(engine)
    more, contradictions = optimizer_faults(engine, promises)
    seen.flags = (looked + more, wrong + contradictions)
    seen.trainable = [name for name, parameter in engine.named_parameters() if parameter.requires_grad]
    if watch is not None:
        _add_steps(seen, promises, watch)
    if motion is not None:
        seen.moved, seen.reached = motion.moved(live), reached(live)
        update = updates(live, lr, sgd=engine.run.facts.optimizer.name == "sgd")
        seen.expected = {name: motion.should_move(name, update(name), _unit(promises, name)) for name in seen.trainable}
    return seen


def _pointer(tensor: Any) -> int:
    inner = getattr(tensor, "_local_tensor", tensor)
    return int(inner.data_ptr()) if isinstance(inner, torch.Tensor) and inner.numel() else 0


def _storage(tensor: Any) -> set[int]:
    inner = getattr(tensor, "_local_tensor", tensor)
    return {inner.untyped_storage().data_ptr()} - {0} if type(inner) in (torch.Tensor, torch.nn.Parameter) else set()


def _storages(live: list[Any], role: str) -> set[int]:
    return {pointer for one in live if one.role == role for pointer in _storage(one.tensor)}


def _own_storage(live: list[Any]) -> set[int]:
    return {_pointer(one.tensor) for one in live if one.role == "params"} - {0}


def _add(seen: Observed, promises: Promises, one: Any, *, free: bool) -> None:
    promised, found = promises.of(one.role, one.parameter), storage(one.tensor)
    if one.role in ONCE and one.role in seen.layouts.get(one.parameter, ()):
        # each copy alone would be as promised: FusedAdam's main weights beside an engine's own waste four bytes per parameter
        found = f"{found} twice"
    tally = seen.tensors.setdefault((one.role, promised or "", found), Tally())
    tally.count += 1
    tally.elements += elements(one.tensor)
    tally.bytes += 0 if free else size(one.tensor)
    if promised is not None and promised != found:
        tally.offenders.append(one.parameter or one.role)
    if one.parameter:
        seen.layouts.setdefault(one.parameter, {})[one.role] = found


def _add_steps(seen: Observed, promises: Promises, watch: Watch) -> None:
    for path, counts in watch.outputs.items():
        kept = promises.kept_fp32(f"{path}.weight")
        wanted = "fp32" if kept else promises.policy.compute.short
        found = [watch.weights.get(path, "fp32")] if kept else list(counts)
        if path.endswith("output_layer") and promises.policy.logits is not None:
            continue  # the model builder widens what this linear returns
        for dtype in found:
            seen.outputs.setdefault((wanted, dtype), []).append(path)
    seen.autocast, seen.wire = Counter(watch.autocast), Counter(watch.wire)


def _unit(promises: Promises, parameter: str) -> float:
    main = promises.of("main_params", parameter)
    stored = promises.of("params", parameter) if main == ABSENT else main
    return UNITS.get(stored or "fp32", UNITS["fp32"])
