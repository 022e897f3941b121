"""What one rank sees of its own engine, as plain data that can be sent to other ranks and judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.common.formats import say
from mpbridge.numerics.observation.modules import linears
from mpbridge.numerics.observation.tensors import elements, size, storage
from mpbridge.observe.audit.compute import Computed, computed
from mpbridge.observe.audit.flags import flags_of
from mpbridge.observe.audit.gradients import Followed, followed
from mpbridge.observe.audit.holdings import answer
from mpbridge.observe.audit.operands import asked
from mpbridge.observe.audit.orthogonal import Orthogonal, orthogonal
from mpbridge.observe.audit.promise import ABSENT, Promises
from mpbridge.observe.audit.quantization import Quantizations, quantizations
from mpbridge.observe.audit.replay import Replayed, replay
from mpbridge.observe.audit.replicas import Copies, Fixed, copies, fixed
from mpbridge.observe.audit.snapshot import Before, draws_of
from mpbridge.observe.audit.traffic import Traffic, traffic
from mpbridge.observe.audit.watch import Watch
from mpbridge.observe.audit.weights import Weights, moved, standing
from mpbridge.precision.policy import Quant
from mpbridge.precision.regions import GEMMS, Gemms
from mpbridge.precision.scalings import SCALINGS, scaling_of_recipe
from mpbridge.precision.wording import HIGH, quant_text, rule_words

if TYPE_CHECKING:
    from mpbridge.backend.engines.contract import StepResult


def rule_of(module: Any, emulated: bool, *, ran: bool) -> str:
    """The rule that `module` applies, as worded by `words.rule_words`; ran: a forward pass has run, so Transformer Engine's modules know their recipe."""
    # an emulated linear (mpbridge.numerics) has a plug, which has the rules of its GEMMs
    own = getattr(getattr(module, "plug", None), "gemms", None)
    if isinstance(own, Gemms):
        by_emulation = getattr(module.plug, "emulated", True)
        return rule_words(own) + ("" if emulated is by_emulation else " (emulated)" if by_emulation else " (native)")
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict):
        return HIGH
    if not (getattr(module, "fp8", False) if ran else getattr(module, "primary_weights_in_fp8", False)):
        return HIGH
    recipe = meta.get("recipe")
    mixed = getattr(getattr(recipe, "qfactory", None), "gemms", None)
    if isinstance(mixed, Gemms):
        return rule_words(mixed)
    # Transformer Engine's NVFP4 recipe has both attributes: fp8_format is that of its scales
    format_name = str(getattr(getattr(recipe, "fp4_format", None) or getattr(recipe, "fp8_format", None), "name", ""))
    # check base classes too: megatron-core's delayed scaling recipe is a subclass (TEDelayedScaling)
    made_by = [base.__name__ for base in type(recipe).__mro__]
    known = next((scaling for name in made_by if (scaling := scaling_of_recipe(name))), made_by[0])
    if known in SCALINGS and SCALINGS[known].factory:
        return known  # the factory does not read CustomRecipe's format: 2.11 has none, 2.20's is HYBRID unless set
    # Transformer Engine's Format uses our names in upper case (common/recipe/__init__.py)
    return f"{format_name.lower()} {known}"


ONCE = ("main_params", "exp_avg", "exp_avg_sq")
"""Roles with one tensor per parameter on a rank."""


@dataclass
class Tally:
    """Sums over the tensors of one role with the same promise and storage."""

    count: int = 0
    elements: int = 0
    bytes: int = 0
    offenders: list[str] = field(default_factory=list)
    unpromised: set[str] = field(default_factory=set)
    """Buffers for which the policy says nothing, by the last part of their names."""


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
    replayed: Replayed | None = None
    orthogonal: Orthogonal | None = None
    fixed: Fixed = field(default_factory=Fixed)


