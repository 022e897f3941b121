"""NCCL's sum of premultiplied tensors (`ReduceOp.PREMUL_SUM`) on gloo, which has none: each rank multiplies what it sends."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(frozen=True, slots=True)
class PremultipliedSum:
    """What `torch.distributed._make_nccl_premul_sum(factor)` returns while a machine is played."""

    factor: Any
    """A number, or a tensor of one element."""


def patches() -> Iterator[tuple[Any, str, Any]]:
    """That function, and the reductions that are given its result."""
    yield dist, "_make_nccl_premul_sum", PremultipliedSum
    for owner in (dist, distributed_c10d):
        for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(owner, name):
                yield owner, name, _reduction(getattr(owner, name))


def _reduction(original: Any) -> Any:
    """all_reduce(tensor, op, ...) or reduce_scatter_*(output, input, op, ...), with a premultiplied sum too."""
    in_place = original.__name__ == "all_reduce"
    names = ("tensor", "op", "group", "async_op") if in_place else ("output", "input", "op", "group", "async_op")

    @functools.wraps(original)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        op = named.get("op")
        if not isinstance(op, PremultipliedSum):
            return original(*args, **kwargs)
        named["op"] = dist.ReduceOp.SUM
        if in_place:
            named["tensor"].mul_(op.factor)
        else:
            named["input"] = named["input"] * op.factor
        return original(**named)

    return reduce
