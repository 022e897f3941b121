"""Causes visible in events and per-step numbers: resume, recipe, data, NaN, loss scale, learning rate, idle steps. Each returns a suspect, or None."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from mpbridge.observe.diagnose.evidence import FEWEST, finite, median
from mpbridge.observe.diagnose.signals import Suspect, Symptoms, flushed_operands, rate_jumps, rates, rises
from mpbridge.observe.diagnose.tensor_causes import falls


def resumed_badly(case: Symptoms) -> Suspect | None:
    """The first step after a resume is out of line with the last one before it, or the optimizer's moments are not the saved ones."""
    for event in case.events("resumed"):
        at = int(event["iteration"])
        hit = case.jump_after(at, within=3)
        fallen = _fallen_since(case, at)
        if at == 0 or (hit is None and not fallen):
            continue
        lost = event.get("optimizer_reset")
        # a changed rate after the resume says more than the resume itself
        rate = next((one for one in rate_jumps(case.run) if one.step == at + 1), None) if hit else None
        step = hit.step if hit else at + 1
        return Suspect(
            cause="bad-resume", step=step, score=0.85 if rate else 1.0,
            sentence=f"the run resumed at step {at} is not the one that was saved" + (": the optimizer's moments were lost" if fallen else ""),
            evidence=[f"step {at}: {str(event.get('text', 'resumed')).partition(chr(10))[0]}", *([f"step {hit.step}: {hit.what}"] if hit else []), *fallen, *([str(rate)] if rate else []), *(["the optimizer's states were dropped (checkpoint.reset_optimizer)"] if lost else [])],
            tensors=[str(one) for one in case.odd if one.step <= step + case.every][:4],
            advice=["mpbridge resume-check on the checkpoint: it compares fingerprints and values", "resume again from the previous checkpoint", *(["keep the optimizer's states, or use another warm-up"] if lost or fallen else [])],
        )  # fmt: skip
    return None


def _fallen_since(case: Symptoms, at: int) -> list[str]:
    """Evidence that the moments after a resume at that step are not the saved ones: from the run itself, or from measurements around it."""
    said = [f"step {event['iteration']}: {event['text']}" for event in case.events("moments") if event["iteration"] == at + 1]  # fmt: skip
    return [*said, *(str(one) for one in falls(case) if one.before <= at < one.step)]


def recipe_changed(case: Symptoms) -> Suspect | None:
    """A change of recipe right before everything else goes wrong."""
    for event in case.events("recipe"):
        at = int(event["iteration"])
        flushed = flushed_operands(case, after=at)
        hit = case.jump_after(at, within=10)
        if hit is None and not flushed:
            continue
        return Suspect(
            cause="recipe-switch", step=at + 1, score=1.0,
            sentence=f"the run goes wrong under the recipe that it switched to after step {at}: {event.get('after', '')}",
            evidence=[f"step {at}: {event.get('text', '')}", *([f"step {hit.step}: {hit.what}"] if hit else []), *flushed[:3]],
            tensors=flushed[:4],
            advice=["mpbridge rehearse with that recipe and checkpoint.load: its page shows which tensors it damages", "keep the modules named above in high precision (mixed_precision.modules), or switch later"],
        )  # fmt: skip
    return None


def data(case: Symptoms) -> Suspect | None:
    """Tokens unlike earlier ones at the step where the loss jumps; without token counts, a loss that jumps and recovers at once."""
    if not case.tokens_counted:
        return _short_spike(case)
    for onset in (one for one in case.onsets if one.number == "loss" and not one.gradual):
        if unlike := case.unlike(onset):
            first, last = onset.step, max(event["iteration"] for event in case.events("tokens") if event["iteration"] <= onset.step + 20)  # fmt: skip
            seen = [f"step {first}: {onset.what}", *(str(event["text"]) for event in unlike[:2])]
            return _spike(case, first, last, seen, 0.97)
    return None


