"""What a run's folder tells, read without any framework: the audits in precision.json, the curves in metrics.jsonl (even if the file is damaged).

Drawn in a terminal, or as pictures through matplotlib, if that is installed; bars of time and memory too."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common import files
from mpbridge.common.errors import BadValue, MpbridgeError
from mpbridge.common.files import lines_of, text_of
from mpbridge.common.shipped import install

PRECISION = "precision.json"
"""File in the run's folder: what was requested, decided, overridden and found."""


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The audits of the run in `folder`, oldest first. Raises BadValue if there are none."""
    path = folder / PRECISION if folder.is_dir() else folder
    try:
        section = json.loads(text_of(path, kind="json"))["audit"]
        history = [_audit(one) for one in section["history"]]
        if not history:
            raise ValueError("no audit")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise BadValue(
            f"{path} has no audits (expected the precision.json of a run: `mpbridge train ... logger.log_dir=DIR`)"
        ) from None
    return history


def _audit(one: Any) -> dict[str, Any]:
    """The audit, checked to have everything that readers need. Raises ValueError otherwise."""
    audit = {"stage": "", "reason": "", "recipe": "", "faults": [], "not_observed": {}, **one}
    facts, faults = audit["facts"], audit["faults"]
    good = all(isinstance(audit[name], str) for name in ("stage", "reason", "recipe"))
    good = good and type(audit["step"]) is int and type(audit["ok"]) is bool
    good = good and isinstance(audit["not_observed"], (dict, list)) and isinstance(faults, list)
    good = good and isinstance(facts, dict) and all(type(fact) is list and len(fact) == 3 for fact in facts.values())
    if not good:
        raise ValueError("not an audit's short form")
    return audit


def changes(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> list[str]:
    """What an audit found differently from the previous one, as 'exp_avg: found bf16, before fp32'; counts that vary naturally are omitted."""
    lines: list[str] = []
    if before is None or before["stage"] != after["stage"]:
        return lines
    for subject, (promised, found, state) in after["facts"].items():
        old = before["facts"].get(subject)
        if old is None:
            continue
        if (old[0], old[2]) != (promised, state) or (old[1] != found and subject not in _VARYING):
            otherwise = "" if old[0] == promised else f", promised {promised} instead of {old[0]}"
            lines.append(f"{subject}: {found} ({state}), before {old[1]} ({old[2]}){otherwise}")
    return lines


_VARYING = frozenset({"gradient norm", "weights moved", "loss scale", "quantized GEMMs"})

# --- pictures ------------------------------------------------------------------------------------------------------------------------------
MISSING = f"matplotlib is not installed ({install('plot')})"


def drawable() -> bool:
    """Whether pictures can be drawn, which is said on stderr if not: the caller checks before expensive work, and continues without."""
    import importlib.util

    there = False
    with contextlib.suppress(ValueError):  # it is in sys.modules without a spec
        there = importlib.util.find_spec("matplotlib") is not None
    if not there:
        from mpbridge.common.report.console import warn

        warn(f"no picture: {MISSING}")
    return there


def pyplot() -> Any:
    """matplotlib's pyplot without a display. Raises MpbridgeError with the extra's name where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise MpbridgeError(f"no picture: {MISSING}") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of bars: name -> parts in order."""

    title: str
    unit: str
    bars: Mapping[str, Mapping[str, float]]


def stacked_bars(path: Path, panels: Sequence[Panel]) -> None:
    """Writes a picture of the panels, one above the other, with a horizontal stacked bar for each name. Raises MpbridgeError
    if matplotlib is missing, BadValue if the file cannot be written."""
    plt = pyplot()
    height = sum(2.2 + 0.6 * len(panel.bars) for panel in panels)
    figure = plt.figure(figsize=(10, height), layout="constrained")
    for panel, part in zip(panels, figure.subfigures(len(panels), 1, squeeze=False)[:, 0], strict=True):
        _draw(part.subplots(), panel, plt.get_cmap("tab20"))
        # the layout makes room for a part's legend, and none for one that hangs below its axes
        part.legend(fontsize=7, ncol=4, loc="outside lower center")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Writes a figure in the format of the name's ending (PNG without one) and closes it. Raises BadValue if it cannot be written."""
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=110, format=path.suffix.lstrip(".") or "png")
        files.write(path, drawn.getvalue())
    except (OSError, ValueError) as error:
        raise BadValue(f"picture {path} cannot be written: {files.why(error)}") from None
    finally:
        pyplot().close(figure)


