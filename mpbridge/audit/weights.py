"""Checks that updates reach the forward pass: main weights moved, parameters equal them bit for bit, every trainable tensor is in the optimizer."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.audit.at_rest import is_quantized, is_rounded
from mpbridge.audit.findings import Finding
from mpbridge.audit.holdings import ADAMS, Held, holdings
from mpbridge.audit.ranks import offenders
from mpbridge.audit.stored import local
from mpbridge.audit.updates import is_another
from mpbridge.audit.values import digest, is_narrow, positions
from mpbridge.audit.watch import Watch

EXPERTS = "*.experts.*"
_SAFETY = 1.25
"""An element must move if its update exceeds half a unit in the last place by this factor."""


class Before:
    """What an update is compared with: a digest of everything that it changes, and a sample of its values."""

    def __init__(self, engine: Any, since: Before | None = None) -> None:
        """since: the same before the last observed update, if every update from then on still holds."""
        self.digests: dict[str, int] = {}
        self.samples: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}
        """Parameter -> sample of its FP32 second moment."""
        self.after: dict[str, torch.Tensor] = {}
        """Parameter that the observed update moved -> the same sample after it."""
        self.moments_after: dict[str, torch.Tensor] = {}
        self.since = since
        for held in holdings(engine):
            trained = held.trained
            if trained is not None:
                self.digests[held.name] = digest(trained)
                self.samples[held.name] = sampled(trained)
                self.moments |= _second(held)

    def note(self, held: Held, trained: torch.Tensor) -> None:
        """Records what the observed update made of a parameter that it moved."""
        self.after[held.name] = sampled(trained)
        self.moments_after |= _second(held)

    def is_put_back(self, name: str) -> bool:
        """Whether the sampled values that the last observed update changed are what they were before it. Several must be: one may come back by itself."""
        last = self.since
        if last is None or name not in last.after or name not in last.samples:
            return False
        changed = last.after[name] != last.samples[name]
        return int(changed.sum()) >= 4 and torch.equal(self.samples[name], last.samples[name])

    def is_emptied(self, name: str) -> bool:
        """Whether the second moment that the last observed update left has become zero."""
        last = self.since
        if last is None or name not in last.moments_after:
            return False
        now = self.moments.get(name)
        return int((last.moments_after[name] != 0).sum()) >= 4 and (now is None or not bool(now.any()))


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a flat tensor at `values.positions`."""
    return tensor[positions(tensor.numel()).to(tensor.device)].clone()


def _second(held: Held) -> dict[str, torch.Tensor]:
    stored = held.state.get("exp_avg_sq")
    if stored is None or stored.dtype is not torch.float32:
        return {}  # narrow moments may underflow
    flat = local(stored).detach().reshape(-1)
    return {held.name: sampled(flat)}


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
    frozen_rate: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Parameters of a foreign model whose module did not run and that have no gradient."""
    compared: int = 0
    unequal: list[str] = field(default_factory=list)
    """The parameter is not its main weight, rounded."""
    coarse: list[str] = field(default_factory=list)
    """FP32 main weights or moments whose values all have 10 or fewer mantissa bits."""
    emptied: list[str] = field(default_factory=list)
    """Moments that the loop zeroed or dropped after the update: the next one begins without them."""
    quantized: int = 0
    """Number of weights stored in a quantized format that were compared with their main weights."""
    misread: list[str] = field(default_factory=list)
    """Quantized weights that are not their main weight, rounded."""


def standing(engine: Any) -> Weights:
    """What can be checked without an update: which parameters are in the optimizer, and which equal their main weights."""
    seen = Weights()
    for held in holdings(engine):
        _membership(seen, held)
        _equality(seen, held)
    return seen


def _membership(seen: Weights, held: Held) -> None:
    trainable = bool(held.parameter.requires_grad)
    if trainable:
        seen.trainable.append(held.name)
    if held.updated is not None and held.group is not None and not trainable and not _proxied(held):
        seen.flipped.append(held.name)
    if trainable and held.updated is not None and held.group is None:
        seen.outside.append(held.name)
    if held.owners > 1:
        seen.twice.append(held.name)


def _proxied(held: Held) -> bool:
    """Whether the model's parameter never requires gradients itself: Megatron-FSDP trains a parameter of its own instead."""
    return held.parameter.grad_fn is not None


