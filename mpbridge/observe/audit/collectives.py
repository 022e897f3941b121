"""What a rank sent in a step, read from torch's own collective operations: payload, dtype, group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.observe.audit.stored import storage

_REDUCED = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "reduce_": 0,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
}
"""Reduction -> index of the argument that is this rank's input (torch/csrc/distributed/c10d/Ops.cpp)."""
_GATHERED = {"_allgather_base_": 1, "allgather_": 1, "allgather_into_tensor_coalesced_": 1, "allgather_coalesced_": 1}
_PASSED = {"send": 0}
KINDS = {
    **dict.fromkeys(_REDUCED, "reduced"),
    **dict.fromkeys(_GATHERED, "gathered"),
    **dict.fromkeys(_PASSED, "passed"),
}
_PAYLOAD = {**_REDUCED, **_GATHERED, **_PASSED}


@dataclass(frozen=True, slots=True)
class Sent:
    """One tensor that this rank passed to a collective."""

    kind: str
    """'reduced', 'gathered' or 'passed' (between pipeline stages)."""
    dtype: str
    elements: int
    storage: int
    """Address of its storage."""
    begin: int
    """Offset of its first byte in that storage."""
    end: int
    floating: bool
    group: tuple[int, ...]
    """Global ranks."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _group(args: tuple[Any, ...]) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
            except (RuntimeError, TypeError, KeyError, ValueError):
                continue  # the ReduceOp argument is such an object too
    return ()


def sent(name: str, args: tuple[Any, ...]) -> Iterator[Sent]:
    """The tensors that the operation 'c10d::NAME' sends; nothing unless it is a reduction, gather or send."""
    kind = KINDS.get(name)
    if kind is None:
        return
    group = _group(args)
    for tensor in _tensors(args[_PAYLOAD[name]]):
        size, begin = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
        yield Sent(
            kind=kind,
            dtype=storage(tensor),
            elements=tensor.numel(),
            storage=tensor.untyped_storage().data_ptr(),
            begin=begin,
            end=begin + int(tensor.numel()) * size,
            floating=tensor.is_floating_point(),
            group=group,
        )
