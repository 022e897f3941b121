"""The units of decision (linears that must share one format), and choices of a level for each: the best within a budget (a multiple-choice knapsack), simple rules and
random ones to compare with, and the recipe that states one."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpbridge.planning.rules.gemm_shapes import spans
from mpbridge.precision.config import MixedPrecisionConfig

_EXPERTS = re.compile(r"^(.*\bexperts)\.(?:local_experts\.)?\d+\.")
LOW = "low"
"""The recipe's own level; other levels are named by the words of `modules:`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLinear:
    """A linear that the recipe quantizes."""

    slot: str
    """Global name."""
    below: str
    """Name below its layer."""
    layer: int
    """0-based."""
    weight: Hashable
    """The same for linears that share one weight."""

    @property
    def glob(self) -> str:
        """The glob that names it within its layer in a recipe; for an expert, that of all experts of the layer."""
        found = _EXPERTS.match(self.below)
        return f"{found.group(1)}.*" if found else self.below


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionUnit:
    """One decision."""

    slots: tuple[str, ...]
    places: tuple[tuple[int, str], ...]
    """(layer, glob below it) that name its linears in a recipe."""

    @property
    def kind(self) -> str:
        """Its globs; the same for corresponding units of all layers."""
        return " + ".join(dict.fromkeys(glob for _, glob in self.places))

    @property
    def layer(self) -> int:
        """The layer of its first linear."""
        return self.places[0][0]

    @property
    def name(self) -> str:
        """'3.mlp.linear_fc1'; unique if it is the only unit of its kind in the layer."""
        return f"{self.layer}.{self.kind}"


def units(places: Iterable[TunedLinear], inputs: Mapping[str, Hashable] | None = None) -> list[DecisionUnit]:
    """The decisions, in the order of their first linears. The experts of a layer form one; so do linears that share a weight, and linears that read the same input.

    inputs: slot -> a key that is equal for linears of one layer that read the same tensor (a stack may fuse them into one GEMM); None: the linears
    are already fused.
    """
    known = list(places)
    root: dict[Hashable, int] = {}
    group = list(range(len(known)))

    def find(index: int) -> int:
        while group[index] != index:
            index = group[index]
        return index

    for index, place in enumerate(known):
        keys: list[Hashable] = [("weight", place.weight)]
        if place.glob != place.below:
            keys.append(("experts", place.layer, place.glob))
        elif inputs is not None and place.slot in inputs:
            keys.append(("input", place.layer, place.below.rpartition(".")[0], inputs[place.slot]))
        for key in keys:
            first = root.setdefault(key, index)
            low, high = sorted((find(first), find(index)))
            group[high] = low
    members: dict[int, list[TunedLinear]] = {}
    for index, place in enumerate(known):
        members.setdefault(find(index), []).append(place)
    return [
        DecisionUnit(
            slots=tuple(place.slot for place in several),
            places=tuple(dict.fromkeys((place.layer, place.glob) for place in several)),
        )
        for several in members.values()
    ]


def by_kind(found: Iterable[DecisionUnit]) -> list[DecisionUnit]:
    """Whole kinds as decisions: one unit per kind, with all layers."""
    kinds: dict[str, list[DecisionUnit]] = {}
    for unit in found:
        kinds.setdefault(unit.kind, []).append(unit)
    return [
        DecisionUnit(
            slots=tuple(slot for unit in several for slot in unit.slots),
            places=tuple(place for unit in several for place in unit.places),
        )
        for several in kinds.values()
    ]


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
        if math.fsum(cost[name] for cost, name in zip(costs, chosen, strict=True)) <= budget * (1 + 1e-12):
            return chosen
    return None


def _traced(picked: np.ndarray, names: list[list[str]], sizes: list[dict[str, int]], left: int) -> list[str]:
    """The levels that led to the least gain within `left` bins."""
    chosen = []
    for number in reversed(range(len(names))):
        name = names[number][int(picked[number, left])]
        chosen.append(name)
        left -= sizes[number][name]
    return chosen[::-1]


def _sizes(cost: Mapping[str, float], low: float, step: float, bins: int) -> dict[str, int]:
    """Bins that each level takes beyond the cheapest one, rounded down; bins + 1 means that it never fits."""
    found = {}
    for name, value in cost.items():
        more = value - low
        found[name] = 0 if more <= 0 else bins + 1 if step == 0 else min(bins + 1, math.floor(more / step + 1e-9))
    return found


Costs = list[dict[str, float]]
"""For each unit: level -> cost."""
Choice = Mapping[str, str]
"""Unit's name -> level."""
TAIL_SHARE = 0.15
"""NVIDIA's rule keeps the last 15 % of the layers in BF16 (arXiv 2509.25149)."""


def configured(
    base: MixedPrecisionConfig, units: Sequence[DecisionUnit], choice: Choice, high: str
) -> MixedPrecisionConfig:
    """The config that gives each unit its level. high: the word for high precision ('bf16')."""
    layers = _layers(units, choice)
    start, end = (0, 0) if base.modules else _edges(layers, high)
    total = max(layers, default=-1) + 1
    edges = {*range(start), *range(total - end, total)}
    kinds: dict[str, dict[str, list[int]]] = {}
    for unit in units:
        level = choice[unit.name]
        for layer, glob in unit.places:
            if level != LOW and layer not in edges:
                kinds.setdefault(glob, {}).setdefault(level, []).append(layer)
    rules: dict[str, Any] = {
        name: list(said) if isinstance(said, list) else said for name, said in (base.modules or {}).items()
    }
    for glob, levels in kinds.items():
        said = [{"layers": spans(numbers), "precision": level} for level, numbers in levels.items()]
        before = rules.get(glob)
        known = [] if before is None else before if isinstance(before, list) else [before]
        rules[glob] = [*known, *said]
    changes: dict[str, Any] = {"modules": rules or None}
    if start or end:
        changes |= {"num_layers_at_start_in_bf16": start, "num_layers_at_end_in_bf16": end}
        changes["first_last_layers_bf16"] = True
    return base.derive(**changes)


def _layers(units: Sequence[DecisionUnit], choice: Choice) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for unit in units:
        for layer, _ in unit.places:
            found.setdefault(layer, set()).add(choice[unit.name])
    return found


def _edges(layers: Mapping[int, set[str]], high: str) -> tuple[int, int]:
    """How many layers at either end are entirely in high precision; (0, 0) if all are."""
    order = sorted(layers)
    whole = [layers[layer] == {high} for layer in order]
    if all(whole):
        return 0, 0
    start, end = whole.index(False), whole[::-1].index(False)
    # a layer without linears is in no list, but would be counted
    return (start if order[:start] == list(range(start)) else 0), (end if order[-1] - order[0] + 1 == len(order) else 0)


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
    """The last 15 % of the layers high, at least one, the others low."""
    total = max((layer for unit in units for layer, _ in unit.places), default=0) + 1
    first = total - max(1, math.ceil(TAIL_SHARE * total - 1e-9))
    low = uniform(units, options, LOW, high)
    return {unit.name: high if any(at >= first for at, _ in unit.places) else low[unit.name] for unit in units}


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