def _equality(seen: Weights, held: Held) -> None:
    if held.updated is None:
        return
    main = held.main
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
    seen = Weights()
    read = None if watch is None else watch.read
    zeros = () if watch is None else _zeros(watch)
    whole = {held.name: held for held in holdings(engine)}
    for name, held in whole.items():
        _membership(seen, held)
        _equality(seen, held)
        if not held.parameter.requires_grad or name in seen.outside:
            continue
        trained = held.trained
        if trained is None:
            seen.elsewhere.append(name)
            continue
        foreign = bool(getattr(engine, "foreign", False))
        if foreign and read is not None and name not in read and _gradient(held) is None:
            seen.unused.append(name)  # a head that a foreign loop does not use
            continue
        rests = held.rests or (foreign and (held.group or {}).get("lr", lr) == 0)
        due = _motion(seen, held, trained, before.digests.get(name), lr, rests=rests, zeros=zeros)
        if name in seen.moved:
            if is_another(held, trained, before.samples.get(name), None if foreign else lr):
                seen.otherwise.append(name)
            before.note(held, trained)
        if before.is_put_back(name):
            seen.undone.append(name)
        if before.is_emptied(name):
            seen.emptied.append(f"{name} (exp_avg_sq)")
        _width(seen, held, due and name in seen.moved)
    return seen


def _zeros(watch: Watch) -> set[str]:
    """Parameters that backward gave a gradient of nothing but zeros, as far as it was sampled."""
    given = watch.arrivals.gradients | {f"{path}.weight": found for path, found in watch.products.gradients.items()}
    return {name for name, found in given.items() if found and not any(found.values())}


def _motion(
    seen: Weights,
    held: Held,
    trained: torch.Tensor,
    earlier: int | None,
    lr: float,
    *,
    rests: bool,
    zeros: Collection[str],
) -> bool:
    """Records whether the parameter moved, and whether an update larger than rounding was due. rests: a foreign loop gives its group a rate of 0 in this
    step, or skips its optimizer. zeros: parameters whose gradient is zero."""
    name = held.name
    size, known = _update(held, trained, lr)
    without = known and not bool(size.any())
    due = bool((size > _SAFETY * _half_ulp(trained, held)).any())
    if without and fnmatch.fnmatchcase(name, EXPERTS):
        seen.idle.append(name)  # weight decay may have moved it
    elif earlier is None or digest(trained) != earlier:
        seen.moved.append(name)
    elif rests:
        seen.small.append(name)
    elif held.group is not None and lr > 0 and not held.group.get("lr", lr) and held.group.get("lr_mult", 1.0):
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


def _half_ulp(values: torch.Tensor, held: Held) -> torch.Tensor:
    """Half a unit in the last place of each element, in the dtype of the trained weights."""
    stored = held.state.get("master_param")
    kept = local(held.updated).dtype if stored is None or stored.dtype in (torch.int16, torch.uint8) else stored.dtype
    if stored is not None and stored.dtype is torch.int16:
        kept = torch.float32
    wide = values.float()
    if not kept.is_floating_point:
        kept = torch.bfloat16
    info = torch.finfo(kept)
    _, exponent = torch.frexp(wide)
    return torch.ldexp(torch.full_like(wide, info.eps / 4), exponent).clamp_min(info.tiny * info.eps / 2)


def _update(held: Held, trained: torch.Tensor, lr: float) -> tuple[torch.Tensor, bool]:
    """(magnitude of each element's update, whether a zero there means that no gradient arrived)."""
    rate = float((held.group or {}).get("lr", lr) or lr)
    gradient = _gradient(held)
    if type(held.inner).__name__ in ADAMS:
        first, second = held.moment("exp_avg"), held.moment("exp_avg_sq")
        if first is not None and second is not None and first.numel() == trained.numel():
            return _adam(held, first, second, rate), True
        if gradient is not None:
            # the first update depends only on the gradient's sign
            return torch.where(gradient != 0, rate, 0.0).to(torch.float32), True
        return torch.full_like(trained, rate, dtype=torch.float32), False
    if gradient is None:
        return torch.zeros_like(trained, dtype=torch.float32), False
    return gradient.float().abs() * rate, type(held.inner).__name__ == "SGD"


