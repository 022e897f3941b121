"""Replays the optimizer's step on sampled elements: from the moments, weight and settings that it found and the gradient that it read to what it left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.numerics.observation.tensors import local, positions, power_below
from mpbridge.numerics.optimizers import f32
from mpbridge.observe.audit.findings import Finding, joined, judged
from mpbridge.observe.audit.holdings import (
    ADAM,
    LION,
    Held,
    Settings,
    betas_of,
    holdings,
    is_decoupled,
    rule_of,
    say_value,
)

_ROUNDINGS = 2.0**-22
"""Error of a moment in FP32 relative to the sum of its two terms: two products, a sum and, in torch, a difference, each within half a unit in the last place."""
_STORED = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
"""Dtype of a moment -> what storing it may lose, relative to it. Moments with scales of their own are not replayed."""
_UPDATE = 5e-5
"""Error of an update relative to it: 1 - 0.999**1 in FP32 is off by 3e-5, and its square root by half of that."""
_TINY = 2.0**-125
"""Results below FP32's normal range may be flushed to zero."""
_NORM, _NORM_NARROW = 1e-4, 2.0**-8
"""Error of the global norm: FP32 sums in another order. Gradients of 16 bits are rounded again where they are clipped."""


@dataclass(slots=True)
class Start:
    """One parameter's sampled elements before the step."""

    settings: Settings
    weight: torch.Tensor
    moments: dict[str, torch.Tensor]
    """In FP64; empty before the first update."""


@dataclass
class Replayed:
    """One rank's observation."""

    looked: Counter[str] = field(default_factory=Counter)
    """Rule.words -> elements."""
    wrong: list[str] = field(default_factory=list)
    between: list[str] = field(default_factory=list)
    """What changed since the step before."""
    settings: dict[str, Settings] = field(default_factory=dict)
    """Parameter -> settings that its update began with."""
    declared: list[str] = field(default_factory=list)
    """Settings that are not the declared ones."""
    squares: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """Parameter -> (sum of squares of the gradient that was read, its elements here, those of the whole parameter)."""
    narrow: bool = False
    """Whether a gradient was read in 16 bits."""


def is_replayed(held: Held) -> bool:
    """Whether the update follows a rule of RULES and what is stored can be read to the bit."""
    group = held.group
    rule = rule_of(held.inner)
    if group is None or held.rests or rule is None or held.trained is None:
        return False
    if group.get("amsgrad") or group.get("maximize") or (rule is ADAM and "betas" not in group):
        return False
    narrow = local(held.updated).dtype is not torch.float32
    if narrow and not type(held.inner).__name__.endswith("FusedAdam"):
        return False  # torch's kernels round every intermediate result to the parameter's dtype
    stored = [held.state[name] for name in rule.states if name in held.state]
    return all(not hasattr(one, "_data") and local(one).dtype in _STORED for one in stored)


def start_of(held: Held) -> Start | None:
    """What the coming step begins with; None if its result cannot be replayed."""
    trained = held.trained
    if trained is None or not is_replayed(held):
        return None
    moments = {name: held.moment(name) for name in betas_of(held)}
    known = {name: _sampled(moment) for name, moment in moments.items() if moment is not None}
    return Start(Settings.of(held), _sampled(trained), known)


def changed(left: Mapping[str, Start], found: Mapping[str, Start]) -> list[str]:
    """What is not as the last step left it: nothing but a step changes weights and moments."""
    wrong = []
    for name in left.keys() & found.keys():
        then, now = ({"weight": one.weight} | one.moments for one in (left[name], found[name]))
        both = ((what, then[what], now[what]) for what in then.keys() & now.keys())
        moved = (what for what, a, b in both if a.shape != b.shape or not torch.allclose(a, b, 0, 0, equal_nan=True))
        wrong += [f"{name}: {what} changed between two steps" for what in moved]
    return sorted(wrong)


def _sampled(flat: torch.Tensor) -> torch.Tensor:
    return flat[positions(flat.numel()).to(flat.device)].double()


