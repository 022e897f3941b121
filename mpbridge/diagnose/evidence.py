"""Everything that a run's folder tells: metrics, statistics, audits, events, settings, and what of it could not be read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.errors import BadValue
from mpbridge.report.curves import Curves, read_curves
from mpbridge.report.events import EVENTS
from mpbridge.report.history import PRECISION, read_history
from mpbridge.telemetry.records import Measured, read


@dataclass(slots=True)
class Evidence:
    """One run, read back."""

    folder: Path
    curves: Curves
    measured: list[Measured] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    precision: dict[str, Any] = field(default_factory=dict)
    """precision.json: recipe, engine, what was written, versions."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's settings, where timing.json has them (a run that was stopped early has none)."""
    gaps: list[str] = field(default_factory=list)
    """What could not be read, and so cannot be told."""

    @property
    def recipe(self) -> str:
        """The recipe that the run began with."""
        return str(self.precision.get("recipe") or "unknown recipe")

    def series(self, table: str, row: str, number: str, *, key: str) -> list[tuple[int, float]]:
        """(step, value) of one number of one tensor over the measured steps. key: the column that names a row."""
        found = []
        for one in self.measured:
            for values in one.tables[table]:
                if values.get(key) == row and isinstance(values.get(number), (int, float)):
                    found.append((one.step, float(values[number])))
                    break
        return found

    def names(self, table: str, key: str) -> list[str]:
        """The rows of a table, in the order of the model."""
        return list(dict.fromkeys(str(values[key]) for one in self.measured for values in one.tables[table]))

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Dotted settings of the run, as far as its files have them."""
        for section, values in self.config.items():
            if isinstance(values, dict):
                yield from ((f"{section}.{name}", value) for name, value in values.items())
            else:
                yield section, values


def gather(folder: Path) -> Evidence:
    """Reads a run's folder. Raises BadValue where there is no run; everything else that is missing or damaged is among the gaps."""
    curves = read_curves(folder)
    made = Evidence(folder, curves, gaps=list(curves.faults))
    if not folder.is_dir():
        made.gaps.append("a metrics file alone: no statistics, audits, events or settings")
        return made
    made.measured, faults = read(folder)
    made.gaps += faults
    if not made.measured and not faults:
        made.gaps.append("no step was measured: the run ended before its first one (logger.precision_every)")
    try:
        made.audits = read_history(folder)
    except BadValue:
        made.gaps.append(f"{PRECISION} holds no audits that this version can read")
    made.precision = _json(folder / PRECISION)
    made.config = _json(folder / "timing.json").get("config") or {}
    made.events = _events(folder / EVENTS, made.gaps)
    return made


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _events(path: Path, gaps: list[str]) -> list[dict[str, Any]]:
    """What happened besides steps; the file is only there where anything did."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            found.append({**row, "iteration": int(row["iteration"]), "event": str(row["event"])})
        except (ValueError, KeyError, TypeError, RecursionError):
            gaps.append(f"{EVENTS}, line {number}: not readable, left out")
    return found


def finite(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points with a finite value."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def median(values: list[float]) -> float:
    """The middle value, the lower one of two; NaN of nothing."""
    return sorted(values)[(len(values) - 1) // 2] if values else math.nan
