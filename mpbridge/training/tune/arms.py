"""What the proposal is compared with: simple rules that anybody could write down, and random choices at about the same cost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from mpbridge.training.tune.costs import Costs
from mpbridge.training.tune.decision_units import LOW, DecisionUnit, by_kind
from mpbridge.training.tune.knapsack import least
from mpbridge.training.tune.proposal import tail_of

DamageByLevel = Sequence[Mapping[str, float]]
"""For each unit: the levels that it can take -> their damage."""
TAIL = "last 15 %"
ALL_LOW = "all low"
KINDS = "whole kinds"
TUNED = "tuned"
NEAR = 0.95
"""Share of the proposal's cost that a random choice is raised to if its levels allow it."""


def uniform(units: Sequence[DecisionUnit], options: DamageByLevel, level: str, high: str) -> dict[str, str]:
    """Every unit at `level`; units that cannot take it in high precision."""
    return {unit.name: level if level in mine else high for unit, mine in zip(units, options, strict=True)}


def tail(units: Sequence[DecisionUnit], options: DamageByLevel, high: str) -> dict[str, str]:
    """The last 15 % of the layers high, the others low."""
    wanted = tail_of(units, high)
    return {
        unit.name: wanted[unit.name] if wanted[unit.name] in mine else high
        for unit, mine in zip(units, options, strict=True)
    }


def kinds(
    units: Sequence[DecisionUnit], options: DamageByLevel, costs: Costs, budget: float, swapped: bool
) -> dict[str, str] | None:
    """The best choice of whole kinds within the budget; None if there is none. swapped: the budget limits damage."""
    whole = by_kind(units)
    owner = {slot: number for number, kind in enumerate(whole) for slot in kind.slots}
    gains: list[dict[str, float]] = [{} for _ in whole]
    prices: list[dict[str, float]] = [{} for _ in whole]
    for number in range(len(whole)):
        members = [i for i, unit in enumerate(units) if owner[unit.slots[0]] == number]
        for level in set.intersection(*(set(options[i]) for i in members)):
            gains[number][level] = sum(options[i][level] for i in members)
            prices[number][level] = sum(costs[i][level] for i in members)
    found = least(prices, gains, budget) if swapped else least(gains, prices, budget)
    if found is None:
        return None
    return {unit.name: found[owner[unit.slots[0]]] for unit in units}


def at_random(
    units: Sequence[DecisionUnit], options: DamageByLevel, costs: Costs, limit: float, seed: int
) -> dict[str, str]:
    """Units drawn one by one, each set to a random level that it can take, as long as the cost stays within `limit`; then raised at random until the cost is close to it."""
    draw = random.Random(seed)
    chosen = [LOW if LOW in mine else min(mine, key=costs[i].__getitem__) for i, mine in enumerate(options)]
    spent = sum(costs[i][level] for i, level in enumerate(chosen))
    order = list(range(len(units)))
    draw.shuffle(order)
    for i in order:
        level = draw.choice(sorted(options[i]))
        more = costs[i][level] - costs[i][chosen[i]]
        if spent + more <= limit * (1 + 1e-9):
            chosen[i], spent = level, spent + more
    while spent < limit * NEAR:
        room = limit * (1 + 1e-9) - spent
        raises = [
            (i, level)
            for i, mine in enumerate(options)
            for level in sorted(mine)
            if 0 < costs[i][level] - costs[i][chosen[i]] <= room
        ]
        if not raises:
            break
        i, level = draw.choice(raises)
        chosen[i], spent = level, spent + costs[i][level] - costs[i][chosen[i]]
    return {unit.name: level for unit, level in zip(units, chosen, strict=True)}
