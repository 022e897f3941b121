"""Causes visible in events and in the course of the loss: resume, recipe, data, audits. Each function returns a suspect, or None."""

from __future__ import annotations

from mpbridge.observe.diagnose.evidence import finite
from mpbridge.observe.diagnose.moment_causes import falls
from mpbridge.observe.diagnose.signals import rate_jumps
from mpbridge.observe.diagnose.suspects import Suspect, Symptoms, flushed_operands


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
            return _spike(
                case, first, last, [f"step {first}: {onset.what}", *(str(event["text"]) for event in unlike[:2])], 0.97
            )
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
    return Suspect(
        cause="data-spike", step=first, score=score,
        sentence=f"the data of steps {first} to {last} are unlike those around them",
        evidence=evidence,
        advice=[f"look at the samples of those steps (consumed_samples in metrics.jsonl: {_samples(case, first)})", "train.nonfinite='rollback N' skips such data only if the loss is not finite; otherwise clean the corpus"],
    )  # fmt: skip


def _samples(case: Symptoms, step: int) -> str:
    at = {row["iteration"]: row.get("consumed_samples") for row in case.run.curves.rows}
    return f"{at.get(step - 1, '?')} to {at.get(step, '?')}"


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