def _short_spike(case: Symptoms) -> Suspect | None:
    """A loss that jumps and recovers at once, without a change in any tensor of the model before it."""
    onset = case.onset("loss")
    if onset is None or onset.gradual or _audit_fails_at(case, onset.step):
        return None
    points = [(step, value) for step, value in finite(case.run.curves.series("loss")) if step >= onset.step]
    half = onset.usual + 0.4 * (onset.value - onset.usual)
    high = next((i for i, (_, value) in enumerate(points) if value < half), None)
    if not high or high > 12:  # 0: recovered before it left, as when a loss rises slowly
        return None
    # a bad batch is over in one step; a damaged model recovers slowly
    back = points[high - 1][1] - points[high][1]
    sharp = back > 0.5 * (max(value for _, value in points[:high]) - onset.usual)
    before = [one for one in case.odd if one.step < onset.step]
    if not sharp or before:
        return None
    seen = [f"step {onset.step}: {onset.what}", f"step {points[high][0]}: back at {points[high][1]:.3g} in one step", "no tensor was out of line before"]  # fmt: skip
    return _spike(case, onset.step, points[high - 1][0], seen, 0.85)


def _audit_fails_at(case: Symptoms, step: int) -> bool:
    """Whether audits that passed before fail at exactly that step."""
    before = [audit for audit in case.run.audits if int(audit.get("step", 0)) < step]
    here = [audit for audit in case.run.audits if step <= int(audit.get("step", 0)) <= step + 1]
    return all(audit.get("ok", True) for audit in before) and not all(audit.get("ok", True) for audit in here)


def _spike(case: Symptoms, first: int, last: int, evidence: list[str], score: float) -> Suspect:
    at = {row["iteration"]: row.get("consumed_samples") for row in case.run.curves.rows}
    return Suspect(
        cause="data-spike", step=first, score=score,
        sentence=f"the data of steps {first} to {last} are unlike those around them",
        evidence=evidence,
        advice=[f"look at the samples of those steps (consumed_samples in metrics.jsonl: {at.get(first - 1, '?')} to {at.get(first, '?')})", "train.nonfinite='rollback N' skips such data only if the loss is not finite; otherwise clean the corpus"],
    )  # fmt: skip


def other_audits(case: Symptoms) -> Suspect | None:
    """An audit that found live tensors not as promised."""
    for audit in case.run.audits:
        if not audit.get("ok", True):
            faults = [str(fault) for fault in audit.get("faults", [])]
            return Suspect(
                cause="not-as-promised", step=int(audit.get("step", 0)), score=0.3,
                sentence="an audit found live tensors not as the recipe promises",
                evidence=faults[:3], advice=["mpbridge audit on the run's folder: every audit in order, and what changed between them"],
            )  # fmt: skip
    return None


MANY_SKIPPED = 8
"""Number of skipped updates, consecutive or in total, that a correctly updated loss scale never causes."""
LOW = 2.0**8
"""The search for the first loss scale ends well above this: gradients that still overflow here are not finite, or far too large."""


def not_finite(case: Symptoms) -> Suspect | None:
    """NaN or infinity out of nowhere: the losses right before it are ordinary, or it never appears in the loss."""
    onset, seen = case.onset("applied"), _first_nonfinite(case)
    # what else is out of line in the steps before has the NaN for a consequence
    announced = onset is not None and any(onset.step - 10 <= one.step < onset.step - 1 for one in case.onsets)
    if (onset is None and seen is None) or announced:
        return None
    at, places = seen or (None, [])
    steps = [one for one in (at, None if onset is None else onset.step) if one is not None]
    bad = [one for one in case.odd if math.isinf(one.factor) and one.number in ("x_amax", "amax")]
    # an input out of line says more than a measured place
    inputs = [f"the input of {one.tensor}" for one in bad if one.number == "x_amax"]
    first = next(iter([*inputs, *places]), "")
    again = "train the step again from the last checkpoint with logger.precision_every=1"
    measured = [f"step {at}: elements that are not finite in {', '.join(places[:3])}"] if places else []
    shown = "the loss does not show it" if onset is None else f"step {onset.step}: {onset.what}; the steps before are ordinary"  # fmt: skip
    return Suspect(
        cause="nan-source", step=min(steps), score=0.95 if first else 0.8,
        sentence="NaN or infinity appears suddenly" + (f", first seen in {first}" if first else ""),
        evidence=[shown, *(str(event["text"]) for event in case.events("nonfinite")[:2]), *(str(one) for one in bad[:3]), *measured],
        tensors=[one.tensor for one in bad[:4]] or places[:4],
        advice=[f"look at what computes {first}: the module right before it" if inputs else again, "run the same step on another machine: if the NaN does not appear, the hardware is at fault"],
    )  # fmt: skip


