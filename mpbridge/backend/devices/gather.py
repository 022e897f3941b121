"""Gathers a value from every rank to every rank, at little cost when ranks agree: equal parts are sent once, regardless of the number of ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mpbridge.backend.devices.together import collective_device

T = TypeVar("T")

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
    return [_together(mine, [known[mark] for mark in row], deeper) for row in marks]


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


def _together(like: Any, parts: Sequence[Any], deeper: Mapping[str, type]) -> Any:
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
