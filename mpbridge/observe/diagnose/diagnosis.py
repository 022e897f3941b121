"""`diagnose(folder)`: the first anomalous step and tensors, what changed before them, and which causes fit, each with its evidence.

A suspect's score is the strength of its evidence: 1 for direct observation (a scale that does not follow its amax), about a half for evidence that is only consistent.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common.errors import cut
from mpbridge.common.formats import dtype
from mpbridge.observe.diagnose import curve_causes as curves
from mpbridge.observe.diagnose import tensor_causes as tensors
from mpbridge.observe.diagnose.evidence import Evidence, differences, gather, median
from mpbridge.observe.diagnose.signals import Odd, Onset, Suspect, Symptoms, odd_tensors, onsets, rate_jumps, rates
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
    known = [row["lr"] for row in case.run.curves.rows if row["iteration"] <= max(step, 1) and row.get("lr")]
    lr, sigma = float(known[-1] if known else 0.0), _sigma(case, step)
    if lr and sigma:
        of = dtype(kind)
        beta1 = float(dict(case.run.settings()).get("optimizer.adam_beta1") or 0.9)
        larger = ratio_of(beta1, step) / ratio_of(beta1)  # the first updates average few gradients
        predicted, kept = (call(lr * larger, sigma, of, beta1=beta1) for call in (lost_updates, movement_kept))
        where = f"at lr {lr:.2g}, weights of {sigma:.2g} and gradients of pure noise (mpbridge certify)"
        evidence.append(f"predicted {where}: {predicted:.0%} lost, {kept:.0%} of the movement kept")
        half = rate_for(0.5, sigma, of, beta1=beta1)
        advice.append(f"half of the updates are lost at lr {half:.2g}; a higher lr or min_lr loses fewer")
    return Suspect(
        cause="lost-updates", step=step, score=0.6,
        sentence=f"{share:.0%} of the updates of {kind} weights are below rounding: weights that need small updates stop moving",
        evidence=evidence, advice=advice,
    )  # fmt: skip


def _sigma(case: Symptoms, step: int) -> float | None:
    """RMS of the median weight matrix at the measurement nearest to the step."""
    if not case.run.measured:
        return None
    nearest = min(case.run.measured, key=lambda one: abs(one.step - step))
    matrices = (row for row in nearest.tables["weights"] if not re.search("norm|bias", row["parameter"]))
    sizes = [row["rms"] for row in matrices if math.isfinite(row["rms"] or math.nan)]
    return median(sizes) if sizes else None


CAUSES: Mapping[str, Callable[[Symptoms], Suspect | None]] = {
    "bad-resume": curves.resumed_badly,
    "recipe-switch": curves.recipe_changed,
    "nan-source": curves.not_finite,
    "loss-scale": curves.scale_of_the_loss,
    "no-update": curves.no_update,
    "wrong-scale or frozen-scale": tensors.scales,
    "lost-main-weights": tensors.main_weights,
    "lost-updates": stalled,
    "moments-lost": tensors.moments,
    "weight-corrupted": tensors.weights,
    "outlier-channel": tensors.outlier,
    "data-spike": curves.data,
    "rate-too-high": curves.rate,
    "not-as-promised": curves.other_audits,
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


@dataclass(slots=True, kw_only=True)
class Diagnosis:
    """What a run's files show."""

    run: Evidence
    onsets: list[Onset]
    odd: list[Odd]
    suspects: list[Suspect]
    """Most likely first; empty for a run with nothing out of line."""
    changes: list[str]
    """What changed before the first step out of line, or anywhere if there is none: recipe, resume, rate, loss scale, failed audits."""
    against: list[str] = field(default_factory=list)
    """How the run differs from the other one."""

    def _repr_html_(self) -> str:
        """For notebooks: the suspects with their evidence."""
        from mpbridge.common.tables import table

        rows = [(s.cause, s.step, s.sentence, "; ".join(s.evidence), "; ".join(s.advice)) for s in self.suspects]
        columns = ("cause", "step", "what", "seen", "try")
        return table(self.verdict, columns, rows, tones=["bad"], note="; ".join(self.run.gaps)).html()

    @property
    def healthy(self) -> bool:
        """Whether nothing is out of line."""
        return not self.suspects and not self.onsets

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.suspects:
            first = self.suspects[0]
            return f"{first.cause}: {first.sentence} (from step {first.step})"
        if self.onsets:
            return f"step {self.onsets[0].step}: {self.onsets[0].what}; {self.unexplained}"
        return "nothing is out of line" + (", but there are too few steps to tell" if self.run.short else "")

    @property
    def unexplained(self) -> str:
        """What was checked without finding a cause; a jump in a healthy run is not blamed on anything."""
        if not self.run.measured:
            at = self.onsets[0].step
            if _rising(rates(self.run), at):
                return "nothing in the files explains it, except that the learning rate was still rising there: first try a lower optimizer.lr or a longer warm-up"
            return "nothing in the files explains it"
        case = Symptoms(run=self.run, onsets=self.onsets, odd=self.odd)
        tokens = ", and its tokens are like those before" if case.tokens_counted else ""
        return f"precision shows no cause{tokens}: the optimization itself may do this (a longer warm-up or a lower optimizer.lr makes it rarer)"

    def as_data(self) -> dict[str, Any]:
        """In JSON types."""
        return {
            "run": str(self.run.folder),
            "recipe": self.run.recipe,
            "steps": len(self.run.curves.rows),
            "measured_steps": len(self.run.measured),
            "verdict": self.verdict,
            "onsets": [asdict(one) for one in self.onsets],
            "tensors": [str(one) for one in self.odd[:20]],
            "suspects": [asdict(one) for one in self.suspects],
            "changes": self.changes,
            "against": self.against,
            "cannot_tell": self.run.gaps,
            "can_still_tell": self.run.remaining,
        }


