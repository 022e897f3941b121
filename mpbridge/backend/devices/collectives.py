"""Operations that all ranks of a job take part in: agree on a number, take the first rank's result, gather every rank's value; and gloo's devices and coalesced collectives."""

import ctypes
import dataclasses
import functools
import hashlib
import itertools
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpbridge.common.errors import CheckpointError, MpbridgeError
from mpbridge.common.upstream import Patch

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
    "closed by peer", "connection reset", "timed out", "timeout", "broken pipe", "no response", "unable to reach", "socket closed",
)  # fmt: skip
"""Messages of several back ends' process groups when a rank does not respond."""


def is_of_a_lost_rank(error: BaseException) -> bool:
    """Whether a collective raised `error` because another rank is gone, regardless of what was in progress."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return several and isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _GONE)


# --- a value of every rank, at little cost when ranks agree: equal parts are sent once, regardless of the number of ranks -------------------
_MARK, _LENGTH = 8, 4
"""Bytes of a part's digest, and bytes of its length."""


def from_all(mine: T, *, deeper: Mapping[str, type] = MappingProxyType({}), group: Any = None) -> list[T]:
    """`mine` of every rank of `group` (None: the world), in the order of ranks; every rank calls it. Equal values may be one object: do not modify them.

    Two collectives, regardless of the world's size: the marks of all parts (12 bytes per field of a dataclass), and one sum into which the first
    rank that has a part writes it. deeper: fields that are dataclasses, or None, and are themselves split into parts. Without a process group this is the
    only rank.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    device = collective_device(group)
    parts = [_packed(value) for value in _apart(mine, deeper)]
    marks = _all_marks(b"".join(_mark(part) for part in parts), device, group)
    places, total = _places(marks)
    box = torch.zeros(total, dtype=torch.uint8)
    rank = dist.get_rank(group)
    for index, part in enumerate(parts):
        first, begin = places[marks[rank][index]]
        if first == (rank, index):
            box[begin : begin + len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    box = box.to(device)
    dist.all_reduce(box, group=group)
    content = box.cpu().numpy().tobytes()
    known: dict[bytes, Any] = {}
    for mark, (_, begin) in places.items():
        length = int.from_bytes(mark[_MARK:], "little")
        known[mark] = pickle.loads(zlib.decompress(content[begin : begin + length]))
    return [_put_together(mine, [known[mark] for mark in row], deeper) for row in marks]


def _packed(value: Any) -> bytes:
    return zlib.compress(pickle.dumps(value), 1)


def _mark(part: bytes) -> bytes:
    return hashlib.blake2b(part, digest_size=_MARK).digest() + len(part).to_bytes(_LENGTH, "little")


def _all_marks(own: bytes, device: str, group: Any) -> list[list[bytes]]:
    """[rank][part] -> its mark."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    found = torch.empty((dist.get_world_size(group), len(own)), dtype=torch.uint8, device=device)
    dist.all_gather(list(found.unbind(0)), mine, group=group)
    size = _MARK + _LENGTH
    rows = [bytes(row) for row in found.cpu().numpy()]
    return [[row[at : at + size] for at in range(0, len(row), size)] for row in rows]


def _places(marks: Sequence[Sequence[bytes]]) -> tuple[dict[bytes, tuple[tuple[int, int], int]], int]:
    """(mark -> ((rank, part) that writes it, where it begins), bytes in all); the same on every rank."""
    places: dict[bytes, tuple[tuple[int, int], int]] = {}
    total = 0
    for rank, row in enumerate(marks):
        for index, mark in enumerate(row):
            if mark not in places:
                places[mark] = (rank, index), total
                total += int.from_bytes(mark[_MARK:], "little")
    return places, total


def _apart(value: Any, deeper: Mapping[str, type]) -> Iterator[Any]:
    """The parts that are sent separately: the same number on every rank, even if one of them has None instead of a dataclass."""
    if not dataclasses.is_dataclass(value):
        yield value
        return
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.name in deeper:
            yield part is None
            yield from (getattr(part, one.name, None) for one in dataclasses.fields(deeper[field.name]))
        else:
            yield part