def _first_nonfinite(case: Symptoms) -> tuple[int, list[str]] | None:
    """The first measured step with elements that are not finite, and where, inputs before gradients; overflows caught by a loss scale do not count."""
    steps = {row["iteration"]: row for row in case.run.curves.rows}
    for one in case.run.measured:
        row = steps.get(one.step, {})
        if row.get("loss_scale", 1.0) != 1.0 and not row.get("applied", True):
            continue
        tables = one.tables
        forward = [f"the input of {row['linear']}" for row in tables["linears"] if row.get("nonfinite") and not math.isfinite(row.get("x_amax") or 0.0)]  # fmt: skip
        weights = [row["parameter"] for row in tables["weights"] if row.get("nonfinite")]
        backward = [f"the output gradient of {row['linear']}" for row in tables["linears"] if row.get("nonfinite") and math.isfinite(row.get("x_amax") or 0.0)]  # fmt: skip
        operands = [f"{row['linear']} {row['side']}" for row in tables["operands"] if row.get("nonfinite")]
        # backward runs from the end: the last module of the model gets its gradient first
        if found := [*forward, *weights, *backward[::-1], *operands]:
            return one.step, list(dict.fromkeys(found))
    return None


def scale_of_the_loss(case: Symptoms) -> Suspect | None:
    """fp16's loss scale: a jump that its rule cannot make, or so many skipped steps that nothing is trained."""
    rows = [row for row in case.run.curves.rows if isinstance(row.get("loss_scale"), (int, float))]
    if not rows or all(row["loss_scale"] == 1.0 for row in rows):
        return None
    found = [mark for stage in _stages(case, rows) for mark in (*_against_its_rule(stage), *_mostly_skipped(stage))]
    if not found:
        return None
    low = any(vanishes for _, _, vanishes in found)
    return Suspect(
        cause="loss-scale", step=found[0][0], score=1.0,
        sentence="the loss scale is far below what the gradients need: they vanish" if low else "the loss scale is far above what the gradients allow",
        evidence=[text for _, text, _ in found[:4]],
        advice=["a lower mixed_precision.initial_loss_scale, or a shorter loss_scale_window", "bf16_mixed needs no loss scale"],
    )  # fmt: skip


_Mark = tuple[int, str, bool]
"""A step, what is wrong with the loss scale there, and whether it is too low."""