def look(
    engine: Any,
    promises: Promises,
    watch: Watch | None = None,
    before: Before | None = None,
    result: StepResult | None = None,
    microbatches: int = 1,
) -> Observed:
    """Everything this rank can see now; with `watch`, what the last step did; with `before`, what its update changed. Read-only."""
    own = answer(engine, "audit_flags")
    seen = Observed(flags=flags_of(engine, promises) if own is None else own(promises))
    roles_into(seen, promises, list(engine.tensors()))
    for path, module in linears(engine.model).items():
        key = _rule(promises, path, module, ran=watch is not None)
        seen.rules.setdefault(key, []).append(path)
    lr = 0.0 if result is None else result.lr
    seen.weights = standing(engine) if before is None else moved(engine, before, lr, watch)
    if not getattr(engine, "foreign", False):
        seen.fixed = fixed(engine, promises, {} if before is None else before.fixed)
    seen.copies = copies(engine, None if watch is None else watch.read)
    if before is not None:
        seen.copies.whole |= before.states
    if watch is not None:
        seen.computed = computed(engine, promises, watch)
        # a stage without a loss does not see where backward starts
        seen.traffic = traffic(engine, promises, watch, len(watch.roots) or microbatches)
        if promises.policy.quantized:
            seen.quantized = quantizations(engine, promises, watch)
            if before is not None and before.draws is not None and before.draws + 1 != draws_of(engine):
                seen.quantized.wrong.append("random bytes of stochastic rounding: not those of this step")
        if result is not None and before is not None:
            seen.followed = followed(engine, watch, result.loss)
    if before is not None and result is not None and not getattr(engine, "foreign", False):
        seen.replayed = replay(engine, before.starts)
        seen.replayed.declared, seen.replayed.between = before.undeclared, before.between
        if promises.matrices is not None:
            seen.orthogonal = orthogonal(engine, promises, before)
    return seen


def _rule(promises: Promises, path: str, module: Any, *, ran: bool) -> tuple[str, str]:
    """(promised, found) rule of a linear, in words; in full detail if the short forms agree but the rules do not."""
    promised = promises.gemms(path)
    words = rule_words(promised), rule_of(module, promises.emulated, ran=ran)
    plug = getattr(module, "plug", None)
    if words[0] != words[1]:
        return words
    if plug is None:
        return _opened(promised, words, module) if ran and words[0] != HIGH else words
    for gemm in GEMMS:
        wanted, quantizer = getattr(promised, gemm), getattr(plug, gemm, None)
        found = None if quantizer is None else quantizer.quant
        if wanted != found:
            texts = [HIGH if quant is None else quant_text(quant) for quant in (wanted, found)]
            return f"{gemm} {texts[0]}", f"{gemm} {texts[1]}"
    return words


def _opened(promised: Gemms, words: tuple[str, str], module: Any) -> tuple[str, str]:
    """The same for a Transformer Engine module: what its quantizers write, and the histories of delayed scaling, which its recipe object has."""
    pairs = list(_quantizers(module, promised))
    if promised.fprop is not None and promised.fprop.row.history:
        recipe, quant = module.fp8_meta["recipe"], promised.fprop
        pairs += [(name, say(getattr(quant, name)), say(getattr(recipe, own))) for name, own in _HISTORY.items()]
    wrong = dict.fromkeys((name, wanted, found) for name, wanted, found in pairs if wanted != found)
    if not wrong:
        return words
    wanted, found = (", ".join(f"{pair[0]} {pair[side]}" for pair in wrong) for side in (1, 2))
    return f"{words[0]} ({wanted})", f"{words[1]} ({found})"


_HISTORY = {"margin": "margin", "amax_history": "amax_history_len", "amax_algo": "amax_compute_algo"}
"""Field of a rule -> of DelayedScaling."""


