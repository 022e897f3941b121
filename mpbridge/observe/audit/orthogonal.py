"""What Muon trains, and whether its update is its orthogonalized momentum: replayed in each format, of which the nearest tells in what Newton-Schulz ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mpbridge.common.facts import BESIDE_ADAM, MUONS
from mpbridge.numerics.observation.tensors import local
from mpbridge.numerics.optimizers import newton_schulz
from mpbridge.observe.audit.findings import Finding, judged, not_observed
from mpbridge.observe.audit.holdings import Held, holdings
from mpbridge.observe.audit.promise import Promises

LARGEST = 1 << 18
"""Elements of a matrix that is replayed, three times: a larger one would take longer than a step."""
MOST = 2
"""Matrices replayed on each audit: the smallest ones first, then the next ones."""
FAR = 0.1
"""Relative distance from the nearest replay above which an update is something else. Measured on matrices of 64 x 64 to 512 x 512, of full rank and nearly of
rank 1, 8 and 32: in the same format with its additions in another order at most 0.011; with an iteration more or fewer at least 0.28. An update off by a
factor is as far as that factor is from 1."""
BEYOND = 16.0
"""Standard deviations beyond which what an update has of the weights themselves is weight decay: a replay's error may have a quarter of its size in common
with weights of 4,096 elements."""
ALIKE = 2.0
"""Replays this much farther than the nearest are told apart from it."""
WORDS: Mapping[str, str] = {"medium": "bf16", "high": "tf32", "highest": "fp32"}
"""muon_fp32_matmul_prec -> format."""
NEITHER = "not the orthogonalized momentum"


_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}
"""muon_scale_mode -> factor of an orthogonalized matrix (Emerging-Optimizers v0.1.0 muon.py)."""


_WORDS: Mapping[str, str] = {"muon": "Muon", "soap": "SOAP", "lion": "Lion"}


@dataclass
class Orthogonal:
    """One rank's observation."""

    planned: str = "muon"
    """What is to train hidden matrices, a key of _WORDS."""
    promised: str = ""
    """The format that Muon's iteration is to run in."""
    sets: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parameter -> (optimizer that is to train it, that does), where they differ."""
    trained: dict[str, int] = field(default_factory=dict)
    """Optimizer -> parameters here."""
    apart: dict[str, dict[str, float]] = field(default_factory=dict)
    """Matrix -> format -> relative distance of its update from a replay in it."""
    undecayed: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Matrix -> (weight decay of its group, the part of it that its update left out), where that shows."""
    largest: int = 0
    """Elements of the smallest matrix if all are too large to replay."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A matrix that Muon trains and that can be replayed."""

    held: Held
    shape: tuple[int, int]
    """Of the rows that this rank has."""
    whole: Callable[[torch.Tensor], torch.Tensor]
    """From this rank's rows to the matrix that is orthogonalized; a collective if ranks share it."""
    own: bool
    """Whether this rank trains any of them."""


def matrices_before(engine: Any, turn: int) -> dict[str, torch.Tensor]:
    """Copies of this rank's rows of the matrices that are replayed after the update; the same matrices on every rank that shares them. turn: audits so far."""
    if engine.run.facts.optimizer.name not in MUONS:
        return {}
    found = sorted(_hidden(engine), key=lambda one: (one.held.whole, one.held.name))
    found = [one for one in found if one.held.whole <= LARGEST]
    begin = turn * MOST % max(1, len(found))
    return {one.held.name: _rows(one, one.held.trained).clone() for one in (found[begin:] + found[:begin])[:MOST]}


def _rows(one: Hidden, flat: torch.Tensor | None) -> torch.Tensor:
    """This rank's rows, of the given flat values; zeros if there are none."""
    held = one.held.parameter
    empty = flat is None or not one.own
    return torch.zeros(one.shape, device=local(held).device) if empty else flat.detach().float().view(one.shape)  # type: ignore[union-attr]


def _hidden(engine: Any) -> list[Hidden]:
    """Every matrix of this rank's Muon: shares of torch FSDP2's, and megatron-core's, of which tensor-parallel ranks orthogonalize their blocks alone."""
    found = []
    for held in holdings(engine):
        matrix = next((part.whole[held.name] for part in _sharded(engine) if held.name in part.whole), None)
        if matrix is not None:
            shape, own = tuple(local(matrix).shape), held.updated is not None
            found.append(Hidden(held, shape, partial(_gathered, matrix), own))
        elif hasattr(held.inner, "scaled_orthogonalize_fn") and not _is_gathered(held):
            found.append(Hidden(held, tuple(held.parameter.shape), lambda rows: rows, own=True))
    return found


