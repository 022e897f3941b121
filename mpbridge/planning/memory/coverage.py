"""Which region decides for which linear; finds regions that match nothing, never come first, or name layers that the model does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpbridge.precision.globs import below, matches
from mpbridge.precision.regions import Region


class Stack(NamedTuple):
    """The linears of one layer."""

    layer: int | None
    """0-based; None: multi-token prediction."""
    stem: str
    """Of their whole paths: 'decoder.layers.3.'."""
    linears: tuple[str, ...]
    """Their paths below the layer."""


@dataclass(slots=True)
class Coverage:
    """The effect of each region, by its index. Created by `coverage`."""

    named: set[int] = field(default_factory=set)
    """Regions whose glob and layers match some linear."""
    deciding: set[int] = field(default_factory=set)
    """Regions that decide for some linear as the first match."""
    ahead: dict[int, set[int]] = field(default_factory=dict)
    """Index -> earlier regions that decide for linears that it also matches."""

    def dead(self, index: int) -> bool:
        """Whether the region matches no linear."""
        return index not in self.named

    def shadowed(self, index: int) -> bool:
        """Whether earlier regions decide for every linear that it matches."""
        return index in self.named and index not in self.deciding


def coverage(regions: Sequence[Region], stacks: Iterable[Stack], layers: int, *, whole: bool = False) -> Coverage:
    """The effect of each of `regions` (the first match decides) on the linears of a model with that many layers.

    whole: read every stack; otherwise stop once every region but the last decides somewhere, with `ahead` incomplete.
    """
    found, known = Coverage(), _Masks()
    wanted = set(range(len(regions) - 1))
    for stack in stacks:
        if not whole and wanted <= found.deciding:
            break
        for index, decided in enumerate(_decided(regions, stack, layers, known, found)):
            if decided:
                found.deciding.add(index)
    return found


def deciders(regions: Sequence[Region], stack: Stack, layers: int) -> dict[str, int]:
    """Linear -> the index of the region that decides for it; linears that none matches are omitted."""
    masks = _decided(regions, stack, layers, _Masks(), Coverage())
    return {name: i for i, mask in enumerate(masks) for bit, name in enumerate(stack.linears) if mask >> bit & 1}


def _decided(regions: Sequence[Region], stack: Stack, layers: int, known: _Masks, found: Coverage) -> Iterable[int]:
    """For each region, the linears of the stack that it decides for, as bits."""
    taken: list[int] = []
    for index, region in enumerate(regions):
        mask = known.of(region.modules, stack) if region.about(stack.layer, layers) else 0
        mine = mask
        for other, theirs in enumerate(taken):
            if mask & theirs:
                found.ahead.setdefault(index, set()).add(other)
            mine &= ~theirs
        if mask:
            found.named.add(index)
        taken.append(mine)
    return taken


class _Masks:
    """Which linears of a stack a glob matches, as bits; layers of one kind are evaluated once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], int] = {}

    def of(self, glob: str, stack: Stack) -> int:
        mask = 0
        for rest in (glob, *below(glob, stack.stem)):
            key = (rest, stack.linears)
            if key not in self._known:
                self._known[key] = sum(1 << bit for bit, name in enumerate(stack.linears) if matches(rest, name))
            mask |= self._known[key]
        return mask
