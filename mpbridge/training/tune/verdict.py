"""The verdict: whether the proposal beats the best simple rule that costs no more, and what to use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpbridge.training.tune.arms import TUNED
from mpbridge.training.tune.proof import YARDSTICK, GradientError

ERRORS = 2.0
"""Standard errors of the paired difference that separate two choices."""
SAME_COST = 1.005


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningVerdict:
    """The verdict as text, and the arm to use."""

    take: str
    """The arm: 'tuned', or a rule's name."""
    lines: tuple[str, ...]


def judged(proof: Mapping[str, GradientError], spent: Mapping[str, float], same: Mapping[str, bool]) -> TuningVerdict:
    """proof and spent: by arm, the proposal's under TUNED; same: whether an arm's choice is the proposal itself."""
    mine = proof[TUNED]
    take, lines = _beside_rules(proof, spent, same)
    drawn = [name for name in proof if name.startswith("random")]
    if drawn:
        mean = sum(proof[name].error for name in drawn) / len(drawn)
        plural = "s" if len(drawn) > 1 else ""
        lines.append(
            f"{len(drawn)} random choice{plural} at {_costs([spent[name] / spent[TUNED] for name in drawn])}: off by {mean:.3f} on average"
        )
    for name, one in proof.items():
        if name.startswith("all ") and spent[name] > spent[TUNED] * SAME_COST and one.error < mine.error:
            lines.append(f"{name} costs {spent[name] / spent[TUNED]:.2f} times as much and is off by {one.error:.3f}")
    final = proof[take]
    word = "is below" if final.noise <= YARDSTICK else "is above"
    lines.append(
        f"noise per global batch {final.noise:.3f} of the gradient {word} the yardstick {YARDSTICK:.3f} (1/sqrt 3), bias {final.bias:.3f}"
        + (
            ""
            if final.noise <= YARDSTICK
            else f": a global batch {math.ceil((final.noise / YARDSTICK) ** 2)} times as large would bring it below"
        )
    )
    return TuningVerdict(take=take, lines=tuple(lines))


def _beside_rules(
    proof: Mapping[str, GradientError], spent: Mapping[str, float], same: Mapping[str, bool]
) -> tuple[str, list[str]]:
    """(the arm to take, why) from the proposal and the simple rules that cost no more."""
    mine = proof[TUNED]
    rules = {
        name: one
        for name, one in proof.items()
        if not name.startswith("random") and name != TUNED and spent[name] <= spent[TUNED] * SAME_COST
    }
    if not rules:
        return TUNED, []
    best = min(rules, key=lambda name: rules[name].error)
    if same[best]:
        text = f"the choice is {best} itself, the best simple rule at no higher cost: gradient error {mine.error:.3f}"
        return TUNED, [text]
    gap, se = mine.better_than(rules[best])
    figures = f"gradient error {mine.error:.3f} against {rules[best].error:.3f}, {gap:+.3f} +- {se:.3f} on {len(mine.errors)} unseen batches"
    if gap > ERRORS * se:
        return TUNED, [f"better than {best}, the best simple rule at no higher cost: {figures}"]
    return best, [f"no better than {best}: take that ({figures})"]


def _costs(ratios: Sequence[float]) -> str:
    """Costs relative to the proposal's, as text."""
    least, most = min(ratios), max(ratios)
    if least >= 1 / SAME_COST and most <= SAME_COST:
        return "the same cost"
    span = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
    return f"{span} times its cost"