def replay(engine: Any, starts: Mapping[str, Start]) -> Replayed:
    """Every replayable parameter of this rank after its step, beside what its optimizer's rule makes of its start."""
    seen = Replayed()
    for held in holdings(engine):
        gradient = held.gradient if held.updated is not None else None
        if gradient is not None:
            seen.squares[held.name] = (float(gradient.float().norm()) ** 2, gradient.numel(), held.whole)
            seen.narrow |= gradient.dtype is not torch.float32
        start = starts.get(held.name)
        if start is None or not is_replayed(held):
            continue
        seen.settings[held.name] = start.settings
        if gradient is None or held.trained is None or gradient.numel() != held.trained.numel():
            continue
        seen.looked[(rule_of(held.inner) or ADAM).words] += start.weight.numel()
        fault = _fault(held, start, _sampled(gradient))
        if fault:
            seen.wrong.append(f"{held.name}: {fault}")
    return seen


@torch.no_grad()
def _fault(held: Held, start: Start, gradient: torch.Tensor) -> str:
    """'' or the first result that the optimizer's rule does not give."""
    group, settings, rule = held.group or {}, start.settings, rule_of(held.inner) or ADAM
    decoupled = is_decoupled(held, group)
    summed = torch.zeros_like(gradient)
    if settings.weight_decay and not decoupled:
        decay = settings.weight_decay * start.weight
        # the sum's roundings, which show where it cancels: a CPU may multiply and add with one rounding or with two
        summed = 2.0**-23 * (gradient.abs() + decay.abs())
        gradient = gradient + decay
    wanted, room = {}, {}
    terms = ((gradient, summed), (gradient * gradient, summed * (2 * gradient.abs() + summed)))
    for name, beta, (term, spread) in zip(rule.states, settings.betas, terms, strict=False):
        stored = held.state.get(name)
        if stored is None:
            return f"{name} is missing"
        old = start.moments.get(name, torch.zeros_like(term))
        found, narrow = held.moment(name), _STORED[local(stored).dtype]
        if found is None or found.numel() != (held.trained if held.trained is not None else found).numel():
            return ""
        # torch rounds 1 - beta, Transformer Engine rounds beta first
        ways = [beta * old + keep * term for keep in {f32(1.0 - beta), f32(1.0 - f32(beta))}]
        # a linear interpolation keeps what 1 - beta, rounded, leaves
        room[name] = _ROUNDINGS * ((beta * old).abs() + ((1.0 - beta) * term).abs()) + 2.0**-25 * old.abs()
        room[name] += (1.0 - beta) * spread + _TINY
        wanted[name] = ways[0]
        left = [(_sampled(found) - way).abs() > room[name] + narrow * way.abs() for way in ways]
        wrong = min(int(one.sum()) for one in left)
        if wrong:
            what = f"{name} of {wrong} of {term.numel()} elements"
            return f"{what} does not follow from the moment before and the gradient"
    trained = held.trained
    if rule not in (ADAM, LION) or trained is None or trained.dtype not in _STORED or held.kept not in _STORED:
        return ""
    made = _lions(start, gradient) if rule is LION else _adams(held, start, wanted, room, decoupled=decoupled)
    weight, bound, told = made
    bound = bound + 4 * half_ulp(torch.maximum(start.weight.abs(), weight.abs()), held.kept)
    wrong = int((((_sampled(trained) - weight).abs() > bound) & told).sum())
    return f"{wrong} of {weight.numel()} elements are not what the update makes of them ({settings})" if wrong else ""


_Made = tuple[torch.Tensor, torch.Tensor, torch.Tensor | bool]
"""What an update makes of the weights, its error without that of storing them, and where it can be told."""


