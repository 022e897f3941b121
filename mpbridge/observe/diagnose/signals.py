"""First steps out of line: in the loss, the gradient norm, the updates, and in individual tensors; what a cause function gets, and the suspect that it returns."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpbridge.observe.diagnose.evidence import FEWEST, Evidence, finite, median

WINDOW = 12
"""Maximum number of steps that a step is compared with."""
PASSING = 5
"""Number of steps within which a harmless jump of the gradient norm is over."""
LATELY = 100
"""Maximum number of steps over which the noise of a loss is measured."""
MANYFOLD = 100
"""Growth of the gradient norm that no healthy run ends with, however slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """A number's first step out of line."""

    step: int
    what: str
    number: str
    """'loss', 'grad_norm', 'applied'."""
    value: float
    usual: float
    gradual: bool = False
    """Whether the number drifts away slowly, so that no single step is to blame."""


def onsets(run: Evidence) -> list[Onset]:
    """Every jump of the loss that follows a recovery, and the first of each other kind, earliest first."""
    losses = _jumps(run)
    if not losses and (rise := _rise(run)) is not None:
        losses = [rise]
    found = [*losses, _gradient_jump(run, losses) or _gradient_growth(run), _nonfinite(run)]
    return sorted((one for one in found if one is not None), key=lambda one: one.step)


def jump(values: list[float], value: float) -> bool:
    """Whether a loss is out of line with those before it: by more than eight times their spread and an eighth of their size."""
    usual = median(values)
    spread = 1.48 * median([abs(one - usual) for one in values])
    return value > usual + max(8 * spread, _least(usual))


def _least(usual: float) -> float:
    """The smallest change of a loss that is reported: an eighth of its size."""
    return max(0.125 * abs(usual), 0.15)


def _noise(values: list[float]) -> float:
    """Standard deviation of a loss around its trend, from the median change from step to step: neither a slow trend nor a spike adds to it."""
    return 1.48 * median([abs(two - one) for one, two in itertools.pairwise(values)]) / math.sqrt(2)


def _jumps(run: Evidence) -> list[Onset]:
    """Steps at which the loss departs from its previous level; the next one can only come after it has recovered."""
    points = finite(run.curves.series("loss"))
    found: list[Onset] = []
    calm: list[float] = []
    for step, value in points:
        before = calm[-WINDOW:]
        if not _leaves(calm, value):
            calm.append(value)
        elif not found or found[-1].usual != median(before):
            found.append(Onset(step=step, what=f"the loss jumps from {median(before):.3g} to {value:.3g}", number="loss", value=value, usual=median(before)))  # fmt: skip
    return found[:8]


def _leaves(calm: list[float], value: float) -> bool:
    """Whether a loss is out of line with all that were in line; in the first steps, when few are known, whether it exceeds twice the highest."""
    before = calm[-WINDOW:]
    if len(before) < FEWEST:
        return len(before) > 1 and value > 2 * max(before) > 0
    # a dozen losses may be close together by chance; a hundred are not
    return jump(before, value) and value > median(before) + 5 * _noise(calm[-LATELY:])


def _rise(run: Evidence) -> Onset | None:
    """A loss that rises slowly without a jump: at the end it is above its lowest stretch by half of what was learned and by four times its noise."""
    points = finite(run.curves.series("loss"))
    if len(points) < 3 * FEWEST:
        return None
    at, low = _lowest(points)
    last = median([value for _, value in points[-FEWEST:]])
    learned = points[0][1] - low
    # in a long run, noise alone takes the median of some six steps two deviations down
    if last <= low + max(0.5 * learned, 4 * _noise([value for _, value in points]), _least(low)):
        return None
    return Onset(step=points[at][0] + 1, what=f"the loss rises from {low:.3g} to {last:.3g}", number="loss", value=last, usual=low, gradual=True)  # fmt: skip


def _lowest(points: list[tuple[int, float]]) -> tuple[int, float]:
    """Where the lowest stretch of a curve has its lowest point, and the stretch's median: a single point may be low by chance."""
    values = [value for _, value in points]
    low, start = min((median(values[i : i + FEWEST]), i) for i in range(len(values) - FEWEST + 1))
    return min(range(start, start + FEWEST), key=values.__getitem__), low


