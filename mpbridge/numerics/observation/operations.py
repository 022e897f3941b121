"""One step's GEMMs and collectives, seen on torch's own operators: one table of each, and the dispatch mode that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mpbridge.numerics.observation.modules import tensors_in
from mpbridge.numerics.observation.tensors import operand, storage

COLLECTIVES: Mapping[str, tuple[str, int]] = MappingProxyType({
    "allreduce_": ("all_reduce", 0), "allreduce_coalesced_": ("all_reduce", 0), "reduce_": ("reduce", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1), "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "_allgather_base_": ("all_gather", 1), "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1), "allgather_coalesced_": ("all_gather", 1),
    "alltoall_base_": ("all_to_all", 1), "alltoall_": ("all_to_all", 1),
    "gather_": ("gather", 1), "gather_into_tensor_": ("gather", 1), "scatter_": ("scatter", 1), "broadcast_": ("broadcast", 0),
    "send": ("send", 0), "recv_": ("receive", 0), "recv_any_source_": ("receive", 0),
})  # fmt: skip
"""Operation of the namespace c10d -> (what it is, index of the argument that is this rank's input; of a receive, its output).
`gather_into_tensor_` came with torch 2.15. Source: torch/csrc/distributed/c10d/Ops.cpp."""
FUNCTIONAL: Mapping[str, str] = MappingProxyType({
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "reduce_scatter_tensor": "reduce_scatter", "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
})  # fmt: skip
"""Operation of the namespace _c10d_functional, by which DTensors communicate -> what it is. The first argument is this rank's input, the last one the name
of the group. Source: torch/csrc/distributed/c10d/Functional.cpp."""
_ROLES = {
    "all_reduce": "reduced", "reduce": "reduced", "reduce_scatter": "reduced", "all_gather": "gathered", "send": "passed",
}  # fmt: skip
GEMMS: Mapping[str, tuple[int, int]] = MappingProxyType({
    "mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1), "linear": (0, 1),
})  # fmt: skip
"""Operation of the namespace aten -> positions of the two factors."""

_depth = 0


@contextmanager
def unobserved() -> Iterator[None]:
    """Messages sent inside are not part of a step (a checkpoint's tables and bytes) and are not counted."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@dataclass(frozen=True, slots=True)
class Sent:
    """One tensor that this rank passed to a collective."""

    kind: str
    """'all_reduce', 'all_gather', 'send' ..., as in COLLECTIVES."""
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

    @property
    def role(self) -> str:
        """'reduced', 'gathered', 'passed' (between pipeline stages), or ''."""
        return _ROLES.get(self.kind, "")


def _tensors(kind: str, payload: Any, group: tuple[int, ...]) -> Iterator[Sent]:
    for tensor in tensors_in(payload):
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


def _group(args: tuple[Any, ...]) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
            except (RuntimeError, TypeError, KeyError, ValueError):
                continue  # the ReduceOp argument is such an object too
    return ()


class OperationObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, sees every operation below autograd once: collectives before they run, since reductions are in place, and GEMMs after.

    A subclass says what it makes of them; results are those of the operations. An operation costs a look into two dictionaries.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Sent] = []
        """Every tensor that a collective sent, in order."""
        self.functional: list[Sent] = []
        """The same of functional collectives, which DTensors use."""
        self.blind = False
        """Whether nothing is recorded."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Operations inside are not part of the step and are not recorded."""
        self.blind = True
        try:
            yield
        finally:
            self.blind = False

    def communicates(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Records and runs a collective."""
        self.record(name, args)
        return func(*args, **kwargs)

    def record(self, name: str, args: Any) -> None:
        """Adds what a collective sends to `sent`; nothing if it moves no data."""
        if not _depth and name in COLLECTIVES:
            kind, payload = COLLECTIVES[name]
            self.sent += _tensors(kind, args[payload], _group(args))

    def multiplies(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        """Called after each GEMM with its factors and its result."""

    def computes(self, name: str, args: Any) -> None:
        """Called after each aten operation, GEMMs included, with its name."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and reports it."""
        kwargs = kwargs or {}
        if self.blind:
            return func(*args, **kwargs)
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            return self.communicates(func, name, args, kwargs)
        if space == "_c10d_functional" and not _depth and name in FUNCTIONAL:
            group = dist.distributed_c10d._resolve_process_group(args[-1])  # type: ignore[attr-defined]
            self.functional += _tensors(FUNCTIONAL[name], args[0], tuple(dist.get_process_group_ranks(group)))
        out = func(*args, **kwargs)
        if space == "aten":
            if (factors := GEMMS.get(name)) is not None:
                self.multiplies(operand(args[factors[0]]), operand(args[factors[1]]), out)
            self.computes(name, args)
        return out