def _lions(start: Start, gradient: torch.Tensor) -> _Made:
    """lr against the sign of a mean of momentum and gradient, where that is not within its roundings of 0."""
    settings = start.settings
    beta, old = float(dict(settings.own)["beta1"]), start.moments.get("exp_avg", torch.zeros_like(gradient))
    kept, new = beta * old, (1.0 - beta) * gradient
    mean, room = kept + new, 2.0**-20 * (kept.abs() + new.abs()) + _TINY
    wanted = start.weight * (1.0 - settings.lr * settings.weight_decay) - settings.lr * torch.sign(mean)
    # a mean of exactly 0 has no sign
    told = (mean.abs() > room) | ((old == 0) & (gradient == 0))
    return wanted, torch.full_like(wanted, settings.lr * _UPDATE), told


def _adams(
    held: Held, start: Start, moments: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor], *, decoupled: bool
) -> _Made:
    group, settings = held.group or {}, start.settings
    step = float(held.state.get("step", group.get("step", 1)) or 1)
    first, second = (1 - beta**step for beta in settings.betas) if group.get("bias_correction", True) else (1.0, 1.0)
    denominator = (moments["exp_avg_sq"] / second).sqrt() + dict(settings.own)["eps"]
    update = moments["exp_avg"] / first / denominator
    decay = settings.weight_decay * start.weight if decoupled else torch.zeros_like(update)
    wanted = start.weight - settings.lr * (update + decay)
    bound = settings.lr * (_UPDATE * (update.abs() + decay.abs()) + room["exp_avg"] / first / denominator)
    # what the second moment's own rounding may do to its root, which is most where it is near zero
    square, spread = moments["exp_avg_sq"], room["exp_avg_sq"]
    low, root, high = ((one.clamp_min(0) / second).sqrt() for one in (square - spread, square, square + spread))
    slack = torch.maximum(root - low, high - root)
    bound = bound + settings.lr * update.abs() * slack / (denominator - slack).clamp_min(dict(settings.own)["eps"])
    return wanted, bound, True


