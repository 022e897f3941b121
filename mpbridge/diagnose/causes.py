"""The causes that a run is searched for: one function each, from a run's evidence to a suspect with what speaks for it, or none.

A suspect's score is how far its evidence goes: 1 for what was seen directly (a scale that does not follow its amax), about a half for what only fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpbridge.diagnose.evidence import Evidence, finite, median
from mpbridge.diagnose.signals import Odd, Onset, operands


@dataclass(slots=True, kw_only=True)
class Suspect:
    """A cause, and what speaks for it."""

    cause: str
    sentence: str
    step: int
    score: float
    evidence: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Case:
    """What all causes are asked about."""

    run: Evidence
    onsets: list[Onset]
    odd: list[Odd]

    @property
    def first(self) -> int | None:
        """The first step out of line in any number of the whole model."""
        return self.onsets[0].step if self.onsets else None

    def onset(self, number: str) -> Onset | None:
        """The first step out of line of one number."""
        return next((one for one in self.onsets if one.number == number), None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of a kind."""
        return [event for event in self.run.events if event["event"] == kind]

    def near(self, step: int) -> bool:
        """Whether something of the whole model goes wrong at that step or within two measurements behind it."""
        return any(step - 2 <= one.step <= step + 2 * self.every for one in self.onsets)

    @property
    def every(self) -> int:
        """Steps between two measurements."""
        steps = [one.step for one in self.run.measured]
        return max(1, min((b - a for a, b in itertools.pairwise(steps)), default=1), 5)


def resumed_badly(case: Case) -> Suspect | None:
    """The first step behind a resume is out of line with the last before it."""
    for event in case.events("resumed"):
        at = int(event["iteration"])
        hit = next((one for one in case.onsets if at < one.step <= at + 3), None)
        if at == 0 or hit is None:
            continue
        lost = event.get("optimizer_reset")
        return Suspect(
            cause="bad-resume", step=hit.step, score=1.0,
            sentence=f"the run that was resumed at step {at} is not the one that was saved",
            evidence=[f"step {at}: {str(event.get('text', 'resumed')).partition(chr(10))[0]}", f"step {hit.step}: {hit.what}", *(["the optimizer's states were dropped (checkpoint.reset_optimizer)"] if lost else [])],
            tensors=[str(one) for one in case.odd if one.step <= hit.step + case.every][:4],
            advice=["mpbridge resume-check on the checkpoint: it compares fingerprints and values", "resume once more from the checkpoint before it", *(["keep the optimizer's states, or warm the rate up again"] if lost else [])],
        )  # fmt: skip
    return None


def recipe_changed(case: Case) -> Suspect | None:
    """A change of recipe right before everything else."""
    for event in case.events("recipe"):
        at = int(event["iteration"])
        flushed = _flushed(case, after=at)
        hit = next((one for one in case.onsets if at < one.step <= at + 10), None)
        if hit is None and not flushed:
            continue
        return Suspect(
            cause="recipe-switch", step=at + 1, score=1.0,
            sentence=f"the run goes wrong with the recipe that it switched to after step {at}: {event.get('after', '')}",
            evidence=[f"step {at}: {event.get('text', '')}", *([f"step {hit.step}: {hit.what}"] if hit else []), *flushed[:3]],
            tensors=flushed[:4],
            advice=["mpbridge rehearse with that recipe and checkpoint.load: its page says which tensors it damages", "keep the modules named above in high precision (mixed_precision.modules), or switch later"],
        )  # fmt: skip
    return None


def _flushed(case: Case, *, after: int = -1) -> list[str]:
    """Operands of which much is lost, as sentences."""
    found = []
    for name, points in operands(case.run):
        for step, row in points:
            lost, clipped = row.get("flushed") or 0.0, row.get("saturated") or 0.0
            wide = row["format"] == "e2m1"
            if step > after and (lost > (0.5 if wide else 0.25) or clipped > (0.3 if wide else 0.02)):
                found.append(f"step {step}: {name}: {lost:.0%} flushed to zero, {clipped:.1%} saturated")
                break
    return found


