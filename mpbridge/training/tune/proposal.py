"""From a level for each unit to a recipe: edge layers, and ordered rules under `modules:`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.modules import layers_text
from mpbridge.precision.regions import spans_of
from mpbridge.training.tune.decision_units import LOW, DecisionUnit

Choice = Mapping[str, str]
"""Unit's name -> level."""
TAIL = 0.15
"""NVIDIA's rule keeps the last 15 % of the layers in BF16 (arXiv 2509.25149)."""


def base_of(config: MixedPrecisionConfig) -> MixedPrecisionConfig:
    """The recipe without edge layers, which the choice replaces; the recipe's rules under `modules:` stay."""
    return config.derive(first_last_layers_bf16=False, num_layers_at_start_in_bf16=None, num_layers_at_end_in_bf16=None)


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
        changes |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": start,
            "num_layers_at_end_in_bf16": end,
        }
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


def spans(numbers: Sequence[int]) -> str:
    """Layers in the syntax of `layers:`: '0-3, 7'."""
    return layers_text(spans_of(numbers))


def tail_of(units: Sequence[DecisionUnit], high: str) -> dict[str, str]:
    """The last 15 % of the layers in high precision, at least one."""
    total = max((layer for unit in units for layer, _ in unit.places), default=0) + 1
    first = total - max(1, math.ceil(TAIL * total - 1e-9))
    return {unit.name: high if any(layer >= first for layer, _ in unit.places) else LOW for unit in units}
