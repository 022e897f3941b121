"""What Muon trains, and whether its update is its orthogonalized momentum: replayed in each format, of which the nearest tells in what Newton-Schulz ran."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.common.facts import MUONS
from mpbridge.numerics.newton_schulz import newton_schulz
from mpbridge.numerics.observation.tensors import local
from mpbridge.observe.audit.findings import Finding, not_observed
from mpbridge.observe.audit.holdings import Held, holdings
from mpbridge.observe.audit.promise import Promises

LARGEST = 1 << 18
"""Elements of a matrix that is replayed: the SVD of a larger one takes seconds."""
MOST = 2
"""Matrices replayed on each audit."""
FAR = 0.2
"""Relative distance from the nearest replay above which an update is something else. One in the same format differs by the order of its additions; momentum as
it is, or another scale, by 0.3 and more (tests/observe/audit/test_orthogonal.py)."""
ALIKE = 2.0
"""Replays this much farther than the nearest are told apart from it."""
WORDS: Mapping[str, str] = {"medium": "bf16", "high": "tf32", "highest": "fp32"}
"""muon_fp32_matmul_prec -> format."""
NEITHER = "not the orthogonalized momentum"


@dataclass
class Orthogonal:
    """One rank's observation."""

    sets: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Parameter -> (optimizer that is to train it, that does), where they differ."""
    trained: dict[str, int] = field(default_factory=dict)
    """Optimizer -> parameters here."""
    apart: dict[str, dict[str, float]] = field(default_factory=dict)
    """Matrix -> format -> relative distance of its update from a replay in it."""
    largest: int = 0
    """Elements of the smallest matrix if all are too large to replay."""


def matrices_before(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's rows of the matrices that are replayed after the update; the same matrices on every rank."""
    return {name: shard.detach().clone() for name, shard, _ in _chosen(engine)}


def _chosen(engine: Any) -> list[tuple[str, torch.Tensor, Any]]:
    """(name, this rank's rows, Muon) of the smallest matrices."""
    muons = [
        part for part in getattr(engine.optimizer, "parts", ()) if hasattr(part, "whole") and hasattr(part, "factor")
    ]
    sizes = sorted(
        (m.numel(), name, m, part) for part in muons for name, m in part.whole.items() if m.numel() <= LARGEST
    )
    return [(name, local(matrix), part) for _, name, matrix, part in sizes[:MOST]]


def orthogonal(
    engine: Any, promises: Promises, before: Mapping[str, torch.Tensor], rates: Mapping[str, float]
) -> Orthogonal:
    """What this rank sees; a collective, which every rank calls. before: from `matrices_before`. rates: of the step, by parameter."""
    found = Orthogonal()
    named: dict[str, Held] = {held.name: held for held in holdings(engine)}
    for name, held in named.items():
        if held.inner is None or held.group is None:
            continue
        does = "muon" if "Muon" in type(held.inner).__name__ else "adam"
        found.trained[does] = found.trained.get(does, 0) + 1
        wanted = "muon" if promises.trained(name) in MUONS else "adam"
        if does != wanted:
            found.sets[name] = wanted, does
    for name, _, muon in _chosen(engine):
        if name in before:
            apart = _apart(engine, muon, name, before[name], rates.get(name), named[name].group)
            if apart is not None:
                found.apart[name] = apart
    if not found.apart:
        sizes = [
            m.numel() for part in getattr(engine.optimizer, "parts", ()) for m in getattr(part, "whole", {}).values()
        ]
        found.largest = min(sizes, default=0)
    return found


