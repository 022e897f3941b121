"""The choice: one level for each unit, so that the damage is minimal within a cost budget (a multiple-choice knapsack)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

BINS, BINS_A_UNIT = 4096, 64
"""Steps of the budget: rounding all units' costs down hides at most 1/64 of it; a choice that turns out too expensive is searched for again below."""


def least(
    gains: Sequence[Mapping[str, float]], costs: Sequence[Mapping[str, float]], budget: float
) -> list[str] | None:
    """For each unit, the level that minimizes the sum of `gains` (damage, or any other quantity) while the sum of `costs` is at most `budget`.

    gains, costs: level -> number for each unit, the same levels in both. None: not even the cheapest levels are within the budget. The time grows
    with units x levels x max(BINS, BINS_A_UNIT x units).
    """
    cheapest = [min(cost.values()) for cost in costs]
    room = budget - math.fsum(cheapest)
    if room < -1e-9 * abs(budget):
        return None
    bins = max(BINS, BINS_A_UNIT * len(gains))
    step = max(room, 0.0) / bins
    names = [list(gain) for gain in gains]
    sizes = [_sizes(cost, low, step, bins) for cost, low in zip(costs, cheapest, strict=True)]
    best, picked = np.zeros(bins + 1), np.zeros((len(gains), bins + 1), dtype=np.int8)
    for number, gain in enumerate(gains):
        rows = np.full((len(gain), bins + 1), np.inf)
        for row, name in enumerate(names[number]):
            size = sizes[number][name]
            if size <= bins:
                rows[row, size:] = best[: bins + 1 - size] + gain[name]
        picked[number] = rows.argmin(0)
        best = rows.min(0)
    for left in range(bins, -1, -1):
        chosen = _traced(picked, names, sizes, left)
        if _sum(costs, chosen) <= budget * (1 + 1e-12):
            return _topped_up(chosen, gains, costs, budget)
    return None


def _traced(picked: np.ndarray, names: list[list[str]], sizes: list[dict[str, int]], left: int) -> list[str]:
    """The levels that led to the least gain within `left` bins."""
    chosen = []
    for number in reversed(range(len(names))):
        name = names[number][int(picked[number, left])]
        chosen.append(name)
        left -= sizes[number][name]
    return chosen[::-1]


def _sum(costs: Sequence[Mapping[str, float]], chosen: Sequence[str]) -> float:
    return math.fsum(cost[name] for cost, name in zip(costs, chosen, strict=True))


def _sizes(cost: Mapping[str, float], low: float, step: float, bins: int) -> dict[str, int]:
    """Bins that each level takes beyond the cheapest one, rounded down; bins + 1 means that it never fits."""
    found = {}
    for name, value in cost.items():
        more = value - low
        found[name] = 0 if more <= 0 else bins + 1 if step == 0 else min(bins + 1, math.floor(more / step + 1e-9))
    return found


def _topped_up(
    chosen: list[str], gains: Sequence[Mapping[str, float]], costs: Sequence[Mapping[str, float]], budget: float
) -> list[str]:
    """Spends what rounding left of the budget on the exchange that gains most, until none fits."""
    spent = _sum(costs, chosen)
    while True:
        swaps = [
            (gains[i][chosen[i]] - gains[i][name], i, name)
            for i in range(len(chosen))
            for name in gains[i]
            if gains[i][name] < gains[i][chosen[i]] and spent + costs[i][name] - costs[i][chosen[i]] <= budget
        ]
        if not swaps:
            return chosen
        _, number, name = max(swaps)
        spent += costs[number][name] - costs[number][chosen[number]]
        chosen[number] = name