def gradient_jumps(run: Evidence) -> list[tuple[Onset, bool]]:
    """Every jump of the gradient norm, and whether it passes within a few steps."""
    points = finite(run.curves.series("grad_norm"))
    found: list[tuple[Onset, bool]] = []
    i = FEWEST
    while i < len(points):
        usual = median([value for _, value in points[max(0, i - WINDOW) : i]])
        step, value = points[i]
        over = next((k for k in range(i + 1, len(points)) if points[k][1] < 4 * usual), len(points))
        if value <= 8 * usual:
            i += 1
            continue
        onset = Onset(step=step, what=f"the gradient norm jumps from {usual:.3g} to {value:.3g}", number="grad_norm", value=value, usual=usual)  # fmt: skip
        found.append((onset, over - i <= PASSING and over < len(points)))
        i = max(over, i + 1)
    return found


def _gradient_growth(run: Evidence) -> Onset | None:
    """A norm that ends a hundred times above its lowest stretch without a jump; its step is the first above eight times that, as for a jump."""
    points = [(step, value) for step, value in finite(run.curves.series("grad_norm")) if value > 0]
    if len(points) < 3 * FEWEST:
        return None
    at, low = _lowest(points)
    last = median([value for _, value in points[-FEWEST:]])
    if last <= MANYFOLD * low:
        return None
    step = next((step for step, value in points[at:] if value > 8 * low), points[at][0])
    return Onset(step=step, what=f"the gradient norm grows from {low:.3g} to {last:.3g}", number="grad_norm", value=last, usual=low, gradual=True)  # fmt: skip


def _gradient_jump(run: Evidence, losses: list[Onset]) -> Onset | None:
    """The first jump of the gradient norm; one that passes at once, long before the loss jumps, is not the onset."""
    found = gradient_jumps(run)
    lasting = [one for one, passes in found if not passes or any(abs(one.step - loss.step) <= WINDOW for loss in losses)]  # fmt: skip
    if lasting or not found:
        return lasting[0] if lasting else None
    first = found[0][0]
    return None if any(loss.step > first.step for loss in losses) else first


def _nonfinite(run: Evidence) -> Onset | None:
    """The first step whose loss or gradient is not finite, except overflows handled by a loss scale."""
    before = 0
    for row in run.curves.rows:
        bad = int(row.get("nonfinite_steps") or 0)
        if bad > before or not math.isfinite(float(row.get("loss") or 0.0)):
            return Onset(step=row["iteration"], what="loss or gradients are not finite", number="applied", value=math.nan, usual=0.0)  # fmt: skip
        before = bad
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RateJump:
    """A change of the learning rate from one step to the next that no warm-up or decay makes."""

    step: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"step {self.step}: learning rate {self.before:.3g} -> {self.after:.3g}"


def rates(run: Evidence) -> list[tuple[int, float]]:
    """(step, learning rate) for rates above zero."""
    return [(step, value) for step, value in finite(run.curves.series("lr")) if value > 0]


def rate_jumps(run: Evidence) -> list[RateJump]:
    """Where the rate doubles or halves at once, except in the first five steps of the run: a linear warm-up begins like that."""
    return [
        RateJump(step=step, before=one, after=two)
        for (_, one), (step, two) in itertools.pairwise(rates(run)[4:])
        if not 0.5 < two / one < 2.1
    ]


def rises(points: list[tuple[int, float]], until: int) -> bool:
    """Whether the rate rose in the 15 steps before a step."""
    return any(two > one for (_, one), (step, two) in itertools.pairwise(points) if until - 15 <= step <= until)


# --- tensors -------------------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A tensor's first measured step out of line with its earlier measurements."""

    step: int
    tensor: str
    number: str
    before: float
    after: float
    factor: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.tensor}: {LABELS.get(self.number, self.number)} {self.before:.3g} -> {self.after:.3g}"


