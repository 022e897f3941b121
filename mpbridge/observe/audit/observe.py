"""What one rank sees of its own engine, as plain data that can be sent to other ranks and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.observe.audit.before import Before
from mpbridge.observe.audit.compute import Computed, computed
from mpbridge.observe.audit.flags import different, optimizer_faults
from mpbridge.observe.audit.gradients import Followed, followed
from mpbridge.observe.audit.places import linears
from mpbridge.observe.audit.promise import ABSENT, Promises
from mpbridge.observe.audit.quantization import Quantizations, quantizations
from mpbridge.observe.audit.replicas import Copies, copies
from mpbridge.observe.audit.rules import details, rule_of
from mpbridge.observe.audit.scaler import scaler_faults
from mpbridge.observe.audit.stored import elements, size, storage
from mpbridge.observe.audit.subject import answer
from mpbridge.observe.audit.traffic import Traffic, traffic
from mpbridge.observe.audit.watch import Watch
from mpbridge.observe.audit.weights import Weights, moved, standing
from mpbridge.precision.regions import GEMMS, Gemms
from mpbridge.precision.wording import HIGH, quant_text, rule_words

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import StepResult

ONCE = ("main_params", "exp_avg", "exp_avg_sq")
"""Roles with one tensor per parameter on a rank."""


@dataclass
class Tally:
    """Sums over the tensors of one role with the same promise and storage."""

    count: int = 0
    elements: int = 0
    bytes: int = 0
    offenders: list[str] = field(default_factory=list)


@dataclass
class Observed:
    """One rank's observations."""

    tensors: dict[tuple[str, str, str], Tally] = field(default_factory=dict)
    """(role, promised, found) -> tally; promised is '' if the policy says nothing."""
    layouts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter -> role -> storage."""
    rules: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(promised, found) rule -> linears."""
    flags: tuple[int, list[str]] = (0, [])
    weights: Weights = field(default_factory=Weights)
    copies: Copies = field(default_factory=Copies)
    computed: Computed | None = None
    quantized: Quantizations | None = None
    followed: Followed | None = None
    traffic: Traffic | None = None


def look(
    engine: Any,
    promises: Promises,
    watch: Watch | None = None,
    before: Before | None = None,
    result: StepResult | None = None,
    microbatches: int = 1,
) -> Observed:
    """Everything this rank can see now; with `watch`, what the last step did; with `before`, what its update changed. Read-only."""
    seen = Observed(flags=_flags(engine, promises))
    roles_into(seen, promises, list(engine.tensors()))
    for path, module in linears(engine.model).items():
        key = _rule(promises, path, module, ran=watch is not None)
        seen.rules.setdefault(key, []).append(path)
    lr = 0.0 if result is None else result.lr
    seen.weights = standing(engine) if before is None else moved(engine, before, lr, watch)
    seen.copies = copies(engine, None if watch is None else watch.read)
    if watch is not None:
        seen.computed = computed(engine, promises, watch)
        # a stage without a loss does not see where backward starts
        seen.traffic = traffic(engine, promises, watch, len(watch.roots) or microbatches)
        if promises.policy.quantized:
            seen.quantized = quantizations(engine, promises, watch)
        if result is not None and before is not None:
            seen.followed = followed(engine, watch, result.loss)
    return seen


def _rule(promises: Promises, path: str, module: Any, *, ran: bool) -> tuple[str, str]:
    """(promised, found) rule of a linear, in words; in full detail if the short forms agree but the rules do not."""
    promised = promises.gemms(path)
    words = rule_words(promised), rule_of(module, promises.emulated, ran=ran)
    plug = getattr(module, "plug", None)
    if words[0] != words[1]:
        return words
    if plug is None:
        return _open_fields(promised, words, module) if ran else words
    for gemm in GEMMS:
        wanted, quantizer = getattr(promised, gemm), getattr(plug, gemm, None)
        found = None if quantizer is None else quantizer.quant
        if wanted != found:
            texts = [HIGH if quant is None else quant_text(quant) for quant in (wanted, found)]
            return f"{gemm} {texts[0]}", f"{gemm} {texts[1]}"
    return words


def _open_fields(promised: Gemms, words: tuple[str, str], module: Any) -> tuple[str, str]:
    """The same for a Transformer Engine module, which has one recipe object for its three GEMMs."""
    quant = promised.fprop
    if quant is None or not promised.one:
        return words
    wanted, found = details(module, quant)
    return words if wanted == found else (f"{words[0]} ({wanted})", f"{words[1]} ({found})")


def _flags(engine: Any, promises: Promises) -> tuple[int, list[str]]:
    own = answer(engine, "audit_flags")
    if own is not None:
        found: tuple[int, list[str]] = own(promises)
        return found
    looked, wrong = different(engine)
    more, contradictions = optimizer_faults(engine, promises)
    return looked + more, wrong + contradictions + scaler_faults(engine, promises.policy.loss_scale)


def roles_into(seen: Observed, promises: Promises, live: list[Any]) -> None:
    """Tallies of live tensors by role, promise and storage."""
    owned = {_pointer(one.tensor) for one in live if one.role == "params"} - {0}
    grads = {pointer for one in live if one.role == "grads" for pointer in _storage(one.tensor)}
    for one in live:
        if (
            one.role == "main_params"
            and one.tensor is not None
            and _pointer(one.tensor) in owned
            and promises.of("main_params", one.parameter) == ABSENT
        ):
            continue  # an engine may list the parameter itself as its own main copy
        # megatron-core's optimizers often read the gradient buffer itself: a tensor with two roles is counted once
        _add(seen, promises, one, free=one.role == "main_grads" and not grads.isdisjoint(_storage(one.tensor)))


def _pointer(tensor: Any) -> int:
    inner = getattr(tensor, "_local_tensor", tensor)
    return int(inner.data_ptr()) if isinstance(inner, torch.Tensor) and inner.numel() else 0


def _storage(tensor: Any) -> set[int]:
    inner = getattr(tensor, "_local_tensor", tensor)
    if type(inner) not in (torch.Tensor, torch.nn.Parameter) or inner.layout is not torch.strided:
        return set()  # a sparse gradient has storages of its own
    return {inner.untyped_storage().data_ptr()} - {0}


def _add(seen: Observed, promises: Promises, one: Any, *, free: bool) -> None:
    promised, found = promises.of(one.role, one.parameter), storage(one.tensor)
    if one.role in ONCE and one.role in seen.layouts.get(one.parameter, ()):
        # each copy alone is as promised, but FusedAdam's main weights in addition to the engine's waste four bytes per parameter
        found = f"{found} twice"
    tally = seen.tensors.setdefault((one.role, promised or "", found), Tally())
    tally.count += 1
    tally.elements += elements(one.tensor)
    tally.bytes += 0 if free else size(one.tensor)
    if promised is not None and promised != found:
        tally.offenders.append(one.parameter or one.role)
    if one.parameter:
        seen.layouts.setdefault(one.parameter, {})[one.role] = found


def merged(ranks: list[Observed]) -> Mapping[tuple[str, str, str], Tally]:
    """The tallies of all ranks together."""
    found: dict[tuple[str, str, str], Tally] = {}
    for seen in ranks:
        for key, tally in seen.tensors.items():
            into = found.setdefault(key, Tally())
            into.count, into.elements, into.bytes = (
                into.count + tally.count,
                into.elements + tally.elements,
                into.bytes + tally.bytes,
            )
    return found