def _put_together(like: Any, parts: Sequence[Any], deeper: Mapping[str, type]) -> Any:
    """The value that `parts` were taken from."""
    if not dataclasses.is_dataclass(like) or isinstance(like, type):
        return parts[0]
    left, values = iter(parts), {}
    for field in dataclasses.fields(like):
        part = next(left)
        if field.name in deeper:
            absent, kind = part, deeper[field.name]
            inner = {one.name: next(left) for one in dataclasses.fields(kind)}
            part = None if absent else kind(**inner)
        values[field.name] = part
    return type(like)(**values)


# --- gloo's groups share their devices ------------------------------------------------------------------------------------------------------
_GLOO_DEVICES = 16
"""A device is a socket and a thread that wakes up 100 times a second (gloo's tcp/loop.cc), used or not. NCCL connects a group when it is first used, and
megatron-core makes dozens of groups that never are. With one device for all groups collectives took 1.4 times as long; with 16 as long as with one each."""
_members: ContextVar[str] = ContextVar("members", default="")


@contextmanager
def group_of(ranks: Iterable[int]) -> Iterator[None]:
    """In the block, gloo groups find one another among these ranks alone.

    torch names a group by how many the process has made. Ranks that make different groups at once use one name for both: NCCL, which connects a group
    when it is first used, never notices if they are not used; gloo connects at once, to ranks of the other group, and waits for ever.
    """
    token = _members.set("-".join(map(str, sorted(ranks))))
    try:
        yield
    finally:
        _members.reset(token)


class _Devices:
    """This process's devices, of its newest world."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._begin()

    def _begin(self) -> None:
        self._made, self._groups, self._process = list[Any](), itertools.count(), os.getpid()

    def next(self) -> Any:
        """One for a new group."""
        if self._process != os.getpid():
            # their threads are the parent's, and gloo waits for them when it destroys a device, at the latest as this process ends
            for device in self._made:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(device))
            self._begin()
        elif not dist.is_initialized():
            self._begin()
        if len(self._made) < _GLOO_DEVICES:
            device = self._make()
            self._made.append(device)
            return device
        return self._made[next(self._groups) % _GLOO_DEVICES]


def gloo_patches() -> Iterator[Patch]:
    """A gloo group of a process takes one of a few devices instead of opening its own, unless GLOO_SOCKET_IFNAME says which ones torch opens."""
    if not dist.is_gloo_available():
        return
    made: Any = distributed_c10d.ProcessGroupGloo
    original, devices = made.__init__, _Devices(lambda: made.create_default_device())

    @functools.wraps(original)
    def init(self: Any, store: Any, rank: int, size: int, timeout: Any = None, **more: Any) -> None:
        if not (timeout is None or isinstance(timeout, timedelta)):
            original(self, store, rank, size, timeout, **more)  # options, with devices of their own
            return
        if among := _members.get():
            store = distributed_c10d.PrefixStore(f"{among}/", store)
        given, options = ({} if timeout is None else {"timeout": timeout}), made._Options()
        # torch 2.15 has one argument more, and the same among its options
        if os.environ.get("GLOO_SOCKET_IFNAME") or not all(hasattr(options, name) for name in more):
            original(self, store, rank, size, **given, **more)
            return
        for name, value in more.items():
            setattr(options, name, value)
        if timeout is not None:
            options._timeout = timeout
        options._devices = [devices.next()]
        original(self, store, rank, size, options)

    yield made, "__init__", init


# --- coalesced collectives on gloo, one tensor at a time ------------------------------------------------------------------------------------
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
    """In place of `torch.distributed._coalescing_manager`: runs the block's collectives when the block ends, each in its own dtype.

    torch's gloo backend concatenates the tensors of a coalesced all-gather in the first one's dtype and converts the others by value: if FP8
    and BF16 buckets (FP8 as uint8) are mixed, both silently become wrong. megatron-core gathers all buckets of a group in one such block. Also, its
    coalesced all-gather occasionally corrupts the heap on a busy machine (torch 2.13, Megatron-FSDP in one process: malloc aborts in gloo's thread).
    """
    group = group if group is not None else dist.group.WORLD
    state = distributed_c10d._world.pg_coalesce_state
    state.setdefault(group, [])
    pending = Pending()
    try:
        yield pending
    finally:
        collected = state.pop(group)
    for one in collected:
        tensors = (one.tensor,) if one.dst_tensor is None else (one.dst_tensor, one.tensor)
        how = {} if "gather" in one.op.__name__ else {"op": one.redop}
        pending.append(one.op(*tensors, **how, group=group, async_op=True))
    if not async_ops:
        pending.wait()