def not_finite(case: Case) -> Suspect | None:
    """NaN or infinity out of nowhere: the losses before it are ordinary."""
    onset = case.onset("applied")
    if onset is None or any(one.step < onset.step - 1 for one in case.onsets):
        return None
    bad = [one for one in case.odd if math.isinf(one.factor) and one.number in ("x_amax", "amax")]
    inputs = [one.tensor for one in bad if one.number == "x_amax"]
    where = inputs[0] if inputs else bad[0].tensor if bad else ""
    events = [str(event["text"]) for event in case.events("nonfinite")[:2]]
    return Suspect(
        cause="nan-source", step=onset.step, score=0.95 if inputs else 0.8,
        sentence="NaN or infinity appears at once" + (f", first seen in the input of {where}" if inputs else ""),
        evidence=[f"step {onset.step}: {onset.what}; the steps before are ordinary", *events, *(str(one) for one in bad[:3])],
        tensors=[one.tensor for one in bad[:4]],
        advice=[f"look at what computes the input of {where}: the module right before it" if inputs else "train the step again from the last checkpoint with logger.precision_every=1", "the same step on another machine: a NaN that stays away is the hardware's"],
    )  # fmt: skip


def scale_of_the_loss(case: Case) -> Suspect | None:
    """fp16's loss scale: a jump that its rule cannot make, or so many skipped steps that nothing is trained."""
    rows = [row for row in case.run.curves.rows if isinstance(row.get("loss_scale"), (int, float))]
    if not rows or all(row["loss_scale"] == 1.0 for row in rows):
        return None
    evidence, step, first_applied = [], None, None
    streak = 0
    for before, row in zip([None, *rows], rows, strict=False):
        now = row["iteration"]
        if before is not None and row["loss_scale"] > 4 * before["loss_scale"]:
            evidence.append(
                f"step {now}: loss scale {before['loss_scale']:g} -> {row['loss_scale']:g}; its rule doubles it at most"
            )
            step = step or now
        first_applied = first_applied or (now if row.get("applied") else None)
        streak = 0 if row.get("applied") else streak + 1
        if streak == 8 and first_applied:
            evidence.append(f"steps {now - 7} to {now}: every update skipped, loss scale {row['loss_scale']:g}")
            step = step or now - 7
    skipped = sum(not row.get("applied") for row in rows)
    if skipped > 0.5 * len(rows):
        evidence.append(f"{skipped} of {len(rows)} steps skipped")
        step = step or rows[0]["iteration"]
    if step is None:
        return None
    return Suspect(
        cause="loss-scale", step=step, score=1.0,
        sentence="the loss scale is far above what the gradients allow",
        evidence=evidence[:4],
        advice=["a lower mixed_precision.initial_loss_scale, or a shorter loss_scale_window", "bf16_mixed needs no loss scale"],
    )  # fmt: skip


def scales(case: Case) -> Suspect | None:
    """Delayed scales beside the amaxes that they should follow: one that is far off, or all that stand still."""
    wrong: list[tuple[int, str, float]] = []
    still: list[tuple[int, str]] = []
    followed = 0
    for name, points in operands(case.run):
        for (_, before), (step, row) in itertools.pairwise(points):
            stale, earlier = row.get("staleness"), before.get("staleness")
            if not isinstance(stale, float) or not isinstance(earlier, float):
                continue
            # what it was asked for then, it still has not got: its history is not read
            if earlier < -0.3 and row["scale"] == before["scale"]:
                still.append(
                    (step, f"{name}: scale {row['scale']:.4g} stays, though the amax asked for 2**{earlier:.1f} of it")
                )
                break
            followed += row["scale"] != before["scale"]
        for step, row in points[1:]:
            stale = row.get("staleness")
            if isinstance(stale, float) and (stale < -3 or stale > 8):
                wrong.append((step, name, stale))
                break
    audited = [
        str(fault) for audit in case.run.audits for fault in audit.get("faults", []) if "delayed scales" in str(fault)
    ]
    if len(still) >= 2 and len(still) > 2 * len(wrong):
        step = min(at for at, _ in still)
        return Suspect(
            cause="frozen-scale", step=step, score=1.0,
            sentence="delayed scales do not follow their amax histories any more",
            evidence=[*(text for _, text in still[:3]), *audited[:1]], tensors=[text.partition(":")[0] for _, text in still[:4]],
            advice=["the scale update is skipped: look at who calls it (a hook, a resume that restored scales alone, a graph captured with its update outside)", "bf16_with_fp8_current_scaling_mixed keeps no history"],
        )  # fmt: skip
    if not wrong:
        return None
    step = min(at for at, _, _ in wrong)
    named = [(name, stale) for at, name, stale in wrong if at == step]
    # where every amax outruns its history at once, the tensors changed, not the scales
    # and where one is right again at the next measurement
    states = dict(operands(case.run))
    passing = all(_passes(states[name], step) for name, _ in named)
    many = passing or len(wrong) > max(3, 0.25 * sum(1 for _ in operands(case.run)))
    return Suspect(
        cause="wrong-scale", step=step, score=0.6 if many else 0.97,
        sentence=f"the delayed scale of {named[0][0]} is wrong by 2**{named[0][1]:+.1f}",
        evidence=[*(f"step {step}: {name}: 2**{stale:+.1f} off, {'elements saturate' if stale < 0 else 'range is wasted'}" for name, stale in named[:3]), *audited[:1]],
        tensors=[name for name, _ in named[:4]],
        advice=["a scale that was loaded or set by hand: compare it with 448 (E4M3) or 57344 (E5M2) over the amax beside it", "bf16_with_fp8_current_scaling_mixed keeps no scale"],
    )  # fmt: skip


