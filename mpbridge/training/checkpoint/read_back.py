"""What a load really loaded: the engine's state, exported again, against what it was given; and the mean second moment, saved with a run, against what the
first step after a resume leaves.

Adam's second moment cannot fall faster than by beta2 a step (v' = beta2 v + (1 - beta2) g^2, and g^2 is never negative), so states that were lost on the way
from the file to the optimizer show in one number, whatever the loss does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mpbridge.backend.devices.collectives import summed
from mpbridge.common.facts import least_left
from mpbridge.numerics.observation.tensors import digest, plain_moment
from mpbridge.observe.audit.between import resting
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


LOST = 0.5
"""Share of what must be left at least below which states are called lost. Parameters that several ranks hold count once on each: on another layout the
mean is another by a few percent."""


def mean_second(engine: Any) -> float | None:
    """Mean of all second moments on all ranks; None where there are none, or none that can be read as they are. Every rank calls it."""
    total, count, coded = 0.0, 0.0, 0.0
    for one in resting(engine):
        if one.role == "exp_avg_sq":
            values = plain_moment(one.tensor)
            if values is None:
                coded += 1
            else:
                total += float(values.sum(dtype=torch.float64))
                count += values.numel()
    total, count, coded = summed((total, count, coded))
    return total / count if count and not coded and math.isfinite(total) else None


def lost(saved: float | None, found: float | None, beta2: float) -> str:
    """A sentence where less is found after one step than a step leaves of what was saved; '' where not, or where either is unknown."""
    left = least_left(beta2)
    if saved is None or found is None or not 0 < saved < math.inf or found >= LOST * left * saved:
        return ""
    return (
        f"the optimizer's second moments are {found / saved:.2g} times those of the checkpoint (mean {found:.3g}, saved {saved:.3g}), and one step reduces "
        f"them to no less than {left:g} times: states were lost between the file and the first step"
    )
