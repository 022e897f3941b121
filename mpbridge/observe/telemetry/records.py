"""statistics.jsonl: the measurements of a run's tensors, one line per measured step, written and read. Loads no framework.

A line is {"schema", "iteration", "realization", "recipe", "why", "seconds", "nats_per_token", "notes", "operands": {"columns", "rows"}, "linears": ..., "weights": ...};
a table's rows are lists in the order of its columns, which keeps the lines of a model with a hundred layers short.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mpbridge.common.files import lines_of, regular

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


LARGEST = 32 << 20
"""Maximum number of bytes that are read: about 100 measured steps of a model with a hundred layers. A longer file is sampled."""

_STEP = re.compile(rb'"iteration": ?(\d{1,18})')
_WORDS = ("nan", "inf", "-inf")
_WORDED = frozenset({*OPERANDS[:WORDS], LINEARS[0], WEIGHTS[0]})
_TEXT, _NUMBER = (str,), (float, int, type(None))
"""Types of the values in a column of words, and in any other column."""


TensorRow = dict[str, Any]
"""A tensor's numbers at one step by column name."""


class MeasuredStep:
    """One line of the file: `tables["operands"]` is a list of rows."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.step = int(data["iteration"])
        self.facts = {name: value for name, value in data.items() if name not in TABLES}
        self.tables: dict[str, list[TensorRow]] = {name: _rows(name, data.get(name)) for name in TABLES}


def _rows(name: str, table: Any) -> list[TensorRow]:
    """A table's rows; numbers written as words are converted back. Raises ValueError if columns are missing, a row's length differs from the number of
    columns, or a value has the wrong type for its column."""
    if not isinstance(table, Mapping):
        return []
    columns = tuple(map(str, table["columns"]))
    if missing := set(TABLES[name]) - set(columns):
        raise ValueError(f"no column {', '.join(sorted(missing))}")
    kinds = [_TEXT if column in _WORDED else _NUMBER for column in columns]
    found = []
    for row in table["rows"]:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} values for {len(columns)} columns")
        for i, value in enumerate(row):
            if value.__class__ not in kinds[i]:
                if value not in _WORDS:
                    raise ValueError(f"{columns[i]} is a {type(value).__name__}")
                row[i] = float(value)
            elif value.__class__ is int:
                float(value)  # raises OverflowError for an integer that no float can hold
        found.append(dict(zip(columns, row, strict=True)))
    return found


@dataclass(slots=True)
class RunStatistics:
    """A run's statistics, as far as they could be read."""

    measured: list[MeasuredStep] = field(default_factory=list)
    """Oldest first; of a repeated step, the last repetition."""
    faults: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""
    left_out: int = 0
    """Number of measured steps that were not read because the file is too large."""


def read(folder: Path, *, within: Sequence[tuple[int, int]] = ()) -> RunStatistics:
    """The statistics in `folder`, which may also be the file itself.

    A file of more than LARGEST bytes is sampled evenly, including the first and the last measurement; if ranges of steps are given (`within`), half of the sample is from them.
    """
    path = folder / FILE if folder.is_dir() else folder
    made = RunStatistics()
    try:
        with regular(path) as stream:
            _read_lines(stream, made, within)
    except FileNotFoundError:
        made.faults = [f"no {FILE}: nothing was measured of its tensors (logger.precision_every, 100 steps by default)"]
    except OSError as error:
        made.faults = [f"{path}: {error.strerror or error}"]
    return made


def _read_lines(stream: IO[bytes], made: RunStatistics, within: Sequence[tuple[int, int]]) -> None:
    places, size, whole = _places(stream)
    wanted = None
    if size > LARGEST:
        wanted = _sample([step for _, _, step in places], max(2, LARGEST * len(places) // size), within)
    found: dict[int, MeasuredStep] = {}
    for number, (offset, length, step) in enumerate(places, start=1):
        if wanted is not None and step is not None and step not in wanted:
            made.left_out += 1
            continue
        stream.seek(offset)
        try:
            data = json.loads(stream.read(length))
            if data.get("schema") != SCHEMA:
                made.faults.append(f"{FILE}, line {number}: schema {data.get('schema')!r}, this version reads {SCHEMA}")
                continue
            one = MeasuredStep(data)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            cut = number == len(places) and not whole
            made.faults.append(f"{FILE}, line {number}: {'truncated' if cut else 'unreadable'}, skipped")
            continue
        for later in [known for known in found if known >= one.step]:
            del found[later]
        found[one.step] = one
    made.measured = [found[step] for step in sorted(found)]
    if made.left_out:
        of = f"{FILE} has {size / 1e6:,.0f} MB: {len(found)} of its {len(found) + made.left_out} measurements were read"
        closer = f" and closer together from step {within[0][0]} to {within[0][1]}" if within else ""
        made.faults.append(f"{of}, evenly over the run{closer}")


_Place = tuple[int, int, int | None]
"""Offset and length of a line, and its step, if the start of the line shows it."""


def _places(stream: IO[bytes]) -> tuple[list[_Place], int, bool]:
    """The lines of a file, its size, and whether the last line is complete. At most LARGEST bytes of a line are read."""
    places: list[_Place] = []
    offset, last = 0, b"\n"
    while line := stream.readline(LARGEST):
        step = _STEP.search(line, 0, 200)
        places.append((offset, len(line), int(step[1]) if step else None))
        offset, last = offset + len(line), line[-1:]
    return places, offset, last == b"\n"


def _sample(steps: Sequence[int | None], room: int, within: Sequence[tuple[int, int]]) -> set[int]:
    """About `room` of the steps, half of them from the ranges `within`."""
    known = sorted({step for step in steps if step is not None})
    chosen: set[int] = set()
    for low, high in within:
        part = [step for step in known if low <= step <= high]
        chosen.update(_evenly(part, room // 2 // len(within)))
    return chosen | set(_evenly(known, max(2, room - len(chosen))))


def _evenly(steps: Sequence[int], count: int) -> list[int]:
    """`count` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= count or count < 2:
        return list(steps[: max(count, 0)])
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
