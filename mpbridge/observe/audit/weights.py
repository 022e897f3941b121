"""Checks that updates reach the forward pass: main weights moved as their moments say, parameters equal them (rounded, or quantized), every trainable tensor is in the optimizer."""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from mpbridge.numerics.observation.tensors import digest, has_more_bits_than_bf16, is_narrow, local, positions
from mpbridge.observe.audit.holdings import ADAMS, MOMENTS, Held, betas_of, holdings, is_decoupled
from mpbridge.observe.audit.library import is_quantized, is_rounded
from mpbridge.observe.audit.replay import half_ulp
from mpbridge.observe.audit.snapshot import Before
from mpbridge.observe.audit.watch import Watch

_FEW = 8
"""Minimum number of sampled elements whose update is larger than rounding."""
_EXACT, _NARROW = 5e-4, 2e-2
"""Tolerated error relative to all sampled updates, for FP32 moments and for 16-bit moments: optimizers compute with values that they round afterwards.
An update that was rounded to BF16 is off by 1.1e-3."""

_WARMUP = 4.0
"""How far a group's rate may be from the step's rate and from its own rate for the next step: warm-up doubles it at first, and a group may have its own."""


@torch.no_grad()
def is_another(
    held: Held, trained: torch.Tensor, earlier: torch.Tensor | None, rate: float | None, decay: float | None
) -> bool:
    """Whether the sampled elements changed by anything other than one factor times Adam's update and its weight decay; False if that cannot be determined.

    trained: the tensor that the update changed, flat, as it is now. earlier: its elements at `values.positions` before the update. The factor is the rate, which a
    schedule may have changed since. Changes hidden by rounding to the stored dtype are ignored. rate: of the step; None: only the sign of the factor is checked.
    decay: the weight decay before the step, which a schedule may have changed since; None: the group's.
    """
    update = None if earlier is None else _expected(held, trained, earlier, decay)
    if update is None or earlier is None:
        return False
    now = trained[positions(trained.numel()).to(trained.device)]
    changed = now.double() - earlier.double()
    room = half_ulp(earlier.double(), held.kept)
    wide = all(local(held.state[name]).dtype is torch.float32 for name in MOMENTS)
    exact = wide and trained.dtype is torch.float32
    shows = update.abs() * float((held.group or {}).get("lr", 0.0)) > (2048 if exact else 64) * room
    if int(shows.sum()) < _FEW:
        return False
    update, changed, room = update[shows], changed[shows], room[shows]
    factor = float(update @ changed) / float(update @ update)
    error = ((changed - factor * update).abs() - 2 * room).clamp_min(0.0)
    tolerance = _EXACT if exact else _NARROW
    if rate is not None:
        rates = (rate, float((held.group or {}).get("lr", rate)))
        if not min(rates) / _WARMUP <= -factor <= max(rates) * _WARMUP:
            return True
    return factor >= 0.0 or float(error.norm()) > tolerance * abs(factor) * float(update.norm())


def _expected(held: Held, trained: torch.Tensor, earlier: torch.Tensor, decay: float | None) -> torch.Tensor | None:
    """The update divided by the rate; None if the optimizer follows another rule."""
    group = held.group or {}
    if type(held.inner).__name__ not in ADAMS or group.get("amsgrad") or group.get("maximize") or "betas" not in group:
        return None
    first, second = held.moment("exp_avg"), held.moment("exp_avg_sq")
    if first is None or second is None or first.numel() != trained.numel():
        return None
    if any(hasattr(held.state.get(name), "_data") for name in MOMENTS):
        return None  # FP8 moments are too coarse
    where = positions(trained.numel()).to(trained.device)
    update = adam(held, first[where].double(), second[where].double())
    decay = float(group.get("weight_decay") or 0.0) if decay is None else decay
    return update + decay * earlier.double() if is_decoupled(held, group) else update


