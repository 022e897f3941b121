"""The files of a checkpoint as data, in JSON: plain values bit for bit (counters, schedules, random states, scaling states), and the index, which says which bytes of which
file are which part of which tensor. Loads rely on it alone. Loads no framework.

JSON values encode themselves. The rest is an object with one key: `{"tuple": [...]}`, `{"float": "nan"}`, `{"map": [[key, value], ...]}`
(every dict) and `{"tensor": {"dtype", "shape", "data"}}` with the elements' bytes, little-endian, in base64. Nothing else can be encoded. The index:

    {"schema": 1, "files": ["__0_0.distcp", ...],
     "tensors": {key: {"dtype": "float32", "shape": [256, 64], "pieces": [[file, at, offset, shape], ...]}},
     "objects": {key: [file, at, bytes]}}

file: its position in "files"; at: byte at which the elements begin, row-major, little-endian, contiguous; offset and shape: of the piece in the tensor.
An object is JSON as encoded by `encoded`. Checksums of the files are in the manifest.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import read_json

T = TypeVar("T")

DEEPEST = 64
"""Maximum nesting of containers; a run's own state has fewer than ten levels."""
WIDTHS: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "bool": 1,
}  # fmt: skip
"""torch's names of the dtypes allowed in a checkpoint -> bytes per element."""
LARGEST_SIDE = 1 << 48


def encoded(value: Any, depth: int = 0) -> Any:
    """`value` as JSON types; a tensor is torch's, or an object with `as_json`. Raises CheckpointError for any other value."""
    if depth > DEEPEST:
        raise CheckpointError(f"a value nested {DEEPEST} deep cannot be saved")
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [encoded(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encoded(item, depth + 1) for item in value]}
    if isinstance(value, Mapping):
        return {"map": [[encoded(key, depth + 1), encoded(item, depth + 1)] for key, item in value.items()]}
    if hasattr(value, "as_json"):
        return {"tensor": value.as_json()}
    if type(value).__module__ == "torch" and hasattr(value, "untyped_storage"):
        return {"tensor": _tensor(value)}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a NumPy scalar
        return encoded(value.item(), depth)
    raise CheckpointError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved: it is not plain data"
    )


def _tensor(tensor: Any) -> dict[str, Any]:
    import torch

    plain = tensor.detach().cpu().contiguous()
    raw = plain.flatten().view(torch.uint8).numpy().tobytes()
    name = str(plain.dtype).removeprefix("torch.")
    return {"dtype": name, "shape": list(plain.shape), "data": base64.b64encode(raw).decode("ascii")}


def decoded(data: Any, depth: int = 0) -> Any:
    """The value encoded by `encoded`. Raises CheckpointError for anything else. Loads torch only for tensors."""
    if depth > DEEPEST:
        raise CheckpointError("nested too deeply")
    if isinstance(data, list):
        return [decoded(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise CheckpointError(f"expected an object with one key, found {len(data)}")
    ((kind, body),) = data.items()
    if kind == "float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if kind == "tuple" and isinstance(body, list):
        return tuple(decoded(item, depth + 1) for item in body)
    if kind == "map" and isinstance(body, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in body):
        return _mapping([(decoded(key, depth + 1), decoded(item, depth + 1)) for key, item in body])
    if kind == "tensor" and isinstance(body, dict) and body.keys() == {"dtype", "shape", "data"}:
        return _tensor_of(**body)
    raise CheckpointError(f"found {{{str(kind)[:40]!r}: ...}}, expected a tuple, a float, a map or a tensor")


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    odd = [key for key, _ in pairs if not isinstance(key, (str, int, float, bool, tuple, type(None)))]
    if odd:
        raise CheckpointError(f"found a map with a {type(odd[0]).__name__} as a key, expected text, numbers or tuples")
    try:
        return dict(pairs)
    except TypeError as error:  # a tuple with a list inside
        raise CheckpointError(f"found a map with an invalid key ({error})") from error


def _tensor_of(dtype: Any, shape: Any, data: Any) -> Any:
    import torch

    count = elements(dtype, shape)
    try:
        raw = base64.b64decode(data, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise CheckpointError(f"a tensor's data is not base64 ({error})") from error
    if len(raw) != count * WIDTHS[dtype]:
        raise CheckpointError(f"a tensor of {count} {dtype} has {len(raw)} bytes, expected {count * WIDTHS[dtype]}")
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)


def read_file(file: Path, made: Callable[[Any], T]) -> T:
    """What `made` makes of a checkpoint's JSON file. Raises CheckpointError naming the file if it cannot be read or is refused."""
    try:
        data = read_json(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
    try:
        return made(data)
    except CheckpointError as error:
        raise CheckpointError(f"{file} is refused: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} is refused: {type(error).__name__}: {str(error)[:200]}") from error


def elements(dtype: Any, shape: Any) -> int:
    """Number of elements of a tensor of that dtype and shape. Raises CheckpointError if either is invalid."""
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise CheckpointError(f"dtype {str(dtype)[:40]!r}, expected one of {', '.join(WIDTHS)}")
    return math.prod(sizes(shape))


def sizes(shape: Any) -> list[int]:
    """`shape`, checked to be a short list of nonnegative integers. Raises CheckpointError."""
    if not isinstance(shape, list) or len(shape) > DEEPEST:
        raise CheckpointError("expected a list of sizes")
    for side in shape:
        if type(side) is not int or not 0 <= side <= LARGEST_SIDE:
            raise CheckpointError(f"a size of {str(side)[:40]}")
    if math.prod(shape) > LARGEST_SIDE:
        raise CheckpointError("a tensor larger than any memory")
    return shape


INDEX, STATE = "index.json", "state.json"
"""Files with this index, and with the state that is equal on all ranks (counters, schedule, groups, loss scaler), as encoded by `encoded`."""
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
    room = {name: facts["bytes"] for name, facts in listed.items()}
    return read_file(folder / INDEX, lambda data: _index(data, room))


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