def _passes(points: list[tuple[int, dict[str, Any]]], step: int) -> bool:
    """Whether a scale that was off at that measurement is right again at the next."""
    later = [row.get("staleness") for at, row in points if at > step]
    return bool(later) and isinstance(later[0], float) and -3 <= later[0] <= 8


def main_weights(case: Case) -> Suspect | None:
    """The model's parameters are not what its main weights say."""
    gaps = [
        (one.step, row["parameter"], row["main_gap"])
        for one in case.run.measured
        for row in one.tables["weights"]
        if (row.get("main_gap") or 0.0) > 0.02
    ]
    audited = [
        str(fault)
        for audit in case.run.audits
        for fault in audit.get("faults", [])
        if any(word in str(fault) for word in ("main weights", "weights moved", "refreshed"))
    ]
    if not gaps:
        return None
    step = gaps[0][0]
    here = [(name, gap) for at, name, gap in gaps if at == step]
    return Suspect(
        cause="lost-main-weights", step=step, score=0.98,
        sentence="the model is not what its main weights say: updates do not reach it",
        evidence=[f"step {step}: {len(here)} parameters differ from their main weights, {here[0][0]} in {here[0][1]:.0%} of its elements", *audited[:2]],
        tensors=[name for name, _ in here[:4]],
        advice=["look at what copies main weights back after the update (a wrapper, a patched optimizer, a skipped parameter gather)", "mpbridge audit: 'weights moved' and 'parameters' say the same of the live tensors"],
    )  # fmt: skip


def moments(case: Case) -> Suspect | None:
    """Second moments that are suddenly a fraction of what they were, or one update that moves every weight at once at an unchanged rate."""
    ratios: dict[int, list[float]] = {}
    names = case.run.names("weights", "parameter")
    for name in names:
        points = case.run.series("weights", name, "exp_avg_sq_mean", key="parameter")
        firsts = dict(case.run.series("weights", name, "exp_avg_rms", key="parameter"))
        for (before, low), (step, value) in itertools.pairwise(points):
            # the ratio of the moments, not their size: gradients grow and shrink
            if low > 0 and value > 0 and firsts.get(before) and firsts.get(step):
                ratios.setdefault(step, []).append(
                    (firsts[step] / math.sqrt(value)) / (firsts[before] / math.sqrt(low))
                )
    for step, found in sorted(ratios.items()):
        if len(found) >= 3 and median(found) > 4 and case.near(step - case.every):
            return Suspect(
                cause="moments-lost", step=step, score=0.93,
                sentence="the optimizer's second moments were lost while the first ones stayed: updates far too large",
                evidence=[f"step {step}: first over root of second moment grew {median(found):.1f}-fold in the median parameter since the measurement before"],
                advice=["look at what touches the optimizer's state (a reload, an offload, a cast to a format that flushes small numbers)", "go back to the last checkpoint: a warm-up behind a reset of moments avoids the same jump"],
            )  # fmt: skip
    return _update_of_all(case, names)


