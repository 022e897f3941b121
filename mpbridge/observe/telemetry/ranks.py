"""The worst values over all ranks; the number of collectives and of bytes hardly depends on the world size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mpbridge.backend.devices.collectives import from_all, largest
from mpbridge.observe.telemetry.records import OPERANDS, SMALLEST, TABLES, WORDS

Tables = dict[str, list[list[Any]]]
_NONE, _NUMBER, _NAN = 0.0, 1.0, 2.0
"""What a rank's cell contains; the maximum over ranks is the kind of the combined cell, so that a single NaN gives NaN."""


def worst_of_all(tables: Mapping[str, Sequence[Sequence[Any]]]) -> Tables:
    """Tables with the rows of all ranks, in which a row of several has the worst value of each column; every rank calls it, and gets the same.

    The rows' names are gathered first (ranks of one pipeline stage have the same names, which are sent once). Three all-reduces over the cells of all
    tables follow, 8 bytes per value: the kinds of the cells, their extremes in both directions, and the channels that belong to an outlier.
    """
    own: Tables = {name: [list(row) for row in tables.get(name, ())] for name in TABLES}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    names: dict[tuple[Any, ...], None] = {}
    for keys in from_all([(name, *row[: _words(name)]) for name in TABLES for row in own[name]]):
        names.update(dict.fromkeys(keys))
    mine = {(name, *row[: _words(name)]): row for name in TABLES for row in own[name]}
    cells = [(key, at) for key in names for at in range(_words(key[0]), len(TABLES[key[0]]))]
    values = [mine[key][at] if key in mine else None for key, at in cells]
    found = _worst(values, [TABLES[key[0]][at] for key, at in cells])
    made: Tables = {name: [] for name in TABLES}
    left = iter(found)
    for key in names:
        made[key[0]].append([*key[1:], *(next(left) for _ in TABLES[key[0]][_words(key[0]) :])])
    return made


def _words(table: str) -> int:
    return WORDS if TABLES[table] is OPERANDS else 1


def _worst(values: Sequence[Any], columns: Sequence[str]) -> list[Any]:
    """The worst value of each cell over all ranks."""
    held = largest([_NONE if value is None else _NAN if value != value else _NUMBER for value in values])
    # both directions in one reduction
    numbers = [-math.inf if value is None or value != value else float(value) for value in values]
    turned = [-math.inf if value is None or value != value else -float(value) for value in values]
    both = largest(numbers + turned)
    high, low = both[: len(values)], [-value for value in both[len(values) :]]
    found: list[Any] = []
    for i, column in enumerate(columns):
        pick: Callable[[float, float], float] = min if column in SMALLEST else max
        worst = max(high[i], low[i], key=abs) if column == "staleness" else pick(high[i], low[i])
        whole = column in ("nonfinite", "x_channel") and math.isfinite(worst)
        found.append(None if held[i] == _NONE else math.nan if held[i] == _NAN else int(worst) if whole else worst)
    return _channels(found, values, columns)


def _channels(found: list[Any], values: Sequence[Any], columns: Sequence[str]) -> list[Any]:
    """Sets x_channel to the channel of the rank with the worst x_outlier, instead of the largest channel number."""
    at = [i for i, column in enumerate(columns) if column == "x_channel"]
    outlier = {i: i - 1 for i in at if columns[i - 1] == "x_outlier"}
    own = [values[i] if values[i] is not None and values[outlier[i]] == found[outlier[i]] else -1 for i in outlier]
    for i, channel in zip(outlier, largest([float(value) for value in own]), strict=True):
        found[i] = int(channel) if channel >= 0 else found[i]
    return found
