"""The index of a checkpoint, in JSON: which bytes of which file are which part of which tensor. Loads rely on it alone. Loads no framework.

    {"schema": 1, "files": ["__0_0.distcp", ...],
     "tensors": {key: {"dtype": "float32", "shape": [256, 64], "pieces": [[file, at, offset, shape], ...]}},
     "objects": {key: [file, at, bytes]}}

file: its position in "files"; at: byte at which the elements begin, row-major, little-endian, contiguous; offset and shape: of the piece in the tensor.
An object is JSON as encoded by `json_codec.encoded`. Checksums of the files are in the manifest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpbridge.common.errors import CheckpointError
from mpbridge.training.checkpoint.json_codec import WIDTHS, elements, read_file, sizes

INDEX, STATE = "index.json", "state.json"
"""Files with this index, and with the state that is equal on all ranks (counters, schedule, groups, loss scaler), as encoded by `json_codec.encoded`."""
METADATA, COMMON = ".metadata", "common.pt"
"""Files of torch's and megatron-core's own format: pickles, read from checkpoints of others alone."""
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Part of a tensor: `shape` elements from `offset`, at byte `at` of `file`."""

    file: str
    at: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: torch's name of its dtype, global shape, pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a checkpoint's data files."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Key -> file, first byte, bytes."""

    def add(
        self, key: str, dtype: str, shape: Iterable[int], *pieces: tuple[str, int, Iterable[int], Iterable[int]]
    ) -> None:
        """Adds pieces, each (file, first byte, offset, shape), to a tensor."""
        before = self.tensors[key].pieces if key in self.tensors else ()
        made = (StoredPiece(file, at, tuple(offset), tuple(sides)) for file, at, offset, sides in pieces)
        self.tensors[key] = StoredTensor(dtype, tuple(shape), (*before, *made))

    def write(self, folder: Path, whose: str) -> None:
        """Writes the index's file. Raises CheckpointError that begins with `whose` if pieces are missing or overlap."""
        if faults := self.incomplete():
            raise CheckpointError(f"{whose}: {'; '.join(faults[:5])}")
        (folder / INDEX).write_text(json.dumps(self.as_data(), separators=(",", ":")), encoding="utf-8")

    def as_data(self) -> dict[str, Any]:
        """The index as JSON types."""
        files = sorted(
            {piece.file for stored in self.tensors.values() for piece in stored.pieces}
            | {file for file, _, _ in self.objects.values()}
        )
        number = {name: place for place, name in enumerate(files)}
        tensors = {
            key: {
                "dtype": stored.dtype,
                "shape": list(stored.shape),
                "pieces": [[number[p.file], p.at, list(p.offset), list(p.shape)] for p in stored.pieces],
            }
            for key, stored in sorted(self.tensors.items())
        }
        objects = {key: [number[file], at, size] for key, (file, at, size) in sorted(self.objects.items())}
        return {"schema": SCHEMA, "files": files, "tensors": tensors, "objects": objects}

    def incomplete(self) -> list[str]:
        """A sentence for each tensor with missing or overlapping pieces: a shard was written by no rank, or by two."""
        found = []
        for key, stored in self.tensors.items():
            have, want = sum(math.prod(piece.shape) for piece in stored.pieces), math.prod(stored.shape)
            if have != want:
                found.append(f"{key}: its shards have {have} elements, expected {want}")
            elif overlap(stored.pieces):
                found.append(f"{key}: two of its shards overlap, and some elements are missing")
        return found


def overlap(pieces: Iterable[StoredPiece]) -> bool:
    """Whether two pieces of one tensor have an element in common."""
    filled = [piece for piece in pieces if math.prod(piece.shape)]
    if filled and not filled[0].shape:
        return len(filled) > 1
    reaching: list[StoredPiece] = []
    for piece in sorted(filled, key=lambda one: one.offset):
        # pieces that end before this one begins along the first dimension cannot overlap a later one
        reaching = [one for one in reaching if one.offset[0] + one.shape[0] > piece.offset[0]]
        if any(_meet(one, piece) for one in reaching):
            return True
        reaching.append(piece)
    return False


def _meet(a: StoredPiece, b: StoredPiece) -> bool:
    sides = zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    return all(at < to + width and to < at + side for at, side, to, width in sides)


def read_index(folder: Path, listed: Mapping[str, Any]) -> Index:
    """The index of the checkpoint in `folder`. listed: the manifest's files.

    Raises CheckpointError naming the index if a piece is not inside a listed file and its tensor.
    """
    return read_file(
        folder / INDEX, lambda data: _index(data, {name: facts["bytes"] for name, facts in listed.items()})
    )


def _index(data: Any, room: Mapping[str, int]) -> Index:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise CheckpointError(f"expected an index of schema {SCHEMA}")
    files = data["files"]
    if strange := [str(name)[:80] for name in files if name not in room]:
        raise CheckpointError(f"it points to files that the manifest does not list: {', '.join(strange)}")
    tensors = {}
    for key, entry in data["tensors"].items():
        dtype, shape = entry["dtype"], sizes(entry["shape"])
        elements(dtype, shape)
        pieces = tuple(_piece(piece, files, room, dtype, shape, key) for piece in entry["pieces"])
        if overlap(pieces):
            raise CheckpointError(f"two pieces of {key} overlap")
        tensors[key] = StoredTensor(dtype, tuple(shape), pieces)
    objects = {}
    for key, (number, at, size) in data["objects"].items():
        name = files[_place(number, len(files))]
        _inside(at, size, room[name], name, key)
        objects[key] = (name, at, size)
    return Index(tensors, objects)


def _piece(
    entry: Any, files: list[str], room: Mapping[str, int], dtype: str, whole: list[int], key: str
) -> StoredPiece:
    number, at, offset, shape = entry
    sizes(offset)
    name, count = files[_place(number, len(files))], elements(dtype, shape)
    ends = [begin + side for begin, side in zip(offset, shape, strict=True)]
    if len(ends) != len(whole) or any(end > side for end, side in zip(ends, whole, strict=True)):
        raise CheckpointError(f"a piece of {key} is outside the tensor")
    _inside(at, count * WIDTHS[dtype], room[name], name, key)
    return StoredPiece(name, at, tuple(offset), tuple(shape))


def _place(number: Any, count: int) -> int:
    if type(number) is not int or not 0 <= number < count:
        raise CheckpointError(f"file number {str(number)[:40]} of {count}")
    return number


def _inside(at: Any, size: Any, room: Any, name: str, key: str) -> None:
    if type(at) is not int or type(size) is not int or at < 0 or size < 0 or at + size > room:
        raise CheckpointError(f"{key} is outside {name}")
