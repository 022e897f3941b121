"""Reads statistics.jsonl: a small file in full, a large one in samples. Loads no framework."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mpbridge.common.files import regular
from mpbridge.observe.telemetry.records import FILE, LINEARS, OPERANDS, SCHEMA, TABLES, WEIGHTS, WORDS

LARGEST = 32 << 20
"""Maximum number of bytes that are read: about 100 measured steps of a model with a hundred layers. A longer file is sampled."""

_STEP = re.compile(rb'"iteration": ?(\d{1,18})')
_WORDS = ("nan", "inf", "-inf")
_WORDED = frozenset({*OPERANDS[:WORDS], LINEARS[0], WEIGHTS[0]})
_TEXT, _NUMBER = (str,), (float, int, type(None))
"""Types of the values in a column of words, and in any other column."""


class TensorRow(Mapping[str, Any]):
    """A tensor's numbers at one step by column name; all rows of a file share the names."""

    __slots__ = ("_at", "_values")

    def __init__(self, at: Mapping[str, int], values: Sequence[Any]) -> None:
        self._at, self._values = at, values

    def __getitem__(self, name: str) -> Any:
        return self._values[self._at[name]]

    def get(self, name: str, default: Any = None) -> Any:
        """Same as `dict.get`."""
        at = self._at.get(name)
        return default if at is None else self._values[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


class MeasuredStep:
    """One line of the file: `tables["operands"]` is a list of rows."""

    def __init__(self, data: Mapping[str, Any], names: dict[tuple[str, ...], dict[str, int]] | None = None) -> None:
        self.step = int(data["iteration"])
        self.facts = {name: value for name, value in data.items() if name not in TABLES}
        known = {} if names is None else names
        self.tables: dict[str, list[TensorRow]] = {name: _rows(name, data.get(name), known) for name in TABLES}


def _rows(name: str, table: Any, names: dict[tuple[str, ...], dict[str, int]]) -> list[TensorRow]:
    """A table's rows; numbers written as words are converted back. Raises ValueError if columns are missing, a row's length differs from the number of
    columns, or a value has the wrong type for its column."""
    if not isinstance(table, Mapping):
        return []
    columns = tuple(map(str, table["columns"]))
    if missing := set(TABLES[name]) - set(columns):
        raise ValueError(f"no column {', '.join(sorted(missing))}")
    at = names.setdefault(columns, {column: i for i, column in enumerate(columns)})
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
        found.append(TensorRow(at, row))
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
    names: dict[tuple[str, ...], dict[str, int]] = {}
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
            one = MeasuredStep(data, names)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            cut = number == len(places) and not whole
            made.faults.append(f"{FILE}, line {number}: {'truncated' if cut else 'unreadable'}, skipped")
            continue
        for later in [known for known in found if known >= one.step]:
            del found[later]
        found[one.step] = one
    made.measured = [found[step] for step in sorted(found)]
    if made.left_out:
        made.faults.append(
            f"{FILE} has {size / 1e6:,.0f} MB: {len(found)} of its {len(found) + made.left_out} measurements were read, evenly over the run"
            + (f" and closer together from step {within[0][0]} to {within[0][1]}" if within else "")
        )


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