def _apart(
    engine: Any, muon: Any, name: str, old: torch.Tensor, rate: float | None, group: Any
) -> dict[str, float] | None:
    """Format -> relative distance of a matrix's update from its replay; None on a rank without rows or before its gradient."""
    from mpbridge.backend.engines.muon import placed_as

    matrix, shard = muon.whole[name], muon.shards.get(name)
    if matrix.grad is None:
        return None
    config = engine.configs.optimizer
    rows, momentum = torch.zeros_like(old), torch.zeros_like(old)
    if shard is not None and group is not None and rate is not None:
        kept, ahead = muon.state[shard].get("momentum_buffer", torch.zeros_like(old)), config.muon_momentum
        momentum = shard.grad.lerp(kept, ahead) if group["nesterov"] else kept
        rows = ((shard.double() - old.double() * (1 - rate * group["weight_decay"])) / rate).float()
    moved, direction = (placed_as(matrix, one.contiguous()).full_tensor() for one in (rows, momentum))
    if shard is None:
        return None
    pairs = zip(muon.parts(name, moved), muon.parts(name, direction), strict=True)
    found = [distances(change, exact, config) for change, exact in pairs]
    return {kind: max(one[kind] for one in found) for kind in WORDS.values()}


def distances(change: torch.Tensor, direction: torch.Tensor, config: Any) -> dict[str, float]:
    """Format -> relative distance of `change`, an update divided by the learning rate, from the one that the direction gives in that format."""
    rows, columns = direction.shape
    scale = (
        math.sqrt(max(rows, columns)) if config.muon_scale_mode == "spectral" else math.sqrt(max(1.0, rows / columns))
    )
    found = {}
    for kind in WORDS.values():
        replay = (
            -scale * config.muon_extra_scale_factor * newton_schulz(direction, kind, config.muon_num_ns_steps).float()
        )
        found[kind] = float((change - replay).norm() / replay.norm().clamp(min=torch.finfo(torch.float32).tiny))
    return found


def orthogonal_findings(ranks: Sequence[Orthogonal], precision: str) -> list[Finding]:
    """precision: the declared muon_fp32_matmul_prec."""
    wrong = {name: said for rank in ranks for name, said in rank.sets.items()}
    counts = {who: sum(rank.trained.get(who, 0) for rank in ranks) for who in ("muon", "adam")}
    words = f"{counts['muon']} by Muon, {counts['adam']} by Adam"
    cure = "give each parameter to the optimizer that the plan names: hidden matrices to Muon, the rest to Adam"
    findings = [
        Finding(
            subject="trained by", promised=words if not wrong else "hidden matrices by Muon, the rest by Adam", found=words, ok=not wrong,
            count=sum(counts.values()), offenders=tuple(f"{name} ({does}, not {wanted})" for name, (wanted, does) in wrong.items()), cure=cure,
        )
    ]  # fmt: skip
    promised = WORDS.get(precision, precision)
    apart = {name: far for rank in ranks for name, far in rank.apart.items()}
    if not apart:
        least = min((rank.largest for rank in ranks), default=0)
        why = (
            f"no matrix of at most {LARGEST} elements was updated (the smallest has {least})"
            if least
            else "only torch's Muon on torch FSDP2 is replayed"
        )
        return [*findings, not_observed("newton-schulz", promised, why)]
    ran = {name: _formats(far) for name, far in apart.items()}
    bad = [name for name, kinds in ran.items() if promised not in kinds]
    found = " and ".join(
        dict.fromkeys(
            NEITHER if not kinds else promised if promised in kinds else " or ".join(kinds) for kinds in ran.values()
        )
    )
    told = tuple(f"{name} ({', '.join(f'{far:.2g} from {kind}' for kind, far in apart[name].items())})" for name in bad)
    cure = "find what changes the momentum, the iteration or the weights around Muon's step"
    return [
        *findings,
        Finding(
            subject="newton-schulz",
            promised=promised,
            found=found,
            ok=not bad,
            count=len(ran),
            offenders=told,
            cure=cure,
        ),
    ]


def _formats(far: Mapping[str, float]) -> list[str]:
    """The formats that the update may have been computed in; none if it is no orthogonalized momentum."""
    least = min(far.values())
    return [kind for kind, distance in far.items() if distance <= ALIKE * least] if least <= FAR else []
