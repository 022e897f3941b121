"""Weights that no update explains: one with elements of another magnitude, or many that changed at once. Each function returns a suspect, or None."""

from __future__ import annotations

import itertools
import math

from mpbridge.observe.diagnose.evidence import finite
from mpbridge.observe.diagnose.suspects import Suspect, Symptoms


def weights(case: Symptoms) -> Suspect | None:
    """Parameters whose values were written by something other than the optimizer."""
    return one_weight(case) or many_weights(case)


def one_weight(case: Symptoms) -> Suspect | None:
    """One parameter, and no other, has elements of another magnitude than before."""
    jumps = [one for one in case.odd if one.number == "amax" and "norm" not in one.tensor]
    if not jumps:
        return None
    step = jumps[0].step
    here = [one for one in jumps if one.step == step]
    gains = [one for one in case.odd if one.number == "amax" and "norm" in one.tensor and one.step < step]
    if len(here) > 2 or gains:
        return None
    odd = max(here, key=lambda one: one.factor)
    rms = dict(case.run.series("weights", odd.tensor, "rms", key="parameter")).get(step, math.nan)
    peak = dict(case.run.series("weights", odd.tensor, "peak", key="parameter")).get(step)
    # a row or a column of a matrix is a channel of its product: many large elements, none of which dominates
    spread = peak is not None and peak < 0.2
    held = (
        f": {peak:.0%} of its sum of squares is in one element"
        if peak is not None
        else ": a few elements dominate it"
        if odd.after > 20 * rms
        else ""
    )
    return Suspect(
        cause="weight-corrupted", step=step, score=0.65 if spread else 0.95,
        sentence=f"elements of {odd.tensor} have another magnitude than before, unlike those of any other parameter",
        evidence=[str(odd), f"its RMS there is {rms:.3g}{held}"],
        tensors=[one.tensor for one in here],
        advice=["a flipped bit in memory or in a file: compare the tensor with the last checkpoint's", "go back to that checkpoint; check the machine's memory errors (ECC)"],
    )  # fmt: skip


def many_weights(case: Symptoms) -> Suspect | None:
    """Several parameters changed at once, where the run goes wrong, by more than the updates between two measurements can move them."""
    steps = [one.step for one in case.onsets]
    changed: dict[int, list[tuple[str, float, float]]] = {}
    for name in case.run.names("weights", "parameter"):
        points = case.run.series("weights", name, "rms", key="parameter")
        for (begin, one), (end, two) in itertools.pairwise(points):
            if any(begin < step <= end + 2 for step in steps) and abs(two - one) > 2 * moved(case, begin, end):
                changed.setdefault(end, []).append((name, one, two))
    step = min((at for at, found in changed.items() if len(found) >= 3), default=None)
    if step is None:
        return None
    here = sorted(changed[step], key=lambda one: -abs(one[2] - one[1]))
    return Suspect(
        cause="weight-corrupted", step=step, score=0.7,
        sentence=f"{len(here)} parameters changed at once by more than their updates can account for",
        evidence=[f"step {step}: {name}: RMS {one:.3g} -> {two:.3g}" for name, one, two in here[:4]],
        tensors=[name for name, _, _ in here[:4]],
        advice=["look at what writes weights besides the optimizer: a reload, an averaged copy, a merge, a script between steps", "compare them with the last checkpoint's, and go back to it"],
    )  # fmt: skip


def moved(case: Symptoms, begin: int, end: int) -> float:
    """How far Adam moves an element between two steps: by about the learning rate in each."""
    rates = [value for step, value in finite(case.run.curves.series("lr")) if begin < step <= end]
    return max(sum(rates), 1e-12) if rates else math.inf
