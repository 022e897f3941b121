"""Compares two runs: settings that differ, and where their numbers diverge."""

from __future__ import annotations

import math
import re

from mpbridge.observe.diagnose.evidence import Evidence

APART = 0.05
"""Relative difference of two losses that is more than rounding: runs of one model with different recipes stay closer for hundreds of steps."""


def differences(run: Evidence, other: Evidence) -> list[str]:
    """Sentences: settings first, then the first steps and tensors that differ."""
    found = []
    if run.recipe != other.recipe:
        found.append(f"recipe: {run.recipe}, the other run {other.recipe}")
    mine, theirs = dict(run.settings()), dict(other.settings())
    skipped = ("logger.", "checkpoint.")
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name) and not name.startswith(skipped) and name != "mixed_precision":
            found.append(f"{name}: {mine.get(name, 'not set')}, the other run {theirs.get(name, 'not set')}")
    if not (mine and theirs):
        found.append("settings cannot be compared: precision.json of one of them has none")
    parts = [
        *_parting(run, other, "lr", "learning rate", limit=0.01),
        *_loss_scales(run, other),
        *_skips(run, other),
        *_parting(run, other, "loss", "loss"),
        *_parting(run, other, "grad_norm", "gradient norm", limit=0.5),
        *_tensors(run, other),
    ]
    return [*found, *sorted(parts, key=_step)]


def _step(sentence: str) -> float:
    """The step that a sentence begins with; sentences without one come last."""
    found = re.match(r"step (\d+):", sentence)
    return int(found[1]) if found else math.inf


def _parting(run: Evidence, other: Evidence, number: str, word: str, *, limit: float = APART) -> list[str]:
    mine, theirs = dict(run.curves.series(number)), dict(other.curves.series(number))
    both = [step for step in mine if step in theirs]
    if not both:
        where = "this run" if mine else "the other run" if theirs else ""
        if not where:
            return []
        return [f"{word}: no step at which both runs have it" if mine and theirs else f"{word}: only {where} has it"]
    for step in both:
        value, two = mine[step], theirs[step]
        same = math.isclose(value, two, rel_tol=limit) if math.isfinite(value) and math.isfinite(two) else value == two
        if not same and not (math.isnan(value) and math.isnan(two)):
            return [f"step {step}: {word} {value:.4g}, the other run {two:.4g}: the first difference above {limit:.0%}"]
    return [f"{word}: within {limit:.0%} of the other run's at every step that both have"]


def _loss_scales(run: Evidence, other: Evidence) -> list[str]:
    """The first step at which loss scales differ, if either run has one."""
    mine, theirs = dict(run.curves.series("loss_scale")), dict(other.curves.series("loss_scale"))
    both = [step for step in mine if step in theirs]
    if not both or all(mine[step] == theirs[step] == 1.0 for step in both):
        return []
    for step in both:
        if mine[step] != theirs[step]:
            return [f"step {step}: loss scale {mine[step]:g}, the other run {theirs[step]:g}: the first difference"]
    return ["loss scale: equal to the other run's at every step that both have"]


def _skips(run: Evidence, other: Evidence) -> list[str]:
    """Updates that only one of the runs skipped, the first of them and how many; empty if neither skipped any."""
    mine, theirs = _skipped(run), _skipped(other)
    both = {row["iteration"] for row in run.curves.rows} & {row["iteration"] for row in other.curves.rows}
    apart = sorted((mine ^ theirs) & both)
    if not both or (not mine and not theirs):
        return []
    if not apart:
        return [f"skipped updates: the same steps, {len(mine & both)} of the {len(both)} steps that both have"]
    first = apart[0]
    who = (
        "skipped its update, the other run did not" if first in mine else "applied its update, the other run skipped it"
    )
    return [
        f"step {first}: this run {who}; {len(mine & both)} of the {len(both)} steps that both have were skipped, in the other run {len(theirs & both)}"
    ]


def _skipped(run: Evidence) -> set[int]:
    return {row["iteration"] for row in run.curves.rows if row.get("applied") is False}


def _tensors(run: Evidence, other: Evidence) -> list[str]:
    """The first measured step that both have at which a tensor differs by more than a factor of two."""
    without = [which for which, one in (("this run", run), ("the other run", other)) if not one.measured]
    if without:
        verb = "have" if len(without) > 1 else "has"
        return [f"tensors cannot be compared: {' and '.join(without)} {verb} no statistics (logger.precision_every)"]
    theirs = {one.step: one for one in other.measured}
    if not any(one.step in theirs for one in run.measured):
        return ["tensors cannot be compared: no step was measured in both runs (logger.precision_every)"]
    for one in run.measured:
        if one.step not in theirs:
            continue
        rows = {row["linear"]: row for row in theirs[one.step].tables["linears"]}
        found = []
        for row in one.tables["linears"]:
            same = rows.get(row["linear"])
            two, mine = same.get("x_amax") if same is not None else None, row.get("x_amax")
            if mine and two and not 0.5 <= mine / two <= 2:
                found.append(f"{row['linear']} (amax of its input {mine:.3g}, in the other run {two:.3g})")
        if found:
            return [
                f"step {one.step}: the first measured step at which tensors differ by more than a factor of two: {'; '.join(found[:4])}"
            ]
    return ["tensors agree within a factor of two at every measured step that both have"]