def _update_of_all(case: Case, names: list[str]) -> Suspect | None:
    """Most weights jump between two measurements although rate and clipped gradients are what they were."""
    loss = case.onset("loss") or case.onset("grad_norm")
    if loss is None:
        return None
    rates = {row["iteration"]: row.get("lr") or 0.0 for row in case.run.curves.rows}
    for step in [one.step for one in case.run.measured][1:]:
        if not loss.step - 2 * case.every <= step <= loss.step + 2 * case.every:
            continue
        grew = _growth(case, names, step)
        steady = rates.get(step, 0.0) <= 1.05 * rates.get(loss.step - 2, math.inf)
        calm = step <= loss.step + 2 and loss.step > 1
        if len(grew) >= 4 and median(grew) > 1.5 and steady and calm:
            return Suspect(
                cause="moments-lost", step=step, score=0.75,
                sentence="one update moved every weight far at an unchanged rate: the optimizer's second moments are wrong",
                evidence=[f"step {step}: RMS of the median weight {median(grew):.2g} times that of the measurement before", f"step {loss.step}: {loss.what}"],
                advice=["look at what touches the optimizer's state", "go back to the last checkpoint"],
            )  # fmt: skip
    return None


def _growth(case: Case, names: list[str], step: int) -> list[float]:
    """RMS of each weight over that of the measurement before."""
    found = []
    for name in names:
        points = case.run.series("weights", name, "rms", key="parameter")
        if "norm" not in name:
            found += [two / one for (_, one), (at, two) in itertools.pairwise(points) if at == step and one > 0]
    return found


def one_weight(case: Case) -> Suspect | None:
    """One parameter has elements of another size than before, and no other has."""
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
    return Suspect(
        cause="weight-corrupted", step=step, score=0.95,
        sentence=f"elements of {odd.tensor} are of another size than before, and no other parameter's are",
        evidence=[str(odd), f"its RMS there is {rms:.3g}: a few elements hold it" if odd.after > 20 * rms else f"its RMS there is {rms:.3g}"],
        tensors=[one.tensor for one in here],
        advice=["a flipped bit in memory or in a file: compare the tensor with the last checkpoint's", "go back to that checkpoint; check the machine's memory errors (ECC)"],
    )  # fmt: skip


def outlier(case: Case) -> Suspect | None:
    """One channel of a linear's input is far larger than the others, and was not before."""
    channels = [one for one in case.odd if one.number == "x_outlier" and one.after > 30]
    gains = [one for one in case.odd if one.number == "amax" and one.tensor.endswith("norm.weight")]
    if not channels:
        return None
    first = channels[0]
    source = [one for one in gains if one.step <= first.step]
    many = sum(one.step <= first.step and one.number == "amax" and "norm" not in one.tensor for one in case.odd)
    if many > 2:
        return None
    row = next(row for one in case.run.measured if one.step == first.step for row in one.tables["linears"] if row["linear"] == first.tensor)  # fmt: skip
    return Suspect(
        cause="outlier-channel", step=first.step, score=0.96 if source else 0.7,
        sentence=f"channel {row.get('x_channel')} of the input of {first.tensor} is {first.after:.0f} times the median channel",
        evidence=[str(first), *(str(one) for one in source[:2]), *_flushed(case)[:2]],
        tensors=[one.tensor for one in [*source, *channels][:4]],
        advice=["a scaling with blocks (bf16_with_mxfp8_mixed, bf16_with_fp8_subchannel_scaling_mixed) loses only the block of an outlier", "keep that linear in high precision: mixed_precision.modules", *(["look at the norm's gain named above"] if source else [])],
    )  # fmt: skip


def data(case: Case) -> Suspect | None:
    """A loss that jumps and is back at once, while no tensor of the model had changed before it: the batch was other text."""
    onset = case.onset("loss")
    if onset is None:
        return None
    points = [(step, value) for step, value in finite(case.run.curves.series("loss")) if step >= onset.step]
    half = onset.usual + 0.4 * (onset.value - onset.usual)
    high = next((i for i, (_, value) in enumerate(points) if value < half), None)
    if high is None or high > 12:
        return None
    # back in one step, as a batch is; a damaged model comes back slowly
    back = points[high - 1][1] - points[high][1]
    sharp = back > 0.5 * (max(value for _, value in points[:high]) - onset.usual)
    before = [one for one in case.odd if one.step < onset.step]
    if not sharp or before:
        return None
    return Suspect(
        cause="data-spike", step=onset.step, score=0.85,
        sentence=f"the data of steps {onset.step} to {points[high - 1][0]} are unlike those around them",
        evidence=[f"step {onset.step}: {onset.what}", f"step {points[high][0]}: back at {points[high][1]:.3g} in one step", "no tensor was out of line before"],
        advice=[f"look at the samples of those steps (consumed_samples in metrics.jsonl: {_samples(case, onset.step)})", "train.nonfinite='rollback N' skips such data only where the loss is not finite; cleaning the corpus is the cure"],
    )  # fmt: skip