def _stages(case: Symptoms, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The steps of each loss scale. A new one begins at a change of recipe, and at a resume that drops the scale's state or adds or removes the scale."""
    events = [*case.events("recipe"), *case.events("resumed")]
    stages = [rows[:1]]
    for before, row in itertools.pairwise(rows):
        between = [event for event in events if before["iteration"] <= event["iteration"] < row["iteration"]]
        changed = (before["loss_scale"] == 1.0) != (row["loss_scale"] == 1.0)
        if any(event["event"] == "recipe" or event.get("optimizer_reset") or changed for event in between):
            stages.append([])
        stages[-1].append(row)
    return [stage for stage in stages if any(row["loss_scale"] != 1.0 for row in stage)]


def _against_its_rule(rows: list[dict[str, Any]]) -> Iterator[_Mark]:
    """Changes of the scale by more than four, where its rule's factor is two, and long series of skipped updates after the first applied one, in the order of the steps."""
    trained, streak = False, 0
    for before, row in zip([None, *rows], rows, strict=False):
        was, scale = row["loss_scale"] if before is None else before["loss_scale"], row["loss_scale"]
        text = f"step {row['iteration']}: loss scale {was:g} -> {scale:g}"
        if scale > 4 * was:
            yield row["iteration"], f"{text}; its rule at most doubles it", False
        if scale < was / 4:
            yield row["iteration"], f"{text}; its rule halves it after overflows", True
        trained = trained or bool(row.get("applied"))
        streak = 0 if row.get("applied") else streak + 1
        if streak == MANY_SKIPPED and trained:
            now = row["iteration"]
            since = now - MANY_SKIPPED + 1
            yield since, f"steps {since} to {now}: every update skipped, loss scale {row['loss_scale']:g}", False


def _mostly_skipped(rows: list[dict[str, Any]]) -> Iterator[_Mark]:
    """More than half of the updates skipped, apart from those during the search for the first scale."""
    rows = rows[_search(rows) :]
    skipped = sum(not row.get("applied") for row in rows)
    if skipped > 0.5 * len(rows) and skipped >= min(MANY_SKIPPED, len(rows)):
        where = f"steps {rows[0]['iteration']} to {rows[-1]['iteration']}"
        yield rows[0]["iteration"], f"{where}: {skipped} of {len(rows)} updates skipped", False


def _search(rows: list[dict[str, Any]]) -> int:
    """Steps at the beginning in which the loss scale falls from its initial value to one at which no gradient overflows; each of these steps skips its update (17 from 2**32 to 2**15)."""
    count = still = 0
    for before, row in zip([None, *rows], rows, strict=False):
        still = still + 1 if before is not None and before["loss_scale"] == row["loss_scale"] else 0
        # the first overflows only use up `hysteresis` (two by default); a scale that stays the same for longer is constant
        if row.get("applied") or row["loss_scale"] < LOW or still > 4:
            break
        count += 1
    return count - min(still, count)


def rate(case: Symptoms) -> Suspect | None:
    """A rate that jumps right before the run goes wrong, or updates of the size of the weights, most often while the rate is still rising."""
    return _rate_jumped(case) or _rate_beyond_weights(case)


def _rate_jumped(case: Symptoms) -> Suspect | None:
    """The rate itself shows it: it triples from one step to the next, and within 20 steps one of the run's numbers is out of line."""
    for jump in rate_jumps(case.run):
        factor = jump.after / jump.before
        hit = next((one for one in case.onsets if jump.step <= one.step <= jump.step + 20), None)
        if factor < 3 or hit is None:
            continue
        return Suspect(
            cause="rate-too-high", step=jump.step, score=1.0 if factor >= 5 else 0.9,
            sentence=f"the learning rate jumps {factor:.3g}-fold, from {jump.before:.3g} to {jump.after:.3g}, and the run goes wrong",
            evidence=[str(jump), f"step {hit.step}: {hit.what}"],
            advice=[f"look at what sets the rate of step {jump.step}: the scheduler, a changed optimizer.lr, a resume that did not restore the schedule's position", f"go back to the last checkpoint before step {jump.step}"],
        )  # fmt: skip
    return None


def _rate_beyond_weights(case: Symptoms) -> Suspect | None:
    """Updates as large as the weights."""
    onset = case.onset("loss") or case.onset("grad_norm") or case.onset("applied")
    points = rates(case.run)
    if onset is None or not points:
        return None
    sizes = _median_weight(case, onset.step + 2 * case.every)
    if sizes is None:
        return None
    (began, usual), (at, size) = sizes
    # a jump of the rate after the onset is not its cause
    later = min((one.step for one in rate_jumps(case.run) if one.step > onset.step), default=at + 1)
    points = [point for point in points if point[0] < later]
    reached = max((value for step, value in points if step <= at), default=0.0)
    # Adam moves an element by about the rate
    ratio, grew = reached / max(usual, 1e-12), size / max(usual, 1e-12)
    if ratio < 1.0 and grew < 3.0:
        return None
    rising = rises(points, onset.step)
    exceeds = next((step for step, value in points if value > usual), onset.step)
    return Suspect(
        cause="rate-too-high", step=min(onset.step, exceeds), score=1.0 if ratio > 2 else 0.9 if rising else 0.6,
        sentence=f"the learning rate ({reached:.3g}) is too high: one update is {ratio:.1f} times the size of the median weight",
        evidence=[f"step {onset.step}: {onset.what}, at a rate of {dict(points).get(onset.step, reached):.3g}" + (" that is still rising" if rising else ""), f"RMS of the median weight: {usual:.3g} at step {began}, {size:.3g} at step {at}"],
        advice=[f"optimizer.lr={reached / max(3.0, 3 * ratio):.1g}, or a longer scheduler.lr_warmup_iters", "optimizer.clip_grad=1.0 if it is off"],
    )  # fmt: skip


def _median_weight(case: Symptoms, until: int) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """(step, RMS of the median weight) at the first and the last step measured up to then; None without measured weights."""
    measured = [one for one in case.run.measured if one.step <= until]
    sizes = []
    for one in (*measured[:1], *measured[-1:]):
        # neither norm gains nor biases
        rows = (row for row in one.tables["weights"] if "norm" not in row["parameter"] and "weight" in row["parameter"])
        sizes.append((one.step, [row["rms"] for row in rows]))
    if not sizes or not all(found for _, found in sizes):
        return None
    (began, first), (at, last) = sizes
    return (began, median(first)), (at, median(last))


LONG = 20
"""Number of idle steps at the end of a run that trained before from which on they count as a fault: a schedule may end at a rate of zero."""
_REASONS = {
    "skipped": (
        "every update was skipped",
        ["without a loss scale an update is skipped only if loss or gradients are not finite: the `nonfinite` events and the run's output show which"],
    ),
    "rate": (
        "the learning rate is 0",
        ["look at optimizer.lr, scheduler.lr_decay_iters and optimizer.min_lr: a schedule that has ended stays at its lowest rate", "after a resume: whether the schedule's position was restored"],
    ),
    "gradient": (
        "the gradient norm is 0",
        ["look for what disconnects the loss from the parameters: a detach, no_grad, frozen parameters, a loss mask of zeros", "operands flushed to zero do the same: logger.precision_every shows them"],
    ),
}  # fmt: skip
"""Why a step trains nothing -> the reason as a clause, and what to try."""


def no_update(case: Symptoms) -> Suspect | None:
    """No step of the run, or at least of its last quarter, can have changed a weight. Updates skipped because of NaN or by a loss scale belong to other causes."""
    # an overflow that a loss scale caught says nothing about rate and gradient: the schedule starts with the first update
    rows = [row for row in case.run.curves.rows if row.get("applied", True) or row.get("loss_scale", 1.0) == 1.0]
    known = case.onset("applied") is not None
    reasons = ["" if (why := _idle(row)) == "skipped" and known else why for row in rows]
    active = max((i for i, why in enumerate(reasons) if not why), default=-1)
    idle = reasons[active + 1 :]
    if len(idle) <= (FEWEST if active < 0 else max(LONG - 1, len(rows) // 4)):
        return None
    why = max(_REASONS, key=idle.count)
    clause, advice = _REASONS[why]
    first, last = rows[active + 1]["iteration"], rows[-1]["iteration"]
    return Suspect(
        cause="no-update", step=first, score=0.95,
        sentence=f"steps {first} to {last} train nothing: {clause}",
        evidence=[f"steps {first} to {last}: {clause} in {idle.count(why)} of {len(idle)}"],
        advice=advice,
    )  # fmt: skip


def _idle(row: dict[str, Any]) -> str:
    """Why a step cannot have changed a weight, a key of `_REASONS`; '' if it can, or if its numbers are unknown."""
    if not row.get("applied", True):
        return "skipped"
    if row.get("lr") == 0:
        return "rate"
    return "gradient" if row.get("grad_norm") == 0 else ""
