"""The units of decision: linears that must share one format, and their kinds."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

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