def _samples(case: Case, step: int) -> str:
    at = {row["iteration"]: row.get("consumed_samples") for row in case.run.curves.rows}
    return f"{at.get(step - 1, '?')} to {at.get(step, '?')}"


def rate(case: Case) -> Suspect | None:
    """Updates of the size of the weights: the rate is too high, most often while it still rises."""
    onset = case.onset("loss") or case.onset("grad_norm") or case.onset("applied")
    rates = [(row["iteration"], float(row["lr"])) for row in case.run.curves.rows if row.get("lr")]
    if not rates or not case.run.measured:
        return None
    measured = [one for one in case.run.measured if onset is None or one.step <= onset.step + 2 * case.every]
    if not measured:
        return None
    first = [row["rms"] for row in measured[0].tables["weights"] if "norm" not in row["parameter"] and "weight" in row["parameter"]]  # fmt: skip
    last = [row["rms"] for row in measured[-1].tables["weights"] if "norm" not in row["parameter"] and "weight" in row["parameter"]]  # fmt: skip
    if not first or not last:
        return None
    at = measured[-1].step
    reached = max((value for step, value in rates if step <= at), default=0.0)
    # Adam moves an element by about the rate
    ratio, grew = reached / max(median(first), 1e-12), median(last) / max(median(first), 1e-12)
    if onset is None or (ratio < 1.0 and grew < 3.0):
        return None
    rising = any(b > a for (_, a), (step, b) in itertools.pairwise(rates) if step >= onset.step - 15 and step <= onset.step)  # fmt: skip
    return Suspect(
        cause="rate-too-high", step=min(onset.step, next((step for step, value in rates if value > median(first)), onset.step)), score=1.0 if ratio > 2 else 0.9 if rising else 0.6,
        sentence=f"the learning rate ({reached:.3g}) is too high: one update is {ratio:.1f} times the size of the median weight",
        evidence=[f"step {onset.step}: {onset.what}, at a rate of {dict(rates).get(onset.step, reached):.3g}" + (" that still rises" if rising else ""), f"RMS of the median weight: {median(first):.3g} at step {measured[0].step}, {median(last):.3g} at step {at}"],
        advice=[f"optimizer.lr={reached / max(3.0, 3 * ratio):.1g}, or a longer scheduler.lr_warmup_iters", "optimizer.clip_grad=1.0 where it is off"],
    )  # fmt: skip


def other_audits(case: Case) -> Suspect | None:
    """An audit that found the live tensors other than promised."""
    for audit in case.run.audits:
        if not audit.get("ok", True):
            faults = [str(fault) for fault in audit.get("faults", [])]
            return Suspect(
                cause="not-as-promised", step=int(audit.get("step", 0)), score=0.3,
                sentence="an audit found the live tensors other than the recipe promised",
                evidence=faults[:3], advice=["mpbridge audit on the run's folder: every audit in order, and what changed between them"],
            )  # fmt: skip
    return None


CAUSES: Mapping[str, Callable[[Case], Suspect | None]] = {
    "bad-resume": resumed_badly,
    "recipe-switch": recipe_changed,
    "nan-source": not_finite,
    "loss-scale": scale_of_the_loss,
    "wrong-scale or frozen-scale": scales,
    "lost-main-weights": main_weights,
    "moments-lost": moments,
    "weight-corrupted": one_weight,
    "outlier-channel": outlier,
    "data-spike": data,
    "rate-too-high": rate,
    "not-as-promised": other_audits,
}
"""What is searched for."""


def suspects(case: Case) -> list[Suspect]:
    """All that anything speaks for: those whose evidence is earlier first, where it goes far enough; else by how far it goes."""
    found = [one for cause in CAUSES.values() if (one := cause(case)) is not None]
    if not found:
        return []
    earliest = min(one.step for one in found)
    # evidence from the same measurement is simultaneous
    return sorted(found, key=lambda one: -(one.score - 0.02 * max(0, one.step - earliest - case.every)))
