"""Weights that stop moving because their updates are below their dtype's rounding: what a certificate predicts beside what the run shows."""

from __future__ import annotations

import re

from mpbridge.common.formats import dtype
from mpbridge.observe.diagnose.evidence import finite, median
from mpbridge.observe.diagnose.suspects import Suspect, Symptoms
from mpbridge.planning.closed_forms import lost_updates, movement_kept, rate_for, ratio_of

MOST = 0.4
"""Share of lost updates, at the last audit, from which on weights are said to stop moving."""
_FOUND = re.compile(r"(\d+)% of the updates of (bf16|fp16) weights below rounding")


def stalled(case: Symptoms) -> Suspect | None:
    """Most updates of 16-bit weights without main weights are lost, as the audits counted."""
    seen = [
        (int(audit["step"]), int(found[1]) / 100, found[2])
        for audit in case.run.audits
        if (found := _FOUND.search(str(audit["facts"].get("weights moved", ["", ""])[1])))
    ]
    if not seen or seen[-1][1] < MOST:
        return None
    step, share, kind = seen[-1]  # early updates are small while the rate rises
    evidence = [
        f"step {at}: {part:.0%} of the updates of {name} weights below rounding" for at, part, name in seen[-3:]
    ]
    advice = ["main weights in FP32: bf16_mixed, or bf16_mixed_bf16_moments for their memory (store_param_remainders)"]
    lr, sigma = _rate(case, step), _sigma(case, step)
    if lr and sigma:
        of = dtype(kind)
        beta1 = float(dict(case.run.settings()).get("optimizer.adam_beta1") or 0.9)
        larger = ratio_of(beta1, step) / ratio_of(beta1)  # the first updates average few gradients
        predicted, kept = (call(lr * larger, sigma, of, beta1=beta1) for call in (lost_updates, movement_kept))
        evidence.append(
            f"predicted at lr {lr:.2g}, weights of {sigma:.2g} and gradients of pure noise (mpbridge certify): {predicted:.0%} lost, {kept:.0%} of the movement kept"
        )
        advice.append(
            f"half of the updates are lost at lr {rate_for(0.5, sigma, of, beta1=beta1):.2g}; a higher lr or min_lr loses fewer"
        )
    return Suspect(
        cause="lost-updates", step=step, score=0.6,
        sentence=f"{share:.0%} of the updates of {kind} weights are below rounding: weights that need small updates stop moving",
        evidence=evidence, advice=advice,
    )  # fmt: skip


def _rate(case: Symptoms, step: int) -> float | None:
    """The learning rate of the step, or of the last one before it."""
    rates = [row["lr"] for row in case.run.curves.rows if row["iteration"] <= max(step, 1) and row.get("lr")]
    return float(rates[-1]) if rates else None


def _sigma(case: Symptoms, step: int) -> float | None:
    """RMS of the median weight matrix at the measurement nearest to the step."""
    if not case.run.measured:
        return None
    nearest = min(case.run.measured, key=lambda one: abs(one.step - step))
    rows = [
        row for row in nearest.tables["weights"] if "norm" not in row["parameter"] and "bias" not in row["parameter"]
    ]
    sizes = [value for _, value in finite([(nearest.step, row["rms"]) for row in rows if row["rms"]])]
    return median(sizes) if sizes else None