def _gathered(matrix: Any, rows: torch.Tensor) -> torch.Tensor:
    from mpbridge.backend.engines.muon import placed_as

    whole: torch.Tensor = placed_as(matrix, rows).full_tensor()
    return whole


def _sharded(engine: Any) -> list[Any]:
    parts = getattr(engine.optimizer, "parts", ())
    return [part for part in parts if hasattr(part, "whole") and hasattr(part, "factor")]


def _is_gathered(held: Held) -> bool:
    """Whether megatron-core gathers the matrix over tensor-parallel ranks, or sums over them, before it is orthogonalized."""
    # the first since megatron-core 0.18
    mode = getattr(held.inner, "tp_mode", None) or getattr(held.inner, "mode", "blockwise")
    return mode != "blockwise" and getattr(held.updated, "partition_dim", -1) != -1


def trains(inner: Any) -> str:
    """Value of optimizer.optimizer for an optimizer that may train hidden matrices, by its class's name; "adam" for any other."""
    name = type(inner).__name__.lower()
    return next((kind for kind in BESIDE_ADAM if kind in name), "adam")


def orthogonal(engine: Any, promises: Promises, before: Any) -> Orthogonal:
    """What this rank sees; a collective, which every rank calls. before: a snapshot.Before of the update."""
    word = engine.configs.optimizer.muon_fp32_matmul_prec
    found = Orthogonal(promised=WORDS.get(word, str(word)))
    found.planned = found.planned if engine.run.facts.optimizer.name in MUONS else engine.run.facts.optimizer.name
    if found.promised == "tf32" and next(engine.model[0].parameters()).device.type == "cpu":
        found.promised = "fp32"  # torch knows TF32 on GPUs
    for held in holdings(engine):
        if held.inner is None or held.group is None:
            continue
        does, planned = trains(held.inner), promises.trained(held.name)
        found.trained[does] = found.trained.get(does, 0) + 1
        wanted = "muon" if planned in MUONS else planned if planned in BESIDE_ADAM else "adam"
        if does != wanted:
            found.sets[held.name] = wanted, does
    hidden = _hidden(engine)
    for one in hidden:
        if one.held.name in before.whole:
            apart = _apart(engine, one, before, found)
            if apart is not None:
                found.apart[one.held.name] = apart
    if not found.apart:
        found.largest = min((one.held.whole for one in hidden), default=0)
    return found


def _apart(engine: Any, one: Hidden, before: Any, seen: Orthogonal) -> dict[str, float] | None:
    """Format -> relative distance of a matrix's update from its replay; None on a rank without rows or where no gradient was read. What is left of its
    weight decay goes into `seen`."""
    from mpbridge.backend.engines.muon import ShardMuon, parts_of, split_of

    name, config, held = one.held.name, engine.configs.optimizer, one.held
    old, gradient, rate = before.whole[name], held.gradient, before.rates.get(name)
    rows, momentum = torch.zeros_like(old), torch.zeros_like(old)
    known = one.own and gradient is not None and bool(rate)
    if known and rate and gradient is not None:
        kept, read = _rows(one, held.moment("momentum_buffer")), _rows(one, gradient)
        nesterov = getattr(config, "muon_nesterov", None)  # its name since 0.18
        looks = config.muon_use_nesterov if nesterov is None else nesterov
        momentum = read.lerp(kept, config.muon_momentum) if looks else kept
        left = 1 - rate * before.decays.get(name, 0.0)
        rows = ((_rows(one, held.trained).double() - old.double() * left) / rate).float()
    moved, direction, weights = one.whole(rows), one.whole(momentum), one.whole(old)
    if not known:
        return None
    split = split_of(config, engine.run.facts.shape)
    parts = list(zip(*(parts_of(name, matrix, split) for matrix in (moved, direction, weights)), strict=True))
    core = not isinstance(held.inner, ShardMuon)
    made = [replays(exact, config, core=core) for _, exact, _ in parts]
    found = [distances(change, replay) for (change, *_), replay in zip(parts, made, strict=True)]
    decay = before.decays.get(name, 0.0)
    if decay:
        rests = [(change, replay[min(far, key=far.__getitem__)], weight) for (change, _, weight), replay, far in zip(parts, made, found, strict=True)]  # fmt: skip
        share, noise = beside(rests)
        if abs(share) > max(decay / 2, BEYOND * noise):
            seen.undecayed[name] = decay, share
    return {kind: max(apart[kind] for apart in found) for kind in WORDS.values()}


