"""statistics.jsonl: the measurements of a run's tensors, one line per measured step. Loads no framework.

A line is {"schema", "iteration", "realization", "recipe", "why", "seconds", "nats_per_token", "notes", "operands": {"columns", "rows"}, "linears": ..., "weights": ...};
a table's rows are lists in the order of its columns, which keeps the lines of a model with a hundred layers short.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpbridge.common.files import lines_of

FILE = "statistics.jsonl"
"""Its name in the run's folder."""
SCHEMA = 1
OPERANDS = (
    "linear", "side", "copy", "gemms", "format", "scaling", "flushed", "saturated", "amax", "scale", "staleness", "sqnr", "row_error", "nonfinite",
)  # fmt: skip
"""One operand of a quantized linear. linear: global name; side: 'x', 'w', 'dy'; gemms: 'fprop+wgrad'; flushed, saturated: shares of its nonzero elements;
scale: the factor by which elements are multiplied before the cast (the median over blocks); staleness: log2 of the scale that the amax requires over
the stored one, delayed scaling only (below 0 saturates); sqnr: dB; row_error: median relative error of a row."""
LINEARS = (
    "linear", "x_amax", "x_rms", "x_outlier", "x_channel", "dy_amax", "dy_rms", "nonfinite", "grad_to_noise",
)  # fmt: skip
"""A linear's own tensors, quantized or not. x_outlier: amax of the largest input channel over the median channel's; x_channel: which one;
grad_to_noise: norm of the weight's gradient over the norm of what quantization added to it, on a sample of 64 x 64 elements, first micro-batch."""
WEIGHTS = ("parameter", "rms", "amax", "nonfinite", "main_gap", "exp_avg_rms", "exp_avg_sq_mean", "peak")
"""A parameter after the update. main_gap: share of its elements that differ from the main weight rounded to its dtype; peak: share of
its sum of squares that its largest element holds."""
TABLES: Mapping[str, tuple[str, ...]] = {"operands": OPERANDS, "linears": LINEARS, "weights": WEIGHTS}
WORDS = 6
"""Number of leading columns of OPERANDS that are words, the same on every rank."""
SMALLEST = frozenset({"sqnr", "grad_to_noise", "scale"})
"""Columns in which the smallest value is the worst; in the others it is the largest, in staleness the largest magnitude."""


def line(facts: Mapping[str, Any], tables: Mapping[str, Sequence[Sequence[Any]]]) -> str:
    """One line of the file."""
    body = {
        name: {"columns": list(TABLES[name]), "rows": [[_short(value) for value in row] for row in rows]}
        for name, rows in tables.items()
        if rows
    }
    return json.dumps({"schema": SCHEMA, **facts, **body}, separators=(",", ":")) + "\n"


def _short(value: Any) -> Any:
    """Rounds to five digits; JSON has no NaN, so non-finite values become words that float() reads."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)


def kept(path: Path, after: int) -> list[str]:
    """The lines of a file that belong to steps up to `after`; none if it is 0. Unreadable lines are omitted with a warning."""
    if not after or not path.is_file():
        return []
    found: list[str] = []
    lost = count = 0
    for raw in lines_of(path):
        count += 1
        try:
            if int(json.loads(raw)["iteration"]) <= after:
                found.append(raw.rstrip("\n") + "\n")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            lost += 1
    if lost:
        from mpbridge.common.report.console import warn  # imports rich, which readers do not need

        warn(f"{path}: {lost} of {count} lines cannot be read and are skipped")
    return found


def headlines(tables: Mapping[str, Iterable[Sequence[Any]]]) -> dict[str, float]:
    """Key figures of a measured step for trackers: the worst value of each over all tensors."""
    found: dict[str, float] = {}
    for table, column, name in _HEADLINES:
        at = TABLES[table].index(column)
        values = [float(row[at]) for row in tables.get(table, ()) if isinstance(row[at], (int, float))]
        values = [abs(value) if column == "staleness" else value for value in values if math.isfinite(value)]
        if values:
            found[f"precision/{name}"] = min(values) if column in SMALLEST else max(values)
    return found


_HEADLINES = (
    ("operands", "flushed", "flushed_max"),
    ("operands", "saturated", "saturated_max"),
    ("operands", "sqnr", "sqnr_min"),
    ("operands", "staleness", "staleness_max"),
    ("linears", "grad_to_noise", "grad_to_noise_min"),
    ("linears", "x_amax", "input_amax_max"),
    ("linears", "x_outlier", "input_outlier_max"),
    ("linears", "dy_amax", "gradient_amax_max"),
)