LABELS = {
    "x_amax": "amax of its input",
    "x_rms": "RMS of its input",
    "x_outlier": "largest input channel over the median one",
    "dy_amax": "amax of its output's gradient",
    "amax": "largest element",
    "rms": "RMS",
    "exp_avg_sq_mean": "mean second moment",
    "exp_avg_rms": "RMS of the first moment",
    "main_gap": "share of elements that differ from the main weight",
    "flushed": "share flushed to zero",
    "saturated": "share saturated",
    "staleness": "staleness of its scale (log2)",
}
_WATCHED = (
    ("linears", "linear", "x_amax", 8.0),
    ("linears", "linear", "x_outlier", 10.0),
    ("linears", "linear", "dy_amax", 30.0),
    ("weights", "parameter", "amax", 8.0),
    ("weights", "parameter", "rms", 3.0),
)
"""Table, key, number, and the factor over the median of earlier measurements that counts as out of line."""


def odd_tensors(run: Evidence) -> list[Odd]:
    """Earliest first, in the order of the model within a step; a number that is not finite is out of line by an infinite factor."""
    found = [odd for watched in _WATCHED for odd in _odd(run, *watched)]
    return sorted(found, key=lambda one: one.step)


def _odd(run: Evidence, table: str, key: str, number: str, limit: float) -> Iterator[Odd]:
    for name in run.names(table, key):
        if name.endswith("bias"):  # they begin at zero and grow by any factor
            continue
        points = run.series(table, name, number, key=key)
        before: list[float] = []
        for (_, first), (step, value) in itertools.pairwise(points):
            if math.isfinite(first):
                bisect.insort(before, first)
            usual = before[(len(before) - 1) // 2] if before else math.nan
            if not math.isfinite(value) and math.isfinite(first):
                yield Odd(step=step, tensor=name, number=number, before=usual, after=value, factor=math.inf)
                break
            if usual > 0 and value > limit * usual:
                yield Odd(step=step, tensor=name, number=number, before=usual, after=value, factor=value / usual)
                break


@dataclass(slots=True, kw_only=True)
class Suspect:
    """A cause, and the evidence for it."""

    cause: str
    sentence: str
    step: int
    score: float
    evidence: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Symptoms:
    """The input of all cause functions."""

    run: Evidence
    onsets: list[Onset]
    odd: list[Odd]

    def onset(self, number: str) -> Onset | None:
        """The first step out of line of one number."""
        return next((one for one in self.onsets if one.number == number), None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of a kind."""
        return [event for event in self.run.events if event["event"] == kind]

    def near(self, step: int) -> bool:
        """Whether something of the whole model goes wrong at that step or within two measurements after it."""
        return any(step - 2 <= one.step <= step + 2 * self.every for one in self.onsets)

    @property
    def tokens_counted(self) -> bool:
        """Whether the run counted its tokens: if so, a jump of the loss on ordinary tokens is not due to the data."""
        return bool(self.events("tokens")) or any("nats_per_token" in one.facts for one in self.run.measured)

    def unlike(self, onset: Onset) -> list[dict[str, Any]]:
        """The run's events about unusual tokens at that step and the one before: a jump there is due to the data, whatever else happened shortly before."""
        return [event for event in self.events("tokens") if onset.step - 1 <= event["iteration"] <= onset.step]

    def jump_after(self, step: int, *, within: int) -> Onset | None:
        """The first onset within so many steps after a step that is not explained by its own tokens."""
        return next((one for one in self.onsets if step < one.step <= step + within and not self.unlike(one)), None)

    @property
    def every(self) -> int:
        """Steps between two measurements."""
        steps = [one.step for one in self.run.measured]
        return max(1, min((b - a for a, b in itertools.pairwise(steps)), default=1), 5)


def flushed_operands(case: Symptoms, *, after: int = -1) -> list[str]:
    """Operands with large losses, as sentences."""
    found = []
    for name, points in case.run.operands().items():
        for step, row in points:
            lost, clipped = row.get("flushed") or 0.0, row.get("saturated") or 0.0
            wide = row["format"] == "e2m1"
            if step > after and (lost > (0.5 if wide else 0.25) or clipped > (0.3 if wide else 0.02)):
                found.append(f"step {step}: {name}: {lost:.0%} flushed to zero, {clipped:.1%} saturated")
                break
    return found