def _draw(axes: Any, panel: Panel, colours: Any) -> None:
    parts = list(dict.fromkeys(part for bar in panel.bars.values() for part in bar))
    for index, part in enumerate(parts):
        left = [sum(bar.get(earlier, 0.0) for earlier in parts[:index]) for bar in panel.bars.values()]
        width = [bar.get(part, 0.0) for bar in panel.bars.values()]
        axes.barh(list(panel.bars), width, left=left, label=part, color=colours(index % 20))
    axes.set(xlabel=panel.unit, title=panel.title)
    axes.invert_yaxis()


# --- curves --------------------------------------------------------------------------------------------------------------------------------
METRICS = "metrics.jsonl"
CURVES: Mapping[str, tuple[str, bool]] = {
    "loss": ("loss, nats per token", False),
    "grad_norm": ("gradient norm before clipping", True),
    "loss_scale": ("loss scale", True),
    "tokens_per_second": ("tokens per second", False),
}
"""Number in metrics.jsonl -> (label with its unit, whether its axis is logarithmic)."""

_NUMBERS = (*CURVES, "eval_loss", "lr")
"""The keys of a line that are read as a number or null."""
_COUNTS = ("nonfinite_steps", "skipped_steps", "consumed_samples")


@dataclass(slots=True)
class Curves:
    """One run's numbers by step."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Training steps in order; a repeated step has its last values."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What could not be read, as sentences."""

    def series(self, number: str) -> list[tuple[int, float]]:
        """(step, value) of the steps that have the value; NaN and infinities are kept."""
        return [(row["iteration"], row[number]) for row in self.rows if isinstance(row.get(number), (int, float))]


def read_curves(folder: Path) -> Curves:
    """The run in `folder`, or in a metrics file. Raises BadValue if there is no file, or no complete line in it, unless it is of a run that took no step."""
    path = folder / METRICS if folder.is_dir() else folder
    made = Curves((folder if folder.is_dir() else folder.parent).resolve().name)
    rows: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    number = 0
    try:
        for number, line in enumerate(lines_of(path), start=1):
            row = _row(line)
            if row is None:
                kind = "unreadable" if line.endswith("\n") else "truncated"
                made.faults.append(f"{METRICS}, line {number}: {kind}, skipped")
            else:
                (evaluations if "eval_loss" in row else rows)[row["iteration"]] = row
    except OSError as error:
        raise BadValue(
            f"{path}: {error.strerror or error} (expected the folder of a run: `mpbridge train ... logger.log_dir=DIR`)"
        ) from None
    if not rows and not evaluations and (number or not (path.parent / PRECISION).is_file()):
        raise BadValue(
            f"{path} has no readable step ({number} lines), expected the {METRICS} of a run: `mpbridge train ... logger.log_dir=DIR`"
        )
    made.rows = [rows[step] for step in sorted(rows)]
    made.evaluations = [evaluations[step] for step in sorted(evaluations)]
    return made


def _row(line: str) -> dict[str, Any] | None:
    """A line's numbers, with the words for non-finite ones converted back; None for any other line, or one with other types in place of numbers."""
    try:
        row = json.loads(line)
        row["iteration"] = int(row["iteration"])
        found = {name: float(value) if value in ("nan", "inf", "-inf") else value for name, value in row.items()}
        sizes = [float(found[name]) for name in _NUMBERS if found.get(name) is not None]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    good = len(sizes) == sum(type(found.get(name)) in (int, float) for name in _NUMBERS)
    good = good and all(type(found.get(name, 0)) is int for name in _COUNTS)
    return found if good and 0 <= row["iteration"] < 1 << 53 and type(found.get("applied", True)) is bool else None