def beside(parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """(what a change has of the weights besides its replay, as a factor of them; one standard deviation of that factor if the two have nothing to do
    with each other) of (change, replay, weights)."""
    along, size, rest, count = 0.0, 0.0, 0.0, 0
    for change, replay, weight in parts:
        extra, made = (change - replay).double(), replay.double()
        # an error in the update's size is no weight decay, and trained weights have much in common with the update
        wide, own = weight.double(), max(float(made.square().sum()), torch.finfo(torch.float32).tiny)
        extra -= made * (float((extra * made).sum()) / own)
        wide = wide - made * (float((wide * made).sum()) / own)
        along += float((extra * wide).sum())
        size += float(wide.square().sum())
        rest += float(extra.square().sum())
        count += wide.numel()
    if not size:
        return 0.0, 0.0
    return along / size, math.sqrt(rest / size / count)


def replays(direction: torch.Tensor, config: Any, *, core: bool = False) -> dict[str, torch.Tensor]:
    """Format -> the update divided by the learning rate that the direction gives in that format.

    core: the iteration is Emerging-Optimizers', as megatron-core calls it; otherwise torch's.
    """
    scale = _SCALES[config.muon_scale_mode](*direction.shape) * config.muon_extra_scale_factor
    coefficients = getattr(config, "muon_coefficient_type", "quintic") if core else "simple"
    found = {}
    for kind in WORDS.values():
        made = newton_schulz(direction, kind, config.muon_num_ns_steps, coefficients=coefficients, wide_norm=core)
        found[kind] = -scale * made.float()
    return found


def distances(change: torch.Tensor, made: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Format -> relative distance of `change`, an update divided by the learning rate, from its replay in that format."""
    found = {}
    for kind, one in made.items():
        usual, size = math.sqrt(min(one.shape)), float(one.norm())
        # a momentum of zero (adapters before their first update, experts without tokens) leaves rounding errors of the weights: beside any other step
        found[kind] = float((change - one).norm()) / (size if size > 1e-3 * usual else usual)
    return found


def orthogonal_findings(ranks: Sequence[Orthogonal]) -> list[Finding]:
    """Who trains what, and in what Newton-Schulz ran."""
    wrong = {name: said for rank in ranks for name, said in rank.sets.items()}
    counts = {who: sum(rank.trained.get(who, 0) for rank in ranks) for who in (*_WORDS, "adam")}
    beside = [f"{counts[who]} by {word}" for who, word in _WORDS.items() if counts[who]]
    words = ", ".join([*beside, f"{counts['adam']} by Adam"])
    special = _WORDS[ranks[0].planned]
    cure = f"give each parameter to the optimizer that the plan names: hidden matrices to {special}, the rest to Adam"
    meant = words if not wrong else f"hidden matrices by {special}, the rest by Adam"
    others = [f"{name} ({does}, not {wanted})" for name, (wanted, does) in wrong.items()]
    who = judged("trained by", meant, [others], seen=words, cure=cure, count=sum(counts.values()))
    if ranks[0].planned == "soap":
        why = "it is not replayed; the dtypes of its states are a row of their own"
        return [who, not_observed("soap step", "from its factors", why)]
    if ranks[0].planned != "muon":
        return [who]
    promised = ranks[0].promised
    apart = {name: far for rank in ranks for name, far in rank.apart.items()}
    if not apart:
        why = "tensor-parallel ranks orthogonalize their matrices together"
        if least := min(rank.largest for rank in ranks):
            why = f"no matrix of at most {LARGEST} elements was updated (the smallest has {least})"
        return [who, not_observed("newton-schulz", promised, why)]
    ran = {name: _formats(far) for name, far in apart.items()}
    bad = [name for name, kinds in ran.items() if promised not in kinds]
    said = (promised if promised in kinds else " or ".join(kinds) or NEITHER for kinds in ran.values())
    found = " and ".join(dict.fromkeys(said))
    left = {name: both for rank in ranks for name, both in rank.undecayed.items() if name not in bad}
    told = [f"{name} ({', '.join(f'{far:.2g} from {kind}' for kind, far in apart[name].items())})" for name in bad]
    told += [f"{name} (weight decay {decay:g}, of which the update left out {share:.3g})" for name, (decay, share) in left.items()]  # fmt: skip
    seen = f"{found}, another weight decay" if left else found
    cure = "find what changes the momentum, the iteration or the weights around Muon's step"
    return [who, judged("newton-schulz", promised, [told], seen=seen, cure=cure, count=len(ran))]


def _formats(far: Mapping[str, float]) -> list[str]:
    """The formats that the update may have been computed in; none if it is no orthogonalized momentum."""
    least = min(far.values())
    return [kind for kind, distance in far.items() if distance <= ALIKE * least] if least <= FAR else []