def diagnose(folder: Path, against: Path | None = None) -> Diagnosis:
    """Reads the run in `folder`, and compares it with the healthy run in `against`, if given. Raises BadValue if there is no run to read."""
    run = gather(folder)
    found, odd = onsets(run), odd_tensors(run)
    if run.sampled:
        run, odd = _closer(run, found, odd)
    named = suspects(Symptoms(run=run, onsets=found, odd=odd))
    first = min([one.step for one in found] + [one.step for one in named[:1]], default=None)
    return Diagnosis(
        run=run,
        onsets=found,
        odd=[] if first is None else odd,
        suspects=named,
        changes=_changes(run, first),
        against=differences(run, gather(against)) if against is not None else [],
    )


def _closer(run: Evidence, found: list[Onset], odd: list[Odd]) -> tuple[Evidence, list[Odd]]:
    """If only a sample of the statistics was read, reads them again around what is out of line, until every measurement before the first odd one is included."""
    for _ in range(4):
        steps = sorted({*(one.step for one in odd[:1]), *(one.step for one in found[:2])})
        closer = gather(run.folder, within=[run.around(step) for step in steps])
        same = [one.step for one in closer.measured] == [one.step for one in run.measured]
        run, odd = closer, odd_tensors(closer)
        if same:
            break
    return run, odd


def _changes(run: Evidence, first: int | None) -> list[str]:
    """Sentences in the order of steps, up to the first step out of line."""
    found: list[tuple[int, str]] = [
        (event["iteration"], f"step {event['iteration']}: {str(event.get('text', event['event'])).partition(chr(10))[0]}")
        for event in run.events
    ]  # fmt: skip
    found += [
        (int(audit.get("step", 0)), f"step {audit.get('step', 0)}: audit not as promised: {cut('; '.join(map(str, audit.get('faults', []))), 200)}")
        for audit in run.audits
        if not audit.get("ok", True)
    ]  # fmt: skip
    found += _rates(run, first)
    for before, row in zip(run.curves.rows, run.curves.rows[1:], strict=False):
        one, two = before.get("loss_scale"), row.get("loss_scale")
        if isinstance(one, (int, float)) and isinstance(two, (int, float)) and two > one:
            found.append((row["iteration"], f"step {row['iteration']}: loss scale {one:g} -> {two:g}"))
    return [text for step, text in sorted(found, key=lambda pair: pair[0]) if first is None or step <= first][-8:]


def _rates(run: Evidence, first: int | None) -> list[tuple[int, str]]:
    """Where the learning rate jumps, where its warm-up ends, and whether it is still rising at the first step out of line."""
    points, jumps = rates(run), rate_jumps(run)
    found = [(jump.step, str(jump)) for jump in jumps]
    if not points:
        return found
    peak = max(range(len(points)), key=lambda i: points[i][1])
    step, value = points[peak]
    # a maximum at the last step is no peak: the run ended within its warm-up
    if 0 < peak < len(points) - 1 and step not in {jump.step for jump in jumps}:
        found.append((step, f"step {step}: the learning rate reaches its peak, {value:.3g}"))
    if first is not None and _rising(points, first):
        found.append((first, f"step {first}: the learning rate is still rising, {dict(points).get(first, 0.0):.3g}"))
    return found


def _rising(points: list[tuple[int, float]], at: int) -> bool:
    """Whether a warm-up was in progress: the rate rises up to that step and, if the run continued, after it."""
    around = [value for step, value in points if at - 1 <= step <= at + 1]
    return len(around) > 1 and all(two > one for one, two in itertools.pairwise(around))
