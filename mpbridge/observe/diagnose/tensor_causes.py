"""Causes visible in individual tensors: scales, main weights, one channel. Each function returns a suspect, or None."""

from __future__ import annotations

import itertools
import math

from mpbridge.observe.diagnose.signals import Odd, gradient_jumps
from mpbridge.observe.diagnose.suspects import Suspect, Symptoms, flushed_operands
from mpbridge.observe.telemetry.reading import TensorRow

SATURATES, WASTED, MUCH_WASTED = -3, 8, 12
"""Staleness (log2) below which a scale is wrong, above which it wastes range, and above which no spike explains it."""
REMEMBERED = 1024
"""Length of an amax history in steps, Transformer Engine's default."""


def scales(case: Symptoms) -> Suspect | None:
    """Delayed scales that do not follow their amaxes: one that is far off, or all frozen."""
    still, wrong = _still(case), _off(case)
    if len(still) >= 2 and len(still) > 2 * len(wrong):
        return Suspect(
            cause="frozen-scale", step=min(at for at, _ in still), score=1.0,
            sentence="delayed scales no longer follow their amax histories",
            evidence=[*(text for _, text in still[:3]), *_audited(case, "delayed scales")[:1]], tensors=[text.partition(":")[0] for _, text in still[:4]],
            advice=["the scale update is skipped: look at what calls it (a hook, a resume that restored scales alone, a graph captured with its update outside)", "bf16_with_fp8_current_scaling_mixed keeps no history"],
        )  # fmt: skip
    # wasted range without any harm may be the trace of a spike between two measurements
    harmless = not case.onsets and all(WASTED < stale <= MUCH_WASTED for _, _, stale in wrong)
    if harmless or all(_remembered(case, *one) for one in wrong):
        return None
    return _wrong_scale(case, wrong)


def _wrong_scale(case: Symptoms, wrong: list[tuple[int, str, float]]) -> Suspect:
    """wrong: (step, operand, staleness) of scales that are far off. Scales whose tensor did not just change are preferred."""
    states = case.run.operands()
    # after a spike, range is wasted for the length of the history
    lasting = [one for one in wrong if not _passes(states[one[1]], one[0]) and not WASTED < one[2] <= MUCH_WASTED]
    # if every amax exceeds its history at once, the tensors changed
    sure = bool(lasting) and len(wrong) <= max(3, 0.25 * len(states))
    chosen = lasting if sure else wrong
    step = min(at for at, _, _ in chosen)
    named = [(name, stale) for at, name, stale in chosen if at == step]
    return Suspect(
        cause="wrong-scale", step=step, score=0.97 if sure else 0.6,
        sentence=f"the delayed scale of {named[0][0]} is wrong by 2**{named[0][1]:+.1f}",
        evidence=[*(f"step {step}: {name}: off by 2**{stale:+.1f}, {'elements saturate' if stale < 0 else 'range is wasted'}" for name, stale in named[:3]), *_audited(case, "delayed scales")[:1]],
        tensors=[name for name, _ in named[:4]],
        advice=["the scale was loaded or set by hand: compare it with 448 (E4M3) or 57344 (E5M2) divided by the amax", "bf16_with_fp8_current_scaling_mixed keeps no scale"],
    )  # fmt: skip


def _audited(case: Symptoms, *words: str) -> list[str]:
    """Faults of the run's audits that mention one of these."""
    faults = [str(fault) for audit in case.run.audits for fault in audit.get("faults", [])]
    return [fault for fault in faults if any(word in fault for word in words)]


def _still(case: Symptoms) -> list[tuple[int, str]]:
    """Operands whose scale stays although the amax requires another one: (step, sentence)."""
    found = []
    for name, points in case.run.operands().items():
        for (_, before), (step, row) in itertools.pairwise(points):
            stale, earlier = row.get("staleness"), before.get("staleness")
            if not isinstance(stale, float) or not isinstance(earlier, float):
                continue
            # the change required then has still not been made: its history is not read
            if earlier < -0.3 and row["scale"] == before["scale"]:
                text = f"{name}: scale {row['scale']:.4g} is unchanged, although the amax required 2**{earlier:.1f} times that"
                found.append((step, text))
                break
    return found


