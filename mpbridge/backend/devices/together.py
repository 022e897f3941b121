"""Operations that all ranks of a job take part in: agree on a number, take the first rank's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mpbridge.common.errors import CheckpointError, MpbridgeError

T = TypeVar("T")


def collective_device(group: Any = None) -> str:
    """The device that a tensor must be on to be sent among the ranks of `group` (None: the world)."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def agreed(value: int) -> int:
    """The largest `value` of all ranks, on every rank."""
    return int(_reduced([value], torch.int64, dist.ReduceOp.MAX)[0])


def largest(values: Sequence[float]) -> list[float]:
    """The largest of all ranks in each place, on every rank."""
    return _reduced(values, torch.float64, dist.ReduceOp.MAX)


def summed(values: Sequence[float]) -> list[float]:
    """The sum over all ranks in each place, on every rank; without a process group this is the only rank."""
    return _reduced(values, torch.float64, dist.ReduceOp.SUM)


def _reduced(values: Sequence[float], dtype: torch.dtype, how: Any) -> list[float]:
    if world_size() == 1:
        return list(values)
    box = torch.tensor(values, dtype=dtype, device=collective_device())
    dist.all_reduce(box, op=how)
    return list(box.tolist())


def on_first_rank(act: Callable[[], T]) -> T:
    """What `act` returns on rank 0, on every rank; an MpbridgeError that it raises there is raised on every rank, OSError as CheckpointError.

    Without a process group this process is the only one.
    """
    if not dist.is_initialized():
        return act()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = act()
        except MpbridgeError as error:
            box[1] = error
        except OSError as error:
            box[1] = CheckpointError(f"{error.filename or 'a checkpoint'}: {error.strerror or error}")
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


_GONE = (
    "closed by peer",
    "connection reset",
    "timed out",
    "timeout",
    "broken pipe",
    "no response",
    "unable to reach",
    "socket closed",
)
"""Messages of several back ends' process groups when a rank does not respond."""


def is_of_a_lost_rank(error: BaseException) -> bool:
    """Whether a collective raised `error` because another rank is gone, regardless of what was in progress."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return several and isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _GONE)