def _gradient(held: Held) -> torch.Tensor | None:
    if held.grad is not None:
        return held.grad.detach().reshape(-1)
    for attribute in ("decoupled_grad", "grad"):
        grad = getattr(held.updated, attribute, None)
        if grad is not None:
            own = local(grad).detach()
            return (own.to_dense() if own.is_sparse else own).reshape(-1)  # type: ignore[no-any-return]
    whole = getattr(held.parameter, "main_grad", None)
    if whole is None or held.part is None:
        return None
    flat = local(whole).detach().reshape(-1)
    mine: torch.Tensor = flat[held.begin : held.begin + held.part.numel()]
    return mine if mine.numel() == held.part.numel() else None


def _adam(held: Held, first: torch.Tensor, second: torch.Tensor, rate: float) -> torch.Tensor:
    group = held.group or held.inner.param_groups[0]
    beta1, beta2 = group["betas"]
    step = float(held.state.get("step", group.get("step", 1)) or 1)
    low, high = (1 - beta1**step, 1 - beta2**step) if group.get("bias_correction", True) else (1.0, 1.0)
    size: torch.Tensor = (first / low).abs() / ((second / high).sqrt() + group["eps"]) * rate
    return size


def _width(seen: Weights, held: Held, has_moved: bool) -> None:
    """FP32 states whose values all have 10 or fewer mantissa bits: they were rounded although their dtype is FP32."""
    main = held.main
    if has_moved and main is not None and held.part is not None and held.part.dtype is torch.bfloat16:
        stored = held.state.get("master_param")
        wide = (
            local(held.updated).dtype is torch.float32
            if stored is None
            else stored.dtype in (torch.float32, torch.int16)
        )
        if wide and is_narrow(main):
            seen.coarse.append(f"{held.name} (main weights)")
    betas = (held.group or {}).get("betas", ())
    for role, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=False):
        stored = held.state.get(role)
        # (1 - beta) x gradient has bits beyond BF16, unless 1 - beta is a power of two
        if stored is None or local(stored).dtype is not torch.float32 or not _uneven(1.0 - beta):
            continue
        if is_narrow(local(stored)):
            seen.coarse.append(f"{held.name} ({role})")


def _uneven(number: float) -> bool:
    """Whether FP32 `number` has bits that BF16 lacks."""
    return bool(int(torch.tensor([number], dtype=torch.float32).view(torch.int32)) & 0xFFFF)


def weight_findings(ranks: Sequence[Weights], *, stepped: bool) -> list[Finding]:
    """Membership and equality; with `stepped`, motion and width too."""
    owned = sum(len(rank.trainable) for rank in ranks)
    wrong = [
        [f"{n}: requires_grad was switched off" for n in r.flipped]
        + [f"{n}: in no group" for n in r.outside]
        + [f"{n}: in several optimizers" for n in r.twice]
        for r in ranks
    ]
    findings = [
        Finding(
            subject="optimizer holds",
            promised="every trainable parameter",
            found="not each once" if any(wrong) else "every trainable parameter",
            ok=not any(wrong),
            count=owned,
            offenders=offenders(wrong),
            cure="put each into one group of one optimizer; it would never be updated, or twice a step"
            if any(wrong)
            else "",
        )
    ]
    compared, quantized = sum(rank.compared for rank in ranks), sum(rank.quantized for rank in ranks)
    if compared:
        bad = [rank.unequal for rank in ranks]
        findings.append(
            Finding(
                subject="weights as read",
                promised="main weights, rounded",
                found="different" if any(bad) else "main weights, rounded",
                ok=not any(bad),
                count=compared,
                offenders=offenders(bad),
                cure="main weights do not reach what the forward pass reads" if any(bad) else "",
            )
        )
    if quantized:
        bad = [rank.misread for rank in ranks]
        findings.append(
            Finding(
                subject="quantized weights as read",
                promised="main weights, quantized",
                found="different" if any(bad) else "main weights, quantized",
                ok=not any(bad),
                count=quantized,
                offenders=offenders(bad),
                cure="main weights do not reach what the forward pass reads" if any(bad) else "",
            )
        )
    return findings + (_motion_findings(ranks) if stepped else [])


