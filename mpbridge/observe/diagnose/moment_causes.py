"""Causes visible in the optimizer's moments: lost at a resume, or during the run. Each function returns a suspect, or None."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from mpbridge.common.facts import ADAMS, least_left
from mpbridge.observe.diagnose.evidence import median
from mpbridge.observe.diagnose.suspects import Suspect, Symptoms
from mpbridge.settings.schema import defaults

FALLEN = 0.7
"""Second moments below this share of what must remain of them were written by something other than the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Second moments that fell faster than beta2 allows between two measurements."""

    before: int
    step: int
    factor: float
    """Ratio of after to before, for the median parameter."""
    least: float
    """The smallest share of a second moment that can remain after the steps in between."""
    fallen: int
    """Number of parameters below that."""
    of: int

    def __str__(self) -> str:
        return (
            f"step {self.step}: second moments of {self.fallen} of {self.of} parameters fell to {self.factor:.2g} times those of step {self.before} "
            f"(median), and {self.step - self.before} steps reduce them to no less than {self.least:.3g} times"
        )


def falls(case: Symptoms) -> list[Fall]:
    """Falls of second moments; excludes steps at which states were dropped on purpose or moved to another layout."""
    beta2 = _beta2(case)
    if beta2 is None:
        return []
    found: dict[tuple[int, int], list[float]] = {}
    for name in case.run.names("weights", "parameter"):
        for (before, one), (step, two) in itertools.pairwise(case.run.series("weights", name, "exp_avg_sq_mean", key="parameter")):  # fmt: skip
            if one > 0 and math.isfinite(one) and math.isfinite(two):
                found.setdefault((before, step), []).append(two / one)
    made = []
    for (before, step), factors in sorted(found.items()):
        least, factor = least_left(beta2, step - before), median(factors)
        if len(factors) >= 3 and factor < FALLEN * least and not _moved_on_purpose(case, before, step):
            fallen = sum(one < FALLEN * least for one in factors)
            made.append(Fall(before=before, step=step, factor=factor, least=least, fallen=fallen, of=len(factors)))
    return made


def _beta2(case: Symptoms) -> float | None:
    """The optimizer's beta2; None if the run's settings are unknown or it has none."""
    settings = dict(case.run.settings())
    if not settings or str(settings.get("optimizer.optimizer", "adam")) not in ADAMS:
        return None
    value = settings.get("optimizer.adam_beta2", defaults("optimizer").get("adam_beta2"))
    return value if isinstance(value, float) and 0 < value < 1 else None


def _moved_on_purpose(case: Symptoms, before: int, step: int) -> bool:
    """Whether states were dropped, restored or resharded between two measurements."""
    # steps after a rollback may have been measured twice
    if any(event["iteration"] <= step for event in case.events("rollback")):
        return True
    between = [event for event in case.run.events if before <= event["iteration"] <= step]
    anew = any(event["event"] == "recipe" or event.get("optimizer_reset") for event in between)
    other_layout = ("parallel: ", "engine: ", "distributed: ")
    return anew or any(
        word in event["text"] for event in between if event["event"] == "resumed" for word in other_layout
    )


def moments(case: Symptoms) -> Suspect | None:
    """Second moments that are suddenly a fraction of what they were, or one update that moves every weight at once although the rate is unchanged."""
    ratios = _ratios(case)
    for step, found in sorted(ratios.items()):
        if len(found) >= 3 and median(found) > 4 and case.near(step - case.every):
            fall = next((str(one) for one in falls(case) if one.step == step), None)
            return Suspect(
                cause="moments-lost", step=step, score=0.93,
                sentence="the optimizer's second moments were lost while the first ones stayed: updates are far too large",
                evidence=[f"step {step}: the ratio of the first moment to the root of the second grew {median(found):.1f}-fold in the median parameter since the previous measurement", *([fall] if fall else [])],
                advice=_ADVICE,
            )  # fmt: skip
    return _fallen(case) or _update_of_all(case, ratios)


_ADVICE = [
    "look at what touches the optimizer's state (a reload, an offload, a cast to a format that flushes small numbers)",
    "go back to the last checkpoint: a warm-up after a reset of moments avoids the same jump",
]


def _fallen(case: Symptoms) -> Suspect | None:
    """Second moments that fell although there was no resume in between; with one, the resume is the cause."""
    resumed = [int(event["iteration"]) for event in case.events("resumed")]
    fall = next((one for one in falls(case) if not any(one.before <= at < one.step for at in resumed)), None)
    if fall is None:
        return None
    return Suspect(
        cause="moments-lost", step=fall.step, score=0.93,
        sentence="the optimizer's second moments fell faster than any gradients allow: its states were lost",
        evidence=[str(fall)], advice=_ADVICE,
    )  # fmt: skip


def _ratios(case: Symptoms) -> dict[int, list[float]]:
    """Step -> growth of (first moment / root of the second) in each parameter since the previous measurement."""
    ratios: dict[int, list[float]] = {}
    for name in case.run.names("weights", "parameter"):
        points = case.run.series("weights", name, "exp_avg_sq_mean", key="parameter")
        firsts = dict(case.run.series("weights", name, "exp_avg_rms", key="parameter"))
        for (before, low), (step, value) in itertools.pairwise(points):
            # the ratio of the moments, not their size: gradients grow and shrink
            if low > 0 and value > 0 and firsts.get(before) and firsts.get(step):
                ratios.setdefault(step, []).append(
                    (firsts[step] / math.sqrt(value)) / (firsts[before] / math.sqrt(low))
                )
    return ratios


def _update_of_all(case: Symptoms, ratios: Mapping[int, list[float]]) -> Suspect | None:
    """Most weights jump between two measurements although rate and clipped gradients are unchanged.

    ratios: step -> growth of (first moment / root of the second) in each parameter; without growth, the optimizer did not cause the move.
    """
    loss, names = case.onset("loss") or case.onset("grad_norm"), case.run.names("weights", "parameter")
    if loss is None:
        return None
    rates = {row["iteration"]: row.get("lr") or 0.0 for row in case.run.curves.rows}
    for step in [one.step for one in case.run.measured][1:]:
        # an update shows in the loss of the next step: weights that grew earlier did no harm
        if not loss.step - 1 <= step <= loss.step + 2:
            continue
        grew = _growth(case, names, step)
        steady = rates.get(step, 0.0) <= 1.05 * rates.get(loss.step - 2, math.inf)
        same = bool(ratios.get(step)) and median(ratios[step]) < 1.2
        if len(grew) >= 4 and median(grew) > 1.5 and steady and loss.step > 1 and not same:
            return Suspect(
                cause="moments-lost", step=step, score=0.75,
                sentence="one update moved every weight far although the rate is unchanged: the optimizer's second moments are wrong",
                evidence=[f"step {step}: RMS of the median weight {median(grew):.2g} times that of the previous measurement", f"step {loss.step}: {loss.what}"],
                advice=["look at what touches the optimizer's state", "go back to the last checkpoint"],
            )  # fmt: skip
    return None


def _growth(case: Symptoms, names: list[str], step: int) -> list[float]:
    """RMS of each weight relative to the previous measurement."""
    found = []
    for name in names:
        points = case.run.series("weights", name, "rms", key="parameter")
        if "norm" not in name:
            found += [two / one for (_, one), (at, two) in itertools.pairwise(points) if at == step and one > 0]
    return found