def _quantizers(module: Any, promised: Gemms) -> Iterator[tuple[str, str, str]]:
    """(operand, what its quantizer should write, what it writes) for the rows and the columns of every operand of a GEMM.

    A module keeps the quantizers that it has made while the class of its recipe stays (module/base.py, 2.11 to 2.20: `set_meta_tensor`), so that they may differ
    from the recipe object that it shows.
    """
    from mpbridge.backend.megatron.gemm_factories import READ_BY

    made = getattr(module, "quantizers", None) or {}
    forward, backward = (made.get(name) or [] for name in ("scaling_fwd", "scaling_bwd"))
    # for each GEMM: input, weight, output; gradient of the output, of the input (FP8FwdTensorIdx, FP8BwdTensorIdx)
    operands = {"input": forward[::3], "weight": forward[1::3], "grad_output": backward[::2]}
    for operand, quantizers in operands.items():
        for gemm, side in zip(READ_BY[operand], ("row", "column"), strict=True):
            quant = getattr(promised, gemm)
            for both in quantizers:
                if quant is not None and quant.row.factory and not _element(both):
                    continue  # an author's factory may leave an operand as it is, or give its copies to two quantizers
                quantizer = getattr(both, f"{side}wise_quantizer", both)
                name = operand if promised.one else f"{gemm} {operand}"
                yield name, _promised_text(quant, operand), _written_text(quant, quantizer)


def _promised_text(quant: Quant | None, operand: str) -> str:
    if quant is None:
        return HIGH
    on = [name for name, _, has in _OPTIONS if operand in has and asked(quant, name)]
    return " with ".join([f"{quant.element(gradient=operand == 'grad_output')} {quant.scaling}", *on])


def _written_text(quant: Quant | None, quantizer: Any) -> str:
    if quant is not None and quant.row.factory:
        return f"{_element(quantizer)} {quant.scaling}"  # an author's factory decides the rest
    scaling = _QUANTIZERS.get(type(quantizer).__name__, type(quantizer).__name__)
    on = [name for name, attribute, _ in _OPTIONS if getattr(quantizer, attribute, False)]
    return " with ".join([f"{_element(quantizer)} {scaling}".strip(), *on])


def _element(quantizer: Any) -> str:
    """The element format that a quantizer writes, a key of formats.FORMATS; empty if it has none of its own."""
    return _ELEMENTS.get(getattr(getattr(quantizer, "dtype", None), "name", ""), "")


_OPTIONS = (
    ("power_of_two", "force_pow_2_scales", ("input", "weight", "grad_output")), ("hadamard", "with_rht", ("input", "grad_output")),
    ("stochastic_rounding", "stochastic_rounding", ("grad_output",)), ("square_weights", "with_2d_quantization", ("weight",)),
)  # fmt: skip
"""Option of a scaling, the attribute of Transformer Engine's quantizers, and the operands that have it."""
_ELEMENTS = {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2", "kFloat4E2M1": "e2m1"}
"""transformer_engine_torch.DType -> a key of formats.FORMATS."""
_QUANTIZERS = {"IdentityQuantizer": HIGH} | {row.quantizer: row.name for row in SCALINGS.values() if row.quantizer}
"""Class of Transformer Engine's quantizers -> its scaling."""


def roles_into(seen: Observed, promises: Promises, live: list[Any]) -> None:
    """Tallies of live tensors by role, promise and storage."""
    owned = {_pointer(one.tensor) for one in live if one.role == "params"} - {0}
    grads = {pointer for one in live if one.role == "grads" for pointer in _storage(one.tensor)}
    for one in live:
        itself = one.role == "main_params" and one.tensor is not None and _pointer(one.tensor) in owned
        if itself and promises.of("main_params", one.parameter) == ABSENT:
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
    if promised is None and one.role == "buffers":
        tally.unpromised.add(one.parameter.rpartition(".")[2])
    if one.parameter:
        seen.layouts.setdefault(one.parameter, {})[one.role] = found


def merged(ranks: list[Observed]) -> Mapping[tuple[str, str, str], Tally]:
    """The tallies of all ranks together."""
    found: dict[tuple[str, str, str], Tally] = {}
    for seen in ranks:
        for key, tally in seen.tensors.items():
            into = found.setdefault(key, Tally())
            into.count += tally.count
            into.elements += tally.elements
            into.bytes += tally.bytes
            into.unpromised |= tally.unpromised
    return found
