"""What a load really loaded: the engine's state, exported again, against what it was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mpbridge.numerics.observation.tensors import digest
from mpbridge.training.checkpoint.extra_state import SUFFIX

Digests = dict[str, tuple[torch.dtype, tuple[int, ...], int]]
"""Place in the state -> dtype, shape and digest of its tensor."""


def digests(tree: Any) -> Digests:
    """Of every tensor in a state, loaded or exported (megatron-core's sharded tensors have theirs in `data`)."""
    return {place: (one.dtype, tuple(one.shape), digest(one)) for place, one in _tensors(tree, "")}


def different(given: Digests, engine: Any) -> list[str]:
    """The places whose tensor the engine no longer has as it was given; places of another dtype or shape there (a state that is stored in its own way) are
    not compared. Collective where an export is."""
    now = digests(engine.state())
    return [place for place, was in given.items() if place in now and now[place][:2] == was[:2] and now[place] != was]


def _tensors(tree: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    inner = tree if isinstance(tree, torch.Tensor) else getattr(tree, "data", None)
    if isinstance(inner, torch.Tensor):
        if not place.endswith(SUFFIX):
            yield place, inner
        return
    parts = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for name, part in parts:
        yield from _tensors(part, f"{place}.{name}" if place else str(name))
