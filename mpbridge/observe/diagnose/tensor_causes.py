"""Causes visible in individual tensors: scales, main weights, one channel, weights, moments. Each function returns a suspect, or None."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpbridge.common.facts import ADAMS, least_left
from mpbridge.observe.diagnose.evidence import finite, median
from mpbridge.observe.diagnose.signals import Suspect, Symptoms, flushed_operands, gradient_jumps
from mpbridge.observe.telemetry.records import TensorRow
from mpbridge.settings.schema import defaults

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
    rows = (row for one in case.run.measured if one.step == first.step for row in one.tables["linears"])
    channel = next(row for row in rows if row["linear"] == first.tensor).get("x_channel")
    return Suspect(
        cause="outlier-channel", step=first.step, score=0.96 if source else 0.7,
        sentence=f"channel {channel} of the input of {first.tensor} is {first.after:.0f} times the median channel",
        evidence=[str(first), *(str(one) for one in source[:2]), *flushed_operands(case, after=first.step - 1)[:2]],
        tensors=[one.tensor for one in [*source, *channels][:4]],
        advice=["a scaling with blocks (bf16_with_mxfp8_mixed, bf16_with_fp8_subchannel_scaling_mixed) loses only the outlier's block", "keep that linear in high precision: mixed_precision.modules", *(["look at the norm's gain named above"] if source else [])],
    )  # fmt: skip


def weights(case: Symptoms) -> Suspect | None:
    """Parameters whose values were written by something other than the optimizer."""
    return zeroed(case) or one_weight(case) or many_weights(case)


def zeroed(case: Symptoms) -> Suspect | None:
    """One parameter, a norm's gain for example, is no larger than the updates since the last measurement make of zero. The loss need not show it."""
    fell = []
    for name, (begin, one), (end, two) in _changes(case, "rms"):
        reach = moved(case, begin, end)
        if one > 0.0 == two or (two <= reach and one - two > 2 * reach):
            fell.append((end, name, one, two))
    step = min((end for end, *_ in fell), default=0)
    here = [(name, one, two) for end, name, one, two in fell if end == step]
    if not here or len(here) > 2:
        return None
    return Suspect(
        cause="weight-corrupted", step=step, score=0.97,
        sentence=f"{here[0][0]} was set to zero: it is no larger than the updates since make of zero, and far from what it was",
        evidence=[f"step {step}: {name}: RMS {one:.3g} -> {two:.3g}" for name, one, two in here],
        tensors=[name for name, *_ in here],
        advice=["look at what writes weights besides the optimizer: a reload, a mask, a script between steps", "compare it with the last checkpoint's, and go back to that"],
    )  # fmt: skip


def one_weight(case: Symptoms) -> Suspect | None:
    """One parameter, and no other, has elements of another magnitude than before."""
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
    peak = dict(case.run.series("weights", odd.tensor, "peak", key="parameter")).get(step)
    # a row or a column of a matrix is a channel of its product: many large elements, none of which dominates
    spread = peak is not None and peak < 0.2
    held = ": a few elements dominate it" if odd.after > 20 * rms else ""
    held = held if peak is None else f": {peak:.0%} of its sum of squares is in one element"
    return Suspect(
        cause="weight-corrupted", step=step, score=0.65 if spread else 0.95,
        sentence=f"elements of {odd.tensor} have another magnitude than before, unlike those of any other parameter",
        evidence=[str(odd), f"its RMS there is {rms:.3g}{held}"],
        tensors=[one.tensor for one in here],
        advice=["a flipped bit in memory or in a file: compare the tensor with the last checkpoint's", "go back to that checkpoint; check the machine's memory errors (ECC)"],
    )  # fmt: skip


def many_weights(case: Symptoms) -> Suspect | None:
    """Several parameters changed at once, where the run goes wrong, by more than the updates between two measurements can move them."""
    steps = [one.step for one in case.onsets]
    changed: dict[int, list[tuple[str, float, float]]] = {}
    for name, (begin, one), (end, two) in _changes(case, "rms"):
        if any(begin < step <= end + 2 for step in steps) and abs(two - one) > 2 * moved(case, begin, end):
            changed.setdefault(end, []).append((name, one, two))
    step = min((at for at, found in changed.items() if len(found) >= 3), default=None)
    if step is None:
        return None
    here = sorted(changed[step], key=lambda one: -abs(one[2] - one[1]))
    return Suspect(
        cause="weight-corrupted", step=step, score=0.7,
        sentence=f"{len(here)} parameters changed at once by more than their updates can account for",
        evidence=[f"step {step}: {name}: RMS {one:.3g} -> {two:.3g}" for name, one, two in here[:4]],
        tensors=[name for name, _, _ in here[:4]],
        advice=["look at what writes weights besides the optimizer: a reload, an averaged copy, a merge, a script between steps", "compare them with the last checkpoint's, and go back to it"],
    )  # fmt: skip


def _changes(case: Symptoms, number: str) -> Iterator[tuple[str, tuple[int, float], tuple[int, float]]]:
    """(parameter, (step, value) at a measurement, the same at the next one) of one number."""
    for name in case.run.names("weights", "parameter"):
        for before, after in itertools.pairwise(case.run.series("weights", name, number, key="parameter")):
            yield name, before, after


def moved(case: Symptoms, begin: int, end: int) -> float:
    """How far Adam moves an element between two steps: by about the learning rate in each."""
    rates = [value for step, value in finite(case.run.curves.series("lr")) if begin < step <= end]
    return max(sum(rates), 1e-12) if rates else math.inf


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
    for _, (before, one), (step, two) in _changes(case, "exp_avg_sq_mean"):
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
    resumed = [event["text"] for event in between if event["event"] == "resumed"]
    return anew or any(word in text for text in resumed for word in ("parallel: ", "engine: ", "distributed: "))


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
                now, then = firsts[step] / math.sqrt(value), firsts[before] / math.sqrt(low)
                ratios.setdefault(step, []).append(now / then)
    return ratios


def _update_of_all(case: Symptoms, ratios: Mapping[int, list[float]]) -> Suspect | None:
    """Most weights jump between two measurements although rate and clipped gradients are unchanged.

    ratios: step -> growth of (first moment / root of the second) in each parameter; without growth, the optimizer did not cause the move.
    """
    loss = case.onset("loss") or case.onset("grad_norm")
    if loss is None:
        return None
    rates = {row["iteration"]: row.get("lr") or 0.0 for row in case.run.curves.rows}
    for step in [one.step for one in case.run.measured][1:]:
        # an update shows in the loss of the next step: weights that grew earlier did no harm
        if not loss.step - 1 <= step <= loss.step + 2:
            continue
        pairs = ((name, one, two) for name, (_, one), (at, two) in _changes(case, "rms") if at == step)
        grew = [two / one for name, one, two in pairs if one > 0 and "norm" not in name]
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
