"""megatron-core's parameter-and-gradient buffers: layout, padding, and which shard a rank owns.

Source: 0.16.1, distributed/distributed_data_parallel.py and param_and_grad_buffer.py: parameters are placed in reverse order; under the distributed optimizer each
starts at a multiple of 64 elements and each bucket ends at a multiple of lcm(group, 128), so that it divides into equal shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpbridge.common.facts import RunFacts
from mpbridge.common.formats import DType
from mpbridge.planning.memory.layers import Parameter

ALIGN = 64
"""Elements between the starts of parameters: 128 bytes of 16-bit values."""
BUCKET = 128
"""Buckets end at a multiple of this (and of the group size): 256 bytes of 16-bit values, for cuBLAS."""
BUS = 2**16
"""The same with pad_buckets_for_high_nccl_busbw."""


class Slot(NamedTuple):
    """The position of one parameter in its buffer."""

    parameter: Parameter
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One contiguous buffer; there is one per dtype of parameters, and separate ones for experts that are sharded over ranks."""

    params: DType
    """UINT8: weights stored in FP8."""
    grads: DType
    group: int
    """Number of ranks that share it."""
    apart: bool
    """Whether it holds experts that are sharded over ranks."""
    distributed: bool
    slots: tuple[Slot, ...] = ()
    """In buffer order."""
    buckets: tuple[tuple[int, int], ...] = ()
    """(start, end) of each, including padding."""

    @property
    def elements(self) -> int:
        """Number of elements of the whole buffer."""
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.elements - sum(slot.end - slot.start for slot in self.slots)

    def shard(self, index: int) -> Iterator[tuple[Parameter, int]]:
        """(parameter, elements) that the group's `index`-th rank owns: an equal piece of each bucket, regardless of parameter boundaries."""
        slots = iter(self.slots)
        slot = next(slots, None)
        for start, end in self.buckets:
            size = (end - start) // self.group
            low, high = start + index * size, start + (index + 1) * size
            while slot is not None and slot.start < end:
                owned = min(slot.end, high) - max(slot.start, low)
                if owned > 0:
                    yield slot.parameter, owned
                if slot.end > end:
                    break
                slot = next(slots, None)


def buffers(run: RunFacts, chunk: Sequence[tuple[Parameter, DType, DType]], *, stage: int, index: int) -> list[Buffer]:
    """The buffers of one model chunk.

    chunk: (parameter, stored dtype, gradient dtype) in model order. stage, index: of the pipeline stage and the chunk, which determine the bucketing."""
    groups: dict[tuple[bool, DType, DType], list[Parameter]] = {}
    for parameter, dtype, grads in chunk:
        apart = parameter.weight.expert and run.parallel.expert > 1
        groups.setdefault((apart, dtype, grads), []).append(parameter)
    size = bucket_size(run) if stage == 0 and index == 0 else None
    found = []
    for (apart, dtype, grads), members in groups.items():
        made, bus = empty(run, dtype, grads, apart=apart), bool(run.ddp.get("pad_buckets_for_high_nccl_busbw"))
        slots, buckets = _place(members, made.group, size, distributed=made.distributed, bus=bus)
        found.append(replace(made, slots=slots, buckets=buckets))
    return found


def empty(run: RunFacts, params: DType, grads: DType, *, apart: bool) -> Buffer:
    """A buffer of these dtypes without parameters."""
    return Buffer(
        params=params, grads=grads, group=run.sharers(expert=apart), apart=apart, distributed=run.optimizer.distributed
    )


def bucket_size(run: RunFacts) -> int | None:
    """Number of elements at which a bucket is closed; None: one bucket, as without overlap."""
    if not run.ddp.get("overlap_grad_reduce"):
        return None
    given = run.ddp.get("bucket_size")
    return max(40_000_000, 1_000_000 * run.parallel.data) if given is None else int(given)


def up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def _place(
    members: Sequence[Parameter], ranks: int, limit: int | None, *, distributed: bool, bus: bool
) -> tuple[tuple[Slot, ...], tuple[tuple[int, int], ...]]:
    """Slots and buckets of one buffer."""
    step = math.lcm(ranks, BUCKET, BUS if bus else 1) if distributed else 1
    slots: list[Slot] = []
    buckets: list[tuple[int, int]] = []
    opened, at, held = 0, 0, False

    def close(end: int) -> int:
        nonlocal opened, held
        buckets.append((opened, up(end, step)))
        opened, held = buckets[-1][1], False
        return opened

    for parameter in reversed(members):
        if distributed:
            at = up(at, ALIGN)
        # both copies of a tied embedding must be split into the same shards on their two stages
        alone = parameter.weight.twin and distributed
        if alone and held:
            at = close(at)
        end = at + parameter.weight.elements
        slots.append(Slot(parameter, at, end))
        held = True
        full = limit is not None and end - opened >= limit
        at = close(end) if full or alone else end
    if held:
        close(at)
    return tuple(slots), tuple(buckets)