def half_ulp(values: torch.Tensor, kept: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of each element where numbers are kept in that dtype, in the dtype of `values`."""
    info = torch.finfo(kept)
    return (power_below(values) * (info.eps / 2)).clamp_min(info.tiny * info.eps / 2)


def declared(engine: Any, name: str) -> Any:
    """A field of the optimizer's config as its author wrote it, or megatron-core's default; None if nothing declares it."""
    config = getattr(getattr(engine, "configs", None), "optimizer", None)
    default = getattr(type(config), name, None)
    return (engine.run.inputs.get("optimizer") or {}).get(name, default)


def undeclared(engine: Any, scheduler: Any = None) -> list[str]:
    """Settings of the optimizer's groups that are not the declared ones, before a step. scheduler: megatron-core's, whose rates this step should have."""
    wrong: dict[str, None] = {}
    for held in holdings(engine):
        group, rule = held.group, rule_of(held.inner)
        if group is None or rule is None or (rule is ADAM and "betas" not in group):
            continue
        if not group.get("default_config", True):
            continue  # a group with settings of its own
        wanted = {word: [declared(engine, name) for name in names] for word, names in rule.declared.items()}
        wanted["weight decay"] = _decays(engine, group, scheduler)
        factors = () if scheduler is None else (1, group.get("lr_mult", 1))
        wanted["rate"] = [scheduler.get_lr(group) * by for by in factors]
        now = Settings.of(held)
        found = dict(now.own) | {"weight decay": now.weight_decay, "rate": now.lr}
        if not group.get("bias_correction", True):
            wrong["no bias correction"] = None
        # megatron-core's and torch's Muon and Lion know no other weight decay
        decoupled = declared(engine, "decoupled_weight_decay") if rule is ADAM else True
        if now.weight_decay and decoupled is not None and bool(decoupled) is not is_decoupled(held, group):
            wrong[f"weight decay {'through the moments' if decoupled else 'decoupled'}, declared otherwise"] = None
        # without megatron-core's scheduler, nothing applies the groups' factors
        vector = scheduler is not None and held.parameter.dim() == 1
        if vector and now.weight_decay and not _is_decayed(engine, held.name):
            wrong[f"weight decay {now.weight_decay:g} on {held.name}, declared for matrices"] = None
        for name, values in wanted.items():
            known = [value for value in values if value is not None]
            if known and name in found and not any(_is(found[name], value) for value in known):
                wrong[f"{name} {say_value(found[name])}, declared {joined(map(say_value, known))}"] = None
    return list(wrong)


def _is(found: Any, wanted: Any) -> bool:
    numbers = isinstance(found, float) or isinstance(wanted, float)
    return math.isclose(found, wanted, rel_tol=1e-6) if numbers else bool(found == wanted)


def _is_decayed(engine: Any, name: str) -> bool:
    """Whether megatron-core decays this vector: norms of queries and keys, on request."""
    return bool(declared(engine, "apply_wd_to_qk_layernorm")) and ("q_layernorm" in name or "k_layernorm" in name)


def _decays(engine: Any, group: Mapping[str, Any], scheduler: Any) -> list[Any]:
    """The weight decay that a group may have: the scheduler's times the group's factor; without one, the declared one with or without it."""
    factor = float(group.get("wd_mult", 1.0))
    if scheduler is not None:
        return [scheduler.get_wd(group) * factor]
    plain = declared(engine, "weight_decay")
    return [] if plain is None else [plain, plain * factor]


def replay_findings(ranks: Sequence[Replayed], *, norm: float | None, clip: float | None, whole: bool) -> list[Finding]:
    """What the optimizer's step made, its settings over ranks, and the norm and clipping of its gradients.

    norm: that the step reported; clip: the declared limit; whole: every rank has every parameter or a shard of it, so that norms add up.
    """
    findings = []
    looked = sum((rank.looked for rank in ranks), Counter())
    if looked:
        cure = "find what changes moments, gradients, rates or weights around the optimizer's step"
        promised = f"{' and '.join(sorted(looked))}, from the declared settings"
        wrong = [[*rank.declared, *rank.between, *rank.wrong] for rank in ranks]
        findings.append(judged("optimizer step", promised, wrong, cure=cure, count=looked.total()))
    if len(ranks) > 1 and looked:
        findings.append(_settings_finding(ranks))
    if whole and norm is not None and clip is not None and any(rank.squares for rank in ranks):
        findings.append(_norm_finding(ranks, norm, clip))
    return findings


def _settings_finding(ranks: Sequence[Replayed]) -> Finding:
    names: dict[str, dict[Settings, list[str]]] = {}
    for number, rank in enumerate(ranks):
        for name, settings in rank.settings.items():
            names.setdefault(name, {}).setdefault(settings, []).append(f"rank {number}")
    wrong = []
    for name, found in names.items():
        sides = [f"{settings} ({', '.join(who)})" for settings, who in found.items()]
        wrong += [f"{name}: {' against '.join(sides)}"] if len(sides) > 1 else []
    return judged("optimizer settings", "equal on every rank", [wrong], count=len(names))


def _norm_finding(ranks: Sequence[Replayed], norm: float, clip: float) -> Finding:
    """The gradients that were read have the reported norm, cut to the declared limit."""
    total = 0.0
    for name in {name for rank in ranks for name in rank.squares}:
        parts = [rank.squares[name] for rank in ranks if name in rank.squares]
        elements = sum(here for _, here, _ in parts)
        # replicas count once, shards add up
        total += sum(square for square, *_ in parts) * (parts[0][2] / elements if elements else 0.0)
    wanted = norm * (min(1.0, clip / (norm + 1.0e-6)) if clip > 0 else 1.0)
    tolerance = _NORM_NARROW if any(rank.narrow for rank in ranks) else _NORM
    good = math.isclose(math.sqrt(total), wanted, rel_tol=tolerance, abs_tol=1e-30)
    wrong = [[] if good else ["reported norm, limit and gradients do not fit"]] * len(ranks)
    cure = "the norm is taken over all gradients, in FP32, and divides them once"
    count = sum(here for rank in ranks for _, here, _ in rank.squares.values())
    seen = f"{math.sqrt(total):.5g}"
    return judged("gradient norm as clipped", f"{wanted:.5g}", wrong, seen=seen, cure=cure, count=count)
