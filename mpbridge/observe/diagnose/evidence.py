"""Everything in a run's folder: metrics, statistics, audits, events, settings, and what could not be read; two runs compared."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import lines_of, text_of, why
from mpbridge.common.report.curves import PRECISION, Curves, read_curves, read_history
from mpbridge.common.report.metrics import EVENTS
from mpbridge.observe.telemetry.records import MeasuredStep, TensorRow, read

FEWEST = 6
"""Minimum number of steps that a step is compared with."""


@dataclass(slots=True)
class Evidence:
    """One run, read from its files."""

    folder: Path
    curves: Curves
    measured: list[MeasuredStep] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    precision: dict[str, Any] = field(default_factory=dict)
    """precision.json: recipe, engine, written fields, versions, settings."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings; empty if they cannot be written as data, and in runs of earlier versions that were stopped early."""
    gaps: list[str] = field(default_factory=list)
    """What could not be read, and so cannot be determined."""
    sampled: bool = False
    """Whether there are more measurements than were read."""
    _by_name: dict[tuple[str, str], dict[str, list[tuple[int, TensorRow]]]] = field(default_factory=dict)

    @property
    def short(self) -> bool:
        """Whether there are too few steps to tell what is usual."""
        return len(self.curves.rows) <= FEWEST

    @property
    def recipe(self) -> str:
        """The recipe that the run started with."""
        return str(self.precision.get("recipe") or "unknown recipe")

    def series(self, table: str, row: str, number: str, *, key: str) -> list[tuple[int, float]]:
        """(step, value) of one number of one tensor over the measured steps. key: the column that names a row."""
        found = self._index(table, key).get(row, [])
        return [(step, float(value)) for step, one in found if isinstance(value := one.get(number), (int, float))]

    def names(self, table: str, key: str) -> list[str]:
        """The rows of a table, in the order of the model."""
        return list(self._index(table, key))

    def operands(self) -> Mapping[str, list[tuple[int, TensorRow]]]:
        """Name of a GEMM operand -> its measurements by step."""
        return self._index("operands", "")

    def around(self, step: int) -> tuple[int, int]:
        """The measured steps read right before and after a step, or the step itself if there is none."""
        steps = [one.step for one in self.measured]
        return max((one for one in steps if one < step), default=step), min((one for one in steps if one > step), default=step)  # fmt: skip

    def _index(self, table: str, key: str) -> dict[str, list[tuple[int, TensorRow]]]:
        """A table's rows by name, computed once; if a name occurs twice at a step, the first row counts."""
        if (table, key) not in self._by_name:
            found: dict[str, list[tuple[int, TensorRow]]] = {}
            for one in self.measured:
                for row in one.tables[table]:
                    name = str(row[key]) if key else f"{row['linear']} {row['side']} ({row['copy']})"
                    known = found.setdefault(name, [])
                    if not known or known[-1][0] != one.step:
                        known.append((one.step, row))
            self._by_name[table, key] = found
        return self._by_name[table, key]

    @property
    def remaining(self) -> list[str]:
        """Without statistics, what the run's other files still show, and how much of it; empty if tensors were measured."""
        if self.measured:
            return []
        words = {"loss": "loss", "grad_norm": "gradient norm", "loss_scale": "loss scale", "lr": "learning rate"}
        curves = [word for number, word in words.items() if self.curves.series(number)]
        count = len(self.curves.rows)
        found = [f"{count} step{'s' * (count != 1)} of {', '.join(curves)}: where they jump, and values that are not finite"] if curves else []  # fmt: skip
        if any("applied" in row for row in self.curves.rows):
            skipped = sum(row.get("applied") is False for row in self.curves.rows)
            found.append(f"which updates were applied: {skipped} of {len(self.curves.rows)} were skipped")
        if self.audits:
            kept = sum(bool(one.get("ok", True)) for one in self.audits)
            found.append(f"audits: {kept} of {len(self.audits)} as promised")
        if self.config or "recipe" in self.precision:
            found.append("its recipe and settings" if self.config else "its recipe")
        if self.events:
            kinds = Counter(one["event"] for one in self.events)
            found.append(f"events: {', '.join(f'{count} x {name}' for name, count in kinds.items())}")
        return found

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Dotted settings of the run, as far as its files have them."""
        for section, values in self.config.items():
            if isinstance(values, dict):
                yield from ((f"{section}.{name}", value) for name, value in values.items())
            else:
                yield section, values


def gather(folder: Path, *, within: Sequence[tuple[int, int]] = ()) -> Evidence:
    """Reads a run's folder. Raises BadValue if there is no run; anything else that is missing or damaged is listed in the gaps.

    within: ranges of steps from which more statistics are read than elsewhere, if there are too many to read all.
    """
    curves = read_curves(folder)
    made = Evidence(folder, curves, gaps=list(curves.faults))
    if made.short:
        few = "1 step is" if len(curves.rows) == 1 else f"{len(curves.rows)} steps are"
        made.gaps.append(f"{few} too few to tell what is usual for a curve; {FEWEST + 1} are needed")
    if not folder.is_dir():
        made.gaps = [*_few(made.gaps), "a metrics file alone: no statistics, audits, events or settings"]
        return made
    statistics = read(folder, within=within)
    made.measured, made.sampled = statistics.measured, statistics.left_out > 0
    made.gaps += statistics.faults
    if not made.measured and not statistics.faults:
        made.gaps.append("no step was measured: each logger.precision_every steps one is, 100 by default")
    try:
        made.audits = read_history(folder)
    except BadValue:
        unread = f"{PRECISION} contains no audits that this version can read"
        missing = f"no {PRECISION}: recipe, settings and audits are not known"
        made.gaps.append(unread if (folder / PRECISION).exists() else missing)
    made.precision = _json(folder / PRECISION)
    config = made.precision.get("config") or _json(folder / "timing.json").get("config")
    made.config = config if isinstance(config, dict) else {}
    made.events = _events(folder / EVENTS, made.gaps)
    made.gaps = _few(made.gaps)
    return made


def _few(gaps: list[str], most: int = 4) -> list[str]:
    """At most so many sentences about the lines of one file, then the number of the others."""
    found, seen = [], Counter[str]()
    for gap in gaps:
        file, line, _ = gap.partition(", line ")
        seen[file] += bool(line)
        if not line or seen[file] <= most:
            found.append(gap)
    return [*found, *(f"{file}: {count - most} more lines like these" for file, count in seen.items() if count > most)]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text_of(path, kind="json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _events(path: Path, gaps: list[str]) -> list[dict[str, Any]]:
    """Events besides steps; the file exists only if there were any."""
    found: list[dict[str, Any]] = []
    try:
        for number, line in enumerate(lines_of(path), start=1):
            try:
                row = json.loads(line)
                event = str(row["event"])
                found.append({**row, "iteration": int(row["iteration"]), "event": event, "text": str(row.get("text") or event)})  # fmt: skip
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                gaps.append(f"{EVENTS}, line {number}: unreadable, skipped")
    except FileNotFoundError:
        return found
    except OSError as error:
        gaps.append(f"{EVENTS}: {why(error)}")
    return found


def finite(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points with a finite value."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def median(values: list[float]) -> float:
    """The middle value (the lower of two); NaN for an empty list."""
    return sorted(values)[(len(values) - 1) // 2] if values else math.nan


APART = 0.05
"""Relative difference of two losses that is more than rounding: runs of one model with different recipes stay closer for hundreds of steps."""


def differences(run: Evidence, other: Evidence) -> list[str]:
    """Sentences: settings first, then the first steps and tensors that differ."""
    found = []
    if run.recipe != other.recipe:
        found.append(f"recipe: {run.recipe}, the other run {other.recipe}")
    mine, theirs = dict(run.settings()), dict(other.settings())
    skipped = ("logger.", "checkpoint.")
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name) and not name.startswith(skipped) and name != "mixed_precision":
            found.append(f"{name}: {mine.get(name, 'not set')}, the other run {theirs.get(name, 'not set')}")
    if not (mine and theirs):
        found.append("settings cannot be compared: precision.json of one of them has none")
    parts = [
        *_parting(run, other, "lr", "learning rate", limit=0.01),
        *_loss_scales(run, other),
        *_skips(run, other),
        *_parting(run, other, "loss", "loss"),
        *_parting(run, other, "grad_norm", "gradient norm", limit=0.5),
        *_tensors(run, other),
    ]
    return [*found, *sorted(parts, key=_step)]


def _step(sentence: str) -> float:
    """The step that a sentence begins with; sentences without one come last."""
    found = re.match(r"step (\d+):", sentence)
    return int(found[1]) if found else math.inf


def _parting(run: Evidence, other: Evidence, number: str, word: str, *, limit: float = APART) -> list[str]:
    mine, theirs = dict(run.curves.series(number)), dict(other.curves.series(number))
    both = [step for step in mine if step in theirs]
    if not both:
        where = "this run" if mine else "the other run" if theirs else ""
        only = f"only {where} has it" if not (mine and theirs) else "no step at which both runs have it"
        return [f"{word}: {only}"] if where else []
    for step in both:
        value, two = mine[step], theirs[step]
        same = math.isclose(value, two, rel_tol=limit) if math.isfinite(value) and math.isfinite(two) else value == two
        if not same and not (math.isnan(value) and math.isnan(two)):
            return [f"step {step}: {word} {value:.4g}, the other run {two:.4g}: the first difference above {limit:.0%}"]
    return [f"{word}: within {limit:.0%} of the other run's at every step that both have"]


def _loss_scales(run: Evidence, other: Evidence) -> list[str]:
    """The first step at which loss scales differ, if either run has one."""
    mine, theirs = dict(run.curves.series("loss_scale")), dict(other.curves.series("loss_scale"))
    both = [step for step in mine if step in theirs]
    if not both or all(mine[step] == theirs[step] == 1.0 for step in both):
        return []
    for step in both:
        if mine[step] != theirs[step]:
            return [f"step {step}: loss scale {mine[step]:g}, the other run {theirs[step]:g}: the first difference"]
    return ["loss scale: equal to the other run's at every step that both have"]


def _skips(run: Evidence, other: Evidence) -> list[str]:
    """Updates that only one of the runs skipped, the first of them and how many; empty if neither skipped any."""
    mine, theirs = _skipped(run), _skipped(other)
    both = {row["iteration"] for row in run.curves.rows} & {row["iteration"] for row in other.curves.rows}
    apart = sorted((mine ^ theirs) & both)
    if not both or (not mine and not theirs):
        return []
    if not apart:
        return [f"skipped updates: the same steps, {len(mine & both)} of the {len(both)} steps that both have"]
    skipped, applied = "skipped its update, the other run did not", "applied its update, the other run skipped it"
    how_many = f"{len(mine & both)} of the {len(both)} steps that both have were skipped"
    who = skipped if apart[0] in mine else applied
    return [f"step {apart[0]}: this run {who}; {how_many}, in the other run {len(theirs & both)}"]


def _skipped(run: Evidence) -> set[int]:
    return {row["iteration"] for row in run.curves.rows if row.get("applied") is False}


def _tensors(run: Evidence, other: Evidence) -> list[str]:
    """The first measured step that both have at which a tensor differs by more than a factor of two."""
    without = [which for which, one in (("this run", run), ("the other run", other)) if not one.measured]
    if without:
        verb = "have" if len(without) > 1 else "has"
        return [f"tensors cannot be compared: {' and '.join(without)} {verb} no statistics (logger.precision_every)"]
    theirs = {one.step: one for one in other.measured}
    if not any(one.step in theirs for one in run.measured):
        return ["tensors cannot be compared: no step was measured in both runs (logger.precision_every)"]
    for one in run.measured:
        if one.step not in theirs:
            continue
        rows = {row["linear"]: row for row in theirs[one.step].tables["linears"]}
        found = []
        for row in one.tables["linears"]:
            same = rows.get(row["linear"])
            two, mine = same.get("x_amax") if same is not None else None, row.get("x_amax")
            if mine and two and not 0.5 <= mine / two <= 2:
                found.append(f"{row['linear']} (amax of its input {mine:.3g}, in the other run {two:.3g})")
        if found:
            what = "the first measured step at which tensors differ by more than a factor of two"
            return [f"step {one.step}: {what}: {'; '.join(found[:4])}"]
    return ["tensors agree within a factor of two at every measured step that both have"]