def _motion_findings(ranks: Sequence[Weights]) -> list[Finding]:
    return [_moved_finding(ranks), _bits_finding(ranks)]


def _moved_finding(ranks: Sequence[Weights]) -> Finding:
    names = {name for rank in ranks for name in rank.trainable}
    moved_anywhere = {name for rank in ranks for name in rank.moved}
    stuck = [
        [
            *rank.stuck,
            *rank.frozen_rate,
            *(f"{name}: update does not follow from its moments" for name in rank.otherwise),
            *(f"{name}: restored after the update" for name in rank.undone),
        ]
        for rank in ranks
    ]
    unreached = _unreached(ranks, moved_anywhere)
    # parameters that no optimizer claims to own
    orphans = names - _names(
        [*r.moved, *r.stuck, *r.small, *r.idle, *r.unreached, *r.outside, *r.frozen_rate, *r.unused, *r.undone, *r.zero]
        for r in ranks
    )
    wrong = [[*a, *b, *sorted(orphans)] for a, b in zip(stuck, unreached, strict=True)]
    cure = "no gradient arrived" if any(unreached) else ""
    if any(stuck) or orphans:
        cure = "the optimizer's gradients or parameters are not the model's"
    return Finding(
        subject="weights moved",
        promised="all that have gradients",
        found=_how_many(ranks, names, moved_anywhere),
        ok=not any(wrong),
        count=len(names),
        offenders=offenders(wrong),
        cure=cure,
    )


def _names(rows: Iterable[Iterable[str]]) -> set[str]:
    return {name for row in rows for name in row}


def _unreached(ranks: Sequence[Weights], moved_anywhere: set[str]) -> list[list[str]]:
    # a shard whose rows no token touched proves nothing: its parameter was reached on another rank
    reached = moved_anywhere | _names(rank.small for rank in ranks)
    return [[name for name in rank.unreached if name not in reached] for rank in ranks]


def _how_many(ranks: Sequence[Weights], names: set[str], moved_anywhere: set[str]) -> str:
    lost = _names(rank.small for rank in ranks) - moved_anywhere
    idle = _names(rank.idle for rank in ranks) - moved_anywhere
    notes = [f"{len(moved_anywhere & names)} of {len(names)}"]
    notes += [f"{len(idle)} in experts without tokens"] if idle else []
    unused = _names(rank.unused for rank in ranks) - moved_anywhere
    notes += [f"{len(unused)} in modules that did not run"] if unused else []
    zero = _names(rank.zero for rank in ranks) - moved_anywhere
    notes += [f"{len(zero)} with gradients of zero"] if zero else []
    notes += [f"{len(lost)} below rounding at this learning rate"] if lost else []
    return ", ".join(notes)


def _bits_finding(ranks: Sequence[Weights]) -> Finding:
    wrong = [rank.coarse + [f"{name}, emptied after the update" for name in rank.emptied] for rank in ranks]
    narrow, emptied = any(rank.coarse for rank in ranks), any(rank.emptied for rank in ranks)
    found = (
        "values with 10 or fewer mantissa bits in FP32"
        if narrow
        else "nothing"
        if emptied
        else "as wide as their dtype"
    )
    cure = (
        "find what rounds them between updates"
        if narrow
        else "find what resets them: every update starts from empty moments"
    )
    return Finding(
        subject="bits of states",
        promised="as wide as their dtype",
        found=found,
        ok=not any(wrong),
        count=sum(len(rank.moved) for rank in ranks),
        offenders=offenders(wrong),
        cure=cure if any(wrong) else "",
    )