# --- in a terminal -------------------------------------------------------------------------------------------------------------------------
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character by row and column."""


def terminal(
    points: Sequence[tuple[float, float]], *, width: int = 72, height: int = 10, log: bool = False
) -> list[str]:
    """Lines of a braille plot: two by four points per character, axis labels left and below; empty if no value is finite."""
    good = [(x, math.log10(y) if log else y) for x, y in points if math.isfinite(y) and (y > 0 or not log)]
    if not good:
        return []
    (left, right), (low, high) = (_range([point[i] for point in good]) for i in (0, 1))
    cells = [[0] * width for _ in range(height)]
    last: tuple[int, int] | None = None
    for x, y in good:
        # halves, since the difference of two large numbers may be none
        down = round((high / 2 - y / 2) / (high / 2 - low / 2) * (4 * height - 1))
        at = round((x - left) / (right - left) * (2 * width - 1)), down
        for column, row in _between(last or at, at):
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        last = at
    shown = [_number(10**value if log else value) for value in (high, high / 2 + low / 2, low)]
    margin = max(map(len, shown))
    labels = {0: shown[0], height // 2: shown[1], height - 1: shown[2]}
    drawn = ("".join(chr(0x2800 + cell) for cell in row) for row in cells)
    lines = [f"{labels.get(i, ''):>{margin}} │{row}" for i, row in enumerate(drawn)]
    ends = f"{left:g}", f"{right:g}"
    return [*lines, " " * (margin + 2) + ends[0] + ends[1].rjust(width - len(ends[0]))]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = max(0.5, abs(low) * 1e-9)  # around one value, however large
    return (low, high) if high > low else (low - room, high + room)


def _between(first: tuple[int, int], last: tuple[int, int]) -> list[tuple[int, int]]:
    right, down = last[0] - first[0], last[1] - first[1]
    steps = max(abs(right), abs(down), 1)
    return [(first[0] + round(right * i / steps), first[1] + round(down * i / steps)) for i in range(steps + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# --- as a picture --------------------------------------------------------------------------------------------------------------------------
_FP32_LARGEST = 3.4028234663852886e38
"""What is larger was not computed by a run, and matplotlib cannot label it."""


def picture(runs: Sequence[Curves], path: Path) -> None:
    """Draws all curves of all runs in one picture. Raises MpbridgeError without matplotlib, BadValue if the picture cannot be written."""
    plt = pyplot()
    figure, all_axes = plt.subplots(2, 2, figsize=(12, 7))
    for (number, (label, log)), axes in zip(CURVES.items(), all_axes.flat, strict=True):
        for run in runs:
            points = [(x, y) for x, y in run.series(number) if abs(y) <= _FP32_LARGEST and (y > 0 or not log)]
            if points and not (number == "loss_scale" and {y for _, y in points} == {1.0}):
                axes.plot(*zip(*points, strict=True), linewidth=1.1, label=run.name)
        if number == "loss":
            for run in runs:
                held = [(row["iteration"], y) for row in run.evaluations if abs(y := row["eval_loss"]) <= _FP32_LARGEST]
                if held:
                    axes.plot(*zip(*held, strict=True), "o", markersize=3, label=f"{run.name}, held out")
        axes.set(xlabel="step", ylabel=label, yscale="log" if log and axes.lines else "linear")
        axes.grid(alpha=0.3)
        axes.set_visible(bool(axes.lines))
        if axes.lines:
            axes.legend(fontsize=8)
        if log and axes.lines:  # 6, not 6 x 10^0
            axes.yaxis.set_major_formatter("{x:g}")
            low, high = axes.get_ylim()
            if high < 10 * low:
                axes.yaxis.set_minor_formatter("{x:g}")
    figure.tight_layout()
    save(figure, path)
