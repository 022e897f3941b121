"""NCCL's reductions that gloo lacks: sums of premultiplied tensors (`ReduceOp.PREMUL_SUM`) and averages (`ReduceOp.AVG`).

Each rank multiplies what it sends, rounded to the tensor's dtype; NCCL's average is such a sum with the factor 1/ranks in that dtype (an integer sum is
divided afterwards, toward zero). Source: NCCL 2.27, hostToDevRedOp in src/enqueue.cc, FuncPreMulSum in src/device/reduce_kernel.h. Every partial sum is rounded to the dtype
too, in NCCL (__hadd2 on an Ampere or later) as in gloo, and both pass it around a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(frozen=True, slots=True)
class PremultipliedSum:
    """What `torch.distributed._make_nccl_premul_sum(factor)` returns while a machine is played."""

    factor: Any
    """A number, or a tensor of one element."""


_REDUCTIONS = {
    "all_reduce": ("tensor", "op", "group", "async_op"),
    "reduce": ("tensor", "dst", "op", "group", "async_op"),
    "reduce_scatter": ("output", "input_list", "op", "group", "async_op"),
    "reduce_scatter_tensor": ("output", "input", "op", "group", "async_op"),
    "reduce_scatter_single": ("output", "input", "op", "group", "async_op"),
    "_reduce_scatter_base": ("output", "input", "op", "group", "async_op"),
}
"""Function -> its parameters."""


def patches() -> Iterator[tuple[Any, str, Any]]:
    """The functions that make or take such a reduction."""
    yield dist, "_make_nccl_premul_sum", PremultipliedSum
    for name in _REDUCTIONS:
        for owner in (dist, distributed_c10d):
            if hasattr(owner, name):
                yield owner, name, _reduction(name, getattr(owner, name))


def _factor(op: Any, tensor: torch.Tensor, group: Any) -> Any:
    """What each rank multiplies by: for an average, 1/ranks in the tensor's dtype."""
    if isinstance(op, PremultipliedSum):
        return op.factor
    return torch.tensor(1.0 / dist.get_world_size(group), dtype=tensor.dtype)


def _reduction(name: str, original: Any) -> Any:
    """A reduction that also takes a premultiplied sum or an average."""

    @functools.wraps(original)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(_REDUCTIONS[name], args, strict=False)) | kwargs
        op, group = named.get("op"), named.get("group")
        if not (isinstance(op, PremultipliedSum) or op == dist.ReduceOp.AVG) or dist.get_backend(group) != "gloo":
            return original(*args, **kwargs)
        named["op"] = dist.ReduceOp.SUM
        sent = named[_REDUCTIONS[name][0] if "reduce_scatter" not in name else _REDUCTIONS[name][1]]
        first = sent[0] if isinstance(sent, (list, tuple)) else sent
        if op == dist.ReduceOp.AVG and not first.is_floating_point():
            return _divided(original, named, name, dist.get_world_size(group))
        factor = _factor(op, first, group)
        if "reduce_scatter" not in name:
            # a rank that only sends keeps its tensor
            if name == "reduce" and dist.get_rank() != named.get("dst", named.get("group_dst")):
                named["tensor"] = sent * factor
            else:
                sent.mul_(factor)
        else:
            named[_REDUCTIONS[name][1]] = [one * factor for one in sent] if sent is not first else sent * factor
        return original(**named)

    return reduce


def _divided(original: Any, named: dict[str, Any], name: str, ranks: int) -> Any:
    """An average of integers: NCCL divides the sum."""
    waits = named.pop("async_op", False)
    original(**named)
    result = named[_REDUCTIONS[name][0]]
    result.copy_(torch.div(result, ranks, rounding_mode="trunc"))
    return _Done() if waits else None


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, *timeout: Any) -> bool:
        """True at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True
