"""The internals of torch's FSDP1: which part of which parameter is in this rank's flat tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mpbridge.numerics.observation.modules import bare


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """This rank's piece of one parameter."""

    name: str
    owner: Any
    """The tensor the optimizer has: the piece itself (use_orig_params), or the whole unit's flat tensor."""
    tensor: Any
    start: int
    """First element in `owner`."""
    count: int
    begin: int
    """First element in the whole parameter, flat."""
    whole: int
    """Elements of the whole parameter."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This piece of a tensor that is as long as `owner`."""
        return flat.reshape(-1)[self.start : self.start + self.count]


def flat_pieces(model: Any) -> Iterator[FlatPiece]:
    """Every parameter of every unit, then those that FSDP ignores (whole on every rank)."""
    seen: set[int] = set()
    for path, unit in model.named_modules():
        handle = getattr(unit, "_handle", None)
        if handle is None or not hasattr(handle, "flat_param"):
            continue
        flat = handle.flat_param
        seen.add(id(flat))
        originals = getattr(flat, "_params", None)
        for index, (name, numel) in enumerate(zip(flat._fqns, flat._numels, strict=False)):
            held = flat._shard_param_infos[index]
            owner = flat if originals is None else originals[index]
            seen.add(id(owner))
            there = bool(held.in_shard)
            yield FlatPiece(
                name=bare(f"{path}.{name}" if path else name),
                owner=owner,
                tensor=owner,
                start=int(held.offset_in_shard) if there and originals is None else 0,
                count=int(held.numel_in_shard) if there else 0,
                begin=int(held.intra_param_start_idx) if there else 0,
                whole=int(numel),
            )
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            size = int(parameter.numel())
            yield FlatPiece(bare(name), parameter, parameter, 0, size, 0, size)
