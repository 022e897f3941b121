"""The causes that are checked for a run, and their order.

A suspect's score is the strength of its evidence: 1 for direct observation (a scale that does not follow its amax), about a half for evidence that is only consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpbridge.observe.diagnose.idle_causes import no_update
from mpbridge.observe.diagnose.moment_causes import moments
from mpbridge.observe.diagnose.run_causes import data, other_audits, recipe_changed, resumed_badly
from mpbridge.observe.diagnose.step_causes import not_finite, rate, scale_of_the_loss
from mpbridge.observe.diagnose.suspects import Suspect, Symptoms
from mpbridge.observe.diagnose.tensor_causes import main_weights, outlier, scales
from mpbridge.observe.diagnose.weight_causes import weights

CAUSES: Mapping[str, Callable[[Symptoms], Suspect | None]] = {
    "bad-resume": resumed_badly,
    "recipe-switch": recipe_changed,
    "nan-source": not_finite,
    "loss-scale": scale_of_the_loss,
    "no-update": no_update,
    "wrong-scale or frozen-scale": scales,
    "lost-main-weights": main_weights,
    "moments-lost": moments,
    "weight-corrupted": weights,
    "outlier-channel": outlier,
    "data-spike": data,
    "rate-too-high": rate,
    "not-as-promised": other_audits,
}
"""The causes that are checked."""


def suspects(case: Symptoms) -> list[Suspect]:
    """All suspects with any evidence: strong ones with earlier evidence first, the others by the strength of their evidence."""
    found = [one for cause in CAUSES.values() if (one := cause(case)) is not None]
    if not found:
        return []
    # a spike in the data that was over at once does not explain what came later
    lasting = [one for one in found if one.cause != "data-spike" and one.score >= 0.9]
    for one in found:
        # unless everything began with exactly those tokens
        at_once = all(one.step <= other.step <= one.step + 2 * case.every for other in lasting)
        if one.cause == "data-spike" and lasting and not (at_once and case.tokens_counted):
            one.score = 0.5
    earliest = min(one.step for one in lasting or found)
    # evidence from the same measurement is simultaneous
    return sorted(found, key=lambda one: -(one.score - 0.02 * max(0, one.step - earliest - case.every)))
