"""Curves of runs from their metrics.jsonl, read even if the file is damaged, drawn in a terminal or as a picture. Loads no framework."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common.errors import BadValue
from mpbridge.common.files import lines_of
from mpbridge.common.report.history import PRECISION

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
            elif "eval_loss" in row:
                evaluations[row["iteration"]] = row
            else:
                rows[row["iteration"]] = row
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
        at = (
            round((x - left) / (right - left) * (2 * width - 1)),
            # halves, since the difference of two large numbers may be none
            round((high / 2 - y / 2) / (high / 2 - low / 2) * (4 * height - 1)),
        )
        for column, row in _between(last or at, at):
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        last = at
    shown = [_number(10**value if log else value) for value in (high, high / 2 + low / 2, low)]
    margin = max(map(len, shown))
    labels = {0: shown[0], height // 2: shown[1], height - 1: shown[2]}
    lines = [
        f"{labels.get(i, ''):>{margin}} │{''.join(chr(0x2800 + cell) for cell in row)}" for i, row in enumerate(cells)
    ]
    ends = f"{left:g}", f"{right:g}"
    return [*lines, " " * (margin + 2) + ends[0] + ends[1].rjust(width - len(ends[0]))]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = max(0.5, abs(low) * 1e-9)  # around one value, however large
    return (low, high) if high > low else (low - room, high + room)


def _between(first: tuple[int, int], last: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(last[0] - first[0]), abs(last[1] - first[1]), 1)
    return [
        (first[0] + round((last[0] - first[0]) * i / steps), first[1] + round((last[1] - first[1]) * i / steps))
        for i in range(steps + 1)
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# --- as a picture --------------------------------------------------------------------------------------------------------------------------
_FP32_LARGEST = 3.4028234663852886e38
"""What is larger was not computed by a run, and matplotlib cannot label it."""


def picture(runs: Sequence[Curves], path: Path) -> None:
    """Draws all curves of all runs in one picture. Raises MpbridgeError without matplotlib, BadValue if the picture cannot be written."""
    from mpbridge.common.report.pictures import pyplot, save

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
