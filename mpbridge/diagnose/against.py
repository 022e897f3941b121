"""Two runs beside each other: what was set otherwise, and where their numbers part."""

from __future__ import annotations

import math

from mpbridge.diagnose.evidence import Evidence

APART = 0.05
"""Relative difference of two losses that is more than rounding: recipes of one model stay closer for hundreds of steps."""


def differences(run: Evidence, other: Evidence) -> list[str]:
    """Sentences: settings first, then the first steps and tensors that part."""
    found = []
    if run.recipe != other.recipe:
        found.append(f"recipe: {run.recipe}, the other {other.recipe}")
    mine, theirs = dict(run.settings()), dict(other.settings())
    skipped = ("logger.", "checkpoint.")
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name) and not name.startswith(skipped) and name != "mixed_precision":
            found.append(f"{name}: {mine.get(name, 'not set')}, the other {theirs.get(name, 'not set')}")
    if not (mine and theirs):
        found.append("settings cannot be compared: a run that did not end by itself has none in timing.json")
    found += _parting(run, other, "loss", "loss")
    found += _parting(run, other, "grad_norm", "gradient norm", limit=0.5)
    return [*found, *_tensors(run, other)]


def _parting(run: Evidence, other: Evidence, number: str, word: str, *, limit: float = APART) -> list[str]:
    theirs = dict(other.curves.series(number))
    for step, value in run.curves.series(number):
        if step not in theirs:
            continue
        two = theirs[step]
        same = math.isclose(value, two, rel_tol=limit) if math.isfinite(value) and math.isfinite(two) else False
        if not same and not (math.isnan(value) and math.isnan(two)):
            return [
                f"step {step}: {word} {value:.4g}, the other {two:.4g}: the first that differs by more than {limit:.0%}"
            ]
    return [f"{word}: within {limit:.0%} of the other's at every step that both have"]


def _tensors(run: Evidence, other: Evidence) -> list[str]:
    """The first measured step that both have at which a tensor differs by more than a factor of two."""
    theirs = {one.step: one for one in other.measured}
    for one in run.measured:
        if one.step not in theirs:
            continue
        rows = {row["linear"]: row for row in theirs[one.step].tables["linears"]}
        found = []
        for row in one.tables["linears"]:
            two = rows.get(row["linear"], {}).get("x_amax")
            mine = row.get("x_amax")
            if mine and two and not 0.5 <= mine / two <= 2:
                found.append(f"{row['linear']} (amax of its input {mine:.3g}, the other {two:.3g})")
        if found:
            return [
                f"step {one.step}: the first measured one at which tensors differ by more than a factor of two: {'; '.join(found[:4])}"
            ]
    return ["no measured step that both have shows a tensor that differs by more than a factor of two"]
