"""From scores to damage: each unit's part of the gradient's squared error, from joint measurements."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import GEMMS, Gemm, Gemms, Quant, Region
from mpbridge.training.tune.decision_units import DecisionUnit
from mpbridge.training.tune.proof import prove
from mpbridge.training.tune.scores import Scores
from mpbridge.training.tune.subject import Subject

Joint = Mapping[str, Mapping[Gemm, float]]
"""Level -> GEMM -> (||g_q - g|| / ||g||)^2 with that GEMM of every linear at the level and the two others in high precision."""


def joint(
    subject: Subject,
    policy: PrecisionPolicy,
    levels: Mapping[str, Quant],
    refused: Mapping[tuple[str, str], str],
    batches: int,
) -> Joint:
    """The joint damage of each kind of GEMM at each level, from the first scoring batches. A linear that cannot take a level stays in high precision."""
    arms: dict[str, PrecisionPolicy] = {}
    for name, quant in levels.items():
        spared = tuple(Region(modules=slot) for slot, level in refused if level == name)
        for gemm in GEMMS:
            rules = Gemms(**{other: quant if other == gemm else None for other in GEMMS})
            kept = tuple(dataclasses.replace(region, quant=None, gemms=None) for region in policy.regions[:-1])
            arms[f"{name} {gemm}"] = dataclasses.replace(
                policy, regions=(*kept, *spared, Region(quant=quant, gemms=rules))
            )
    found = prove(subject, arms, batches, split="train")
    return {
        name: {gemm: statistics.fmean(e * e for e in found[f"{name} {gemm}"].errors) for gemm in GEMMS}
        for name in levels
    }


def damages(
    units: Sequence[DecisionUnit], levels: Mapping[str, Quant], scores: Scores, whole: Joint
) -> list[dict[str, float]]:
    """For each unit: level -> its part of the squared relative gradient error; levels that its shapes cannot take are omitted.

    The joint damage of each kind of GEMM is divided among the linears by their scores: the damage of one linear is about proportional to its score, and
    damage adds up over linears because their rounding errors are independent.
    """
    totals = {
        (name, gemm): math.fsum(sums.score[gemm] for (_, level), sums in scores.items() if level == name)
        for name in levels
        for gemm in GEMMS
    }
    found = []
    for unit in units:
        mine: dict[str, float] = {}
        for name in levels:
            parts = [scores.get((slot, name)) for slot in unit.slots]
            # an expert that got no token in any batch has no score and no observed damage
            if all(part is None for part in parts):
                continue
            mine[name] = math.fsum(
                whole[name][gemm] * part.score[gemm] / totals[name, gemm]
                for part in parts
                if part is not None
                for gemm in GEMMS
                if totals[name, gemm]
            )
        found.append(mine)
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank; nan for fewer than three values or when one side is constant."""
    if len(first) < 3:
        return math.nan
    a, b = _ranks(np.asarray(first)), _ranks(np.asarray(second))
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread else math.nan


def _ranks(values: np.ndarray) -> np.ndarray:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2.0)[where]
