"""NCCL's reductions that gloo lacks: sums of premultiplied tensors (`ReduceOp.PREMUL_SUM`) and averages (`ReduceOp.AVG`).

Each rank multiplies what it sends, rounded to the tensor's dtype; NCCL's average is such a sum with the factor 1/ranks in that dtype (an integer sum is
divided afterwards, toward zero). Source: NCCL 2.27, hostToDevRedOp in src/enqueue.cc, FuncPreMulSum in src/device/reduce_kernel.h. Every partial sum is rounded to the dtype
too, in NCCL (__hadd2 on an Ampere or later) as in gloo, and both pass it around a ring.
"""

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


def _reduction(name: str, original: Any) -> Any:
    """A reduction that also takes a premultiplied sum or an average."""
    result, source = _REDUCTIONS[name][0], _REDUCTIONS[name][1 if "reduce_scatter" in name else 0]

    @functools.wraps(original)
    def reduce(*args: Any, **kwargs: Any) -> Any:
        named: dict[str, Any] = dict(zip(_REDUCTIONS[name], args, strict=False)) | kwargs
        op, group, sent = named.get("op"), named.get("group"), named[source]
        if not (isinstance(op, PremultipliedSum) or op == dist.ReduceOp.AVG) or dist.get_backend(group) != "gloo":
            return original(*args, **kwargs)
        named["op"] = dist.ReduceOp.SUM
        first, ranks = sent[0] if isinstance(sent, (list, tuple)) else sent, dist.get_world_size(group)
        if op == dist.ReduceOp.AVG and not first.is_floating_point():  # NCCL divides the sum
            waits = named.pop("async_op", False)
            original(**named)
            named[result].copy_(torch.div(named[result], ranks, rounding_mode="trunc"))
            return _Done() if waits else None
        # an average is multiplied by 1/ranks in the tensor's dtype
        factor = op.factor if isinstance(op, PremultipliedSum) else torch.tensor(1.0 / ranks, dtype=first.dtype)
        # a rank that only sends keeps its tensor
        sends = name == "reduce" and dist.get_rank() != named.get("dst", named.get("group_dst"))
        if source == result and not sends:
            sent.mul_(factor)
        else:
            named[source] = [one * factor for one in sent] if sent is not first else sent * factor
        return original(**named)

    return reduce


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, *timeout: Any) -> bool:
        return True

    is_completed = wait
