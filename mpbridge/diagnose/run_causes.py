"""Causes that the course of a run shows: resume, recipe, data, rate, loss scale, NaN, audits. Each answers with a suspect, or None."""

from __future__ import annotations

import itertools
import math

from mpbridge.diagnose.evidence import finite, median
from mpbridge.diagnose.suspects import Case, Suspect, flushed_operands


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
        flushed = flushed_operands(case, after=at)
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


def not_finite(case: Case) -> Suspect | None:
    """NaN or infinity out of nowhere: the losses right before it are ordinary, or the loss never shows it at all."""
    onset = case.onset("applied")
    if onset is not None and any(onset.step - 10 <= one.step < onset.step - 1 for one in case.onsets):
        return None
    bad = [one for one in case.odd if math.isinf(one.factor) and one.number in ("x_amax", "amax")]
    inputs = [one.tensor for one in bad if one.number == "x_amax"]
    seen = _first_nonfinite(case)
    if onset is None and seen is None:
        return None
    where = inputs[0] if inputs else bad[0].tensor if bad else ""
    step = min([one.step for one in (onset,) if one is not None] + [seen[0] for seen in (seen,) if seen is not None])
    shown = (
        [f"step {onset.step}: {onset.what}; the steps before are ordinary"]
        if onset is not None
        else ["the loss does not show it"]
    )
    events = [str(event["text"]) for event in case.events("nonfinite")[:2]]
    rows = [f"step {seen[0]}: elements that are not finite in {', '.join(seen[1][:3])}"] if seen is not None else []
    place = (
        f", first seen in the input of {where}"
        if inputs
        else f", first seen in {seen[1][0]}"
        if seen is not None
        else ""
    )
    return Suspect(
        cause="nan-source", step=step, score=0.95 if inputs or seen is not None else 0.8,
        sentence="NaN or infinity appears at once" + place,
        evidence=[*shown, *events, *(str(one) for one in bad[:3]), *rows],
        tensors=[one.tensor for one in bad[:4]] or (seen[1][:4] if seen is not None else []),
        advice=[f"look at what computes the input of {where}: the module right before it" if inputs else "train the step again from the last checkpoint with logger.precision_every=1", "the same step on another machine: a NaN that stays away is the hardware's"],
    )  # fmt: skip


def _first_nonfinite(case: Case) -> tuple[int, list[str]] | None:
    """The first measured step with elements that are not finite, and where, inputs before gradients; an overflow that a loss scale caught is none."""
    steps = {row["iteration"]: row for row in case.run.curves.rows}
    for one in case.run.measured:
        row = steps.get(one.step, {})
        if row.get("loss_scale", 1.0) != 1.0 and not row.get("applied", True):
            continue
        tables = one.tables
        forward = [f"the input of {row['linear']}" for row in tables["linears"] if row.get("nonfinite") and not math.isfinite(row.get("x_amax") or 0.0)]  # fmt: skip
        weights = [row["parameter"] for row in tables["weights"] if row.get("nonfinite")]
        backward = [f"the gradient that {row['linear']} gets" for row in tables["linears"] if row.get("nonfinite") and math.isfinite(row.get("x_amax") or 0.0)]  # fmt: skip
        operands = [f"{row['linear']} {row['side']}" for row in tables["operands"] if row.get("nonfinite")]
        # backward runs from the end: what is last in the order of the model got its gradient first
        if found := [*forward, *weights, *backward[::-1], *operands]:
            return one.step, list(dict.fromkeys(found))
    return None


def scale_of_the_loss(case: Case) -> Suspect | None:
    """fp16's loss scale: a jump that its rule cannot make, or so many skipped steps that nothing is trained."""
    rows = [row for row in case.run.curves.rows if isinstance(row.get("loss_scale"), (int, float))]
    if not rows or all(row["loss_scale"] == 1.0 for row in rows):
        return None
    evidence, step, first_applied = [], None, None
    sentence = "the loss scale is far above what the gradients allow"
    streak = 0
    for before, row in zip([None, *rows], rows, strict=False):
        now = row["iteration"]
        if before is not None and row["loss_scale"] > 4 * before["loss_scale"]:
            evidence.append(
                f"step {now}: loss scale {before['loss_scale']:g} -> {row['loss_scale']:g}; its rule doubles it at most"
            )
            step = step or now
        if before is not None and row["loss_scale"] < before["loss_scale"] / 4:
            evidence.append(
                f"step {now}: loss scale {before['loss_scale']:g} -> {row['loss_scale']:g}; its rule halves it behind overflows"
            )
            step, sentence = step or now, "the loss scale is far below what the gradients need: they vanish"
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
        sentence=sentence,
        evidence=evidence[:4],
        advice=["a lower mixed_precision.initial_loss_scale, or a shorter loss_scale_window", "bf16_mixed needs no loss scale"],
    )  # fmt: skip


def data(case: Case) -> Suspect | None:
    """Tokens unlike those before at the step where the loss jumps; without a count of tokens, a loss that jumps and is back at once."""
    if not case.tokens_counted:
        return _short_spike(case)
    for onset in (one for one in case.onsets if one.number == "loss"):
        unlike = [event for event in case.events("tokens") if onset.step - 1 <= event["iteration"] <= onset.step]
        if unlike:
            first, last = onset.step, max(event["iteration"] for event in case.events("tokens") if event["iteration"] <= onset.step + 20)  # fmt: skip
            return _spike(
                case, first, last, [f"step {first}: {onset.what}", *(str(event["text"]) for event in unlike[:2])], 0.97
            )
    return None


def _short_spike(case: Case) -> Suspect | None:
    """A loss that jumps and is back at once, while no tensor of the model had changed before it."""
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
    seen = [f"step {onset.step}: {onset.what}", f"step {points[high][0]}: back at {points[high][1]:.3g} in one step", "no tensor was out of line before"]  # fmt: skip
    return _spike(case, onset.step, points[high - 1][0], seen, 0.85)


def _spike(case: Case, first: int, last: int, evidence: list[str], score: float) -> Suspect:
    return Suspect(
        cause="data-spike", step=first, score=score,
        sentence=f"the data of steps {first} to {last} are unlike those around them",
        evidence=evidence,
        advice=[f"look at the samples of those steps (consumed_samples in metrics.jsonl: {_samples(case, first)})", "train.nonfinite='rollback N' skips such data only where the loss is not finite; cleaning the corpus is the cure"],
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