def _off(case: Symptoms) -> list[tuple[int, str, float]]:
    """Operands whose scale is far from what their amax requires: (step, operand, staleness)."""
    spikes = [one.step for one, _ in gradient_jumps(case.run)]
    found = []
    for name, points in case.run.operands().items():
        for step, row in points[1:]:
            stale = row.get("staleness")
            if not isinstance(stale, float) or SATURATES <= stale <= WASTED:
                continue
            # a history keeps a gradient that spiked between two measurements
            spiked = row["side"] == "dy" and any(at <= step <= at + REMEMBERED for at in spikes)
            if not (spiked and 0 < stale <= MUCH_WASTED):
                found.append((step, name, stale))
                break
    return found


def _remembered(case: Symptoms, step: int, name: str, stale: float) -> bool:
    """Whether the scale fits amaxes measured earlier: after a larger amax, range is wasted for the length of the history, and a
    gradient that exceeds its history saturates once."""
    points = case.run.operands()[name]
    amax = next(row["amax"] for at, row in points if at == step)
    known = [row["amax"] for at, row in points if at < step and isinstance(row.get("amax"), (int, float))]
    asked = amax * 2.0 ** max(-100.0, min(stale, 100.0))  # the amax for which this scale would be right
    return bool(asked <= 2 * max(known, default=0.0) if stale > 0 else asked >= max(known[-2:], default=math.inf) / 2)


def _passes(points: list[tuple[int, TensorRow]], step: int) -> bool:
    """Whether a scale that was off at that measurement is right again at the next."""
    later = [row.get("staleness") for at, row in points if at > step]
    return bool(later) and isinstance(later[0], float) and SATURATES <= later[0] <= WASTED


def main_weights(case: Symptoms) -> Suspect | None:
    """The model's parameters do not match its main weights."""
    gaps = [
        (one.step, row["parameter"], row["main_gap"])
        for one in case.run.measured
        for row in one.tables["weights"]
        if (row.get("main_gap") or 0.0) > 0.02
    ]
    if not gaps:
        return None
    step = gaps[0][0]
    here = [(name, gap) for at, name, gap in gaps if at == step]
    return Suspect(
        cause="lost-main-weights", step=step, score=0.98,
        sentence="the model's parameters do not match its main weights: updates do not reach them",
        evidence=[f"step {step}: {len(here)} parameters differ from their main weights, {here[0][0]} in {here[0][1]:.0%} of its elements", *_audited(case, "main weights", "weights moved", "refreshed")[:2]],
        tensors=[name for name, _ in here[:4]],
        advice=["look at what copies main weights back after the update (a wrapper, a patched optimizer, a skipped parameter gather)", "mpbridge audit: 'weights moved' and 'parameters' check the same in the live tensors"],
    )  # fmt: skip


def outlier(case: Symptoms) -> Suspect | None:
    """One channel of a linear's input is far larger than the others, and was not so before."""
    channels = [one for one in case.odd if one.number == "x_outlier" and one.after > 30]
    if not channels:
        return None
    first = channels[0]
    grown = [one for one in case.odd if one.number == "amax" and one.step <= first.step]
    source = [one for one in grown if one.tensor.endswith("norm.weight")]
    if sum("norm" not in one.tensor for one in grown) > 2:
        return None
    return Suspect(
        cause="outlier-channel", step=first.step, score=0.96 if source else 0.7,
        sentence=f"channel {_channel(case, first)} of the input of {first.tensor} is {first.after:.0f} times the median channel",
        evidence=[str(first), *(str(one) for one in source[:2]), *flushed_operands(case, after=first.step - 1)[:2]],
        tensors=[one.tensor for one in [*source, *channels][:4]],
        advice=["a scaling with blocks (bf16_with_mxfp8_mixed, bf16_with_fp8_subchannel_scaling_mixed) loses only the outlier's block", "keep that linear in high precision: mixed_precision.modules", *(["look at the norm's gain named above"] if source else [])],
    )  # fmt: skip


def _channel(case: Symptoms, odd: Odd) -> int | None:
    """Which channel of the linear's input was the largest at that step."""
    rows = (row for one in case.run.measured if one.step == odd.step for row in one.tables["linears"])
    found: int | None = next(row for row in rows if row["linear"] == odd.tensor).get("x_channel")
    return found
