"""Coalesced collectives on gloo, one tensor at a time.

torch's gloo backend concatenates the tensors of a coalesced all-gather in the first one's dtype and converts the others by value: if FP8
and BF16 buckets (FP8 as uint8) are mixed, both silently become wrong. megatron-core gathers all buckets of a group in one such block. Also, its
coalesced all-gather occasionally corrupts the heap on a busy machine (torch 2.13, Megatron-FSDP in one process: malloc aborts in gloo's thread).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class Pending:
    """Yielded by the manager: waits for every collective."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def append(self, work: Any) -> None:
        """Adds a collective."""
        self.works.append(work)

    def wait(self) -> None:
        """Returns when all are done."""
        for work in self.works:
            if work is not None:
                work.wait()


@contextmanager
def one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Pending]:
    """In place of `torch.distributed._coalescing_manager`: runs the block's collectives when the block ends, each in its own dtype."""
    group = group if group is not None else dist.group.WORLD
    state = distributed_c10d._world.pg_coalesce_state
    state.setdefault(group, [])
    pending = Pending()
    try:
        yield pending
    finally:
        collected = state.pop(group)
    for one in collected:
        name = one.op.__name__
        if "gather" in name:
            pending.append(one.op(one.dst_tensor, one.tensor, group=group, async_op=True))
        elif "scatter" in name:
            pending.append(one.op(one.dst_tensor, one.tensor, op=one.redop, group=group, async_op=True))
        else:
            pending.append(one.op(one.tensor, op=one.redop, group=group, async_op=True))
    if not async_ops:
        pending.wait()