def adam(held: Held, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Adam's update divided by the rate, without weight decay, in the dtype of its moments."""
    group = held.group or held.inner.param_groups[0]
    beta1, beta2 = group["betas"]
    step = float(held.state.get("step", group.get("step", 1)) or 1)
    low, high = (1 - beta1**step, 1 - beta2**step) if group.get("bias_correction", True) else (1.0, 1.0)
    return first / low / ((second / high).sqrt() + group["eps"])  # type: ignore[no-any-return]


EXPERTS = "*.experts.*"
_SIXTEEN = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_SAFETY = 1.25
"""An element must move if its update exceeds half a unit in the last place by this factor."""


@dataclass
class Weights:
    """One rank's observation, as parameter names."""

    trainable: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    """Updates larger than rounding were due, but nothing changed."""
    otherwise: list[str] = field(default_factory=list)
    """Changed by something other than the update that the moments give."""
    undone: list[str] = field(default_factory=list)
    """Moved by the update, but restored before the step ended."""
    small: list[str] = field(default_factory=list)
    """Unchanged, and no update was larger than rounding."""
    idle: list[str] = field(default_factory=list)
    """Experts that received no tokens."""
    unreached: list[str] = field(default_factory=list)
    """Received no gradient."""
    zero: list[str] = field(default_factory=list)
    """Backward gave a gradient of zeros: a low-rank adapter beside a factor of zeros, a layer before one that begins at zero."""
    elsewhere: list[str] = field(default_factory=list)
    """Owned by another rank's optimizer."""
    flipped: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    """Trainable, but in no group of the optimizer."""
    twice: list[str] = field(default_factory=list)
    """Updated by more than one optimizer."""
    shared: list[str] = field(default_factory=list)
    """Parameters whose memory is another one's too: an update of one is lost, or both get it."""
    frozen_rate: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Parameters of a foreign model whose module did not run and that have no gradient."""
    below: Counter[str] = field(default_factory=Counter)
    """Dtype of 16-bit weights that are updated in place -> elements whose update is below rounding."""
    updated: Counter[str] = field(default_factory=Counter)
    """Dtype of such weights -> elements with an update."""
    compared: int = 0
    unequal: list[str] = field(default_factory=list)
    """The parameter is not its main weight, rounded."""
    coarse: list[str] = field(default_factory=list)
    """FP32 main weights or moments whose values all have 10 or fewer mantissa bits."""
    emptied: list[str] = field(default_factory=list)
    """Moments that the loop zeroed or dropped after the update: the next one begins without them."""
    coded: list[str] = field(default_factory=list)
    """FP32 main weights that no update has changed yet and whose values are those of 8-bit codes."""
    quantized: int = 0
    """Number of weights stored in a quantized format that were compared with their main weights."""
    misread: list[str] = field(default_factory=list)
    """Quantized weights that are not their main weight, rounded."""


def standing(engine: Any) -> Weights:
    """What can be checked without an update: which parameters are in the optimizer, and which equal their main weights."""
    seen = Weights(shared=_sharing(engine))
    for held in holdings(engine):
        _membership(seen, held)
        _equality(seen, held)
        if "exp_avg" not in held.state and held.main is not None and are_codes(local(held.main)):
            seen.coded.append(held.name)
    return seen


_LINE, _LINES, _CODES = 128, 16, 64
"""Neighbours that share a scale in every 8-bit format but the smallest blocks, how many such lines are looked at, and the most magnitudes of one: E4M3 and E5M2 have at
most eight in a binade, BF16 128, so a line drawn from a continuous distribution has about 50 of the former and 100 of the latter."""


@torch.no_grad()
def are_codes(main: torch.Tensor) -> bool:
    """Whether FP32 values have so few magnitudes along each line that they were dequantized from FP8 or FP4; False for constants and small tensors."""
    lines = main.detach().reshape(-1)[: main.numel() // _LINE * _LINE].view(-1, _LINE)
    lines = lines[:: max(1, len(lines) // _LINES)].abs()
    lines = lines[(lines > 0).sum(dim=1) > _LINE * 3 // 4]
    counts = [int(torch.unique(line).numel()) for line in lines]
    return len(counts) >= 4 and all(2 < count <= _CODES for count in counts)


def _sharing(engine: Any) -> list[str]:
    """Parameters that lie, in part, where another one does; a foreign model may tie them like this."""
    if getattr(engine, "foreign", False):
        return []
    here = ((name, local(one.detach())) for name, one in engine.named_parameters())
    plain = ((name, own) for name, own in here if type(own) is torch.Tensor and own.is_contiguous() and own.numel())
    placed = ((name, own) for name, own in plain if own.device.type != "meta" and own.data_ptr())
    places = sorted((own.data_ptr(), own.numel() * own.element_size(), name) for name, own in placed)
    return [f"{b}: in the memory of {a}" for (at, size, a), (then, _, b) in pairwise(places) if then < at + size]


def _membership(seen: Weights, held: Held) -> None:
    trainable = bool(held.parameter.requires_grad)
    if trainable:
        seen.trainable.append(held.name)
    # Megatron-FSDP trains a parameter of its own: the model's, a result of it, never requires gradients itself
    if held.updated is not None and held.group is not None and not trainable and held.parameter.grad_fn is None:
        seen.flipped.append(held.name)
    if trainable and held.updated is not None and held.group is None:
        seen.outside.append(held.name)
    if held.owners > 1:
        seen.twice.append(held.name)


def _equality(seen: Weights, held: Held) -> None:
    main = None if held.updated is None else held.main
    if main is None:
        return
    if held.part is None or not held.part.is_floating_point():
        stored = local(held.parameter.detach())
        if is_quantized(stored):
            seen.quantized += 1
            if not is_rounded(stored, main, held.begin):
                seen.misread.append(held.name)
        return
    seen.compared += 1
    stored = held.state.get("master_param")
    if stored is not None and stored.dtype is torch.int16:
        return  # the upper and the lower half of one number
    if stored is not None and stored.dtype is not torch.float32:
        # the parameter was rounded from the FP32 result; the main weight was stored in fewer bits afterwards
        wide = held.part.float()
        room = 0.01 * wide.abs() + float(wide.abs().amax() if wide.numel() else 0.0) * 2.0**-10
        if bool(((main.float() - wide).abs() > room).any()):
            seen.unequal.append(held.name)
        return
    if main.numel() != held.part.numel() or not torch.equal(main.to(held.part.dtype), held.part):
        seen.unequal.append(held.name)


def moved(engine: Any, before: Before, lr: float, watch: Watch | None = None) -> Weights:
    """`standing`, plus the effect of the update just applied on every parameter. watch: what was observed of the step; None: unknown."""
    seen = Weights(shared=_sharing(engine))
    read = None if watch is None else watch.read
    before.zeros = set() if watch is None else _zeros(watch)
    # a block that starts at zero has a gradient after the first update
    zeros = before.zeros - (before.since.zeros if before.since is not None else set())
    whole = {held.name: held for held in holdings(engine)}
    late = bool(getattr(engine, "gathers_late", False))
    if late:
        seen.compared, seen.quantized = before.compared
    for name, held in whole.items():
        _membership(seen, held)
        if not late:
            _equality(seen, held)
        if not held.parameter.requires_grad or name in seen.outside:
            continue
        trained = held.trained
        if trained is None:
            seen.elsewhere.append(name)
            continue
        foreign = bool(getattr(engine, "foreign", False))
        if foreign and read is not None and name not in read and held.gradient is None:
            seen.unused.append(name)  # a head that a foreign loop does not use
            continue
        due = _motion(seen, held, trained, before, lr, zeros, foreign=foreign)
        if name in seen.moved:
            rate, decay = None if foreign else lr, before.decays.get(name)
            if is_another(held, trained, before.samples.get(name), rate, decay):
                seen.otherwise.append(name)
            before.note(held, trained)
        if before.is_put_back(name):
            seen.undone.append(name)
        if before.is_emptied(name):
            seen.emptied.append(f"{name} (exp_avg_sq)")
        _width(seen, held, due and name in seen.moved)
    seen.coarse += before.coarse
    for found, stale in zip((seen.unequal, seen.misread), before.stale, strict=True):
        found += [f"{name} (before the update)" for name in stale if name not in found]
    return seen


def _zeros(watch: Watch) -> set[str]:
    """Parameters that backward gave a gradient of nothing but zeros, as far as it was sampled."""
    given = watch.arrivals.gradients | {f"{path}.weight": found for path, found in watch.products.gradients.items()}
    return {name for name, found in given.items() if found and not any(found.values())}


def _motion(
    seen: Weights, held: Held, trained: torch.Tensor, before: Before, lr: float, zeros: set[str], *, foreign: bool
) -> bool:
    """Records whether the parameter moved; whether an update larger than rounding was due. lr: of the step. zeros: parameters whose gradient is zero."""
    name, group, earlier = held.name, held.group or {}, before.digests.get(held.name)
    # a foreign loop may give the group a rate of 0 in this step, or skip its optimizer
    rests = held.rests or (foreign and group.get("lr", lr) == 0)
    # 0 before the step, unlike the step's
    still = lr > 0 and before.rates.get(name) == 0 and bool(group.get("lr_mult", 1.0))
    # a schedule may have set the next step's rate already
    rates = {float(group.get("lr") or 0.0), float(before.rates.get(name) or 0.0)} - {0.0}
    size, known = _update(held, trained, min(rates, default=lr))
    without = known and not bool(size.any())
    least = half_ulp(trained.float(), held.kept)
    due = bool((size > _SAFETY * least).any())
    if known and held.kept in _SIXTEEN:
        seen.updated[_SIXTEEN[held.kept]] += int((size > 0).sum())
        seen.below[_SIXTEEN[held.kept]] += int(((size > 0) & (size < least)).sum())
    if without and fnmatch.fnmatchcase(name, EXPERTS):
        seen.idle.append(name)  # weight decay may have moved it
    elif earlier is None or digest(trained) != earlier:
        seen.moved.append(name)
    elif rests:
        seen.small.append(name)
    elif still:
        seen.frozen_rate.append(name)
    elif without and name in zeros:
        seen.zero.append(name)
    elif without:
        seen.unreached.append(name)
    elif due:
        seen.stuck.append(name)
    else:
        seen.small.append(name)
    return due


def _update(held: Held, trained: torch.Tensor, rate: float) -> tuple[torch.Tensor, bool]:
    """(magnitude of each element's update, whether a zero there means that no gradient arrived)."""
    gradient = held.gradient
    if type(held.inner).__name__ in ADAMS:
        first, second = held.moment("exp_avg"), held.moment("exp_avg_sq")
        if first is not None and second is not None and first.numel() == trained.numel():
            return adam(held, first, second).abs() * rate, True
        if gradient is not None:
            # the first update depends only on the gradient's sign
            return torch.where(gradient != 0, rate, 0.0).to(torch.float32), True
        return torch.full_like(trained, rate, dtype=torch.float32), False
    if gradient is None:
        return torch.zeros_like(trained, dtype=torch.float32), False
    return gradient.float().abs() * rate, type(held.inner).__name__ == "SGD"


def _width(seen: Weights, held: Held, has_moved: bool) -> None:
    """FP32 states whose values all have 10 or fewer mantissa bits: they were rounded although their dtype is FP32."""
    main = held.main
    if has_moved and main is not None and held.part is not None and held.part.dtype is torch.bfloat16:
        stored = held.state.get("master_param")
        wide = (local(held.updated) if stored is None else stored).dtype in (torch.float32, torch.int16)
        if wide and is_narrow(main):
            seen.coarse.append(f"{held.name} (main weights)")
    for role, beta in betas_of(held).items():
        stored = held.state.get(role)
        # (1 - beta) x gradient has bits beyond BF16, unless 1 - beta is a power of two
        if stored is None or local(stored).dtype is not torch.float32 or not has_more_bits_than_bf16(1.0 - beta):
            continue
        if is_narrow(local(stored)):
            seen.coarse.append(f"{held.name} ({role})")
