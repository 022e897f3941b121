"""Reads `torch.save` archives as data (safe_unpickler.py): tensors become references to their bytes. Loads no framework."""

from __future__ import annotations

import base64
import math
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, RawIOBase
from typing import IO, Any

from mpbridge.common.errors import CheckpointError
from mpbridge.common.files import LIMITS
from mpbridge.common.safe_unpickler import LEGACY_MAGIC, Budget, Name, UnpickledCall, read
from mpbridge.training.checkpoint.format import WIDTHS, elements, encoded

LARGEST_PICKLE = LIMITS["pickle"].size
_LOCAL_HEADER = 30
"""Size of a zip file's local header before the name (APPNOTE 4.3.7); its last four bytes are the lengths of name and extra field."""
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16", "LongStorage": "int64",
    "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8",
}  # fmt: skip
"""torch's typed storages -> dtype of their elements; an untyped one counts bytes."""
MOST_SIDES = 64
"""Dimensions of a tensor; torch has no more."""
DEEPEST = 3
"""Maximum nesting of archives within pickles within archives."""


class Slice(RawIOBase):
    """Bytes from `start` to `stop` of a file, as a file."""

    def __init__(self, stream: IO[bytes], start: int, stop: int) -> None:
        self.stream, self.start, self.size, self.at = stream, start, stop - start, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Like seek of a file that contains only this slice."""
        self.at = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence] + offset
        return self.at

    def tell(self) -> int:
        """Position from the slice's start."""
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Reads at most the rest of the slice."""
        left = max(0, self.size - self.at)
        self.stream.seek(self.start + self.at)
        data = self.stream.read(left if size < 0 else min(size, left))
        self.at += len(data)
        return data


def members(stream: IO[bytes], start: int, stop: int) -> dict[str, tuple[int, int]]:
    """Name within the archive (without its top folder) -> first byte in `stream`, and size. Raises CheckpointError for any other file."""
    part = Slice(stream, start, stop)
    found = {}
    try:
        with zipfile.ZipFile(part) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"{info.filename[:80]} is compressed")
                part.seek(info.header_offset)
                name, extra = struct.unpack("<HH", part.read(_LOCAL_HEADER)[-4:])
                at = start + info.header_offset + _LOCAL_HEADER + int(name) + int(extra)
                if not start <= at <= at + info.file_size <= stop:
                    raise CheckpointError(f"{info.filename[:80]} is outside its archive")
                found[info.filename.partition("/")[2]] = (at, info.file_size)
    except (zipfile.BadZipFile, struct.error, OSError, ValueError, RuntimeError) as error:
        # RuntimeError: zipfile raises it for what it cannot read
        raise CheckpointError(f"not an archive of torch.save ({error})") from error
    return found


@dataclass(frozen=True, slots=True)
class StorageSlice:
    """A storage: bytes `at` .. `at + size` of `stream`."""

    stream: IO[bytes]
    at: int
    size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor described by an archive; strides and offset in elements."""

    held: StorageSlice
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def content(self) -> bytes:
        """The elements, row-major."""
        count, width = math.prod(self.shape), WIDTHS[self.dtype]
        if not count:
            return b""
        expected = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        if all(side == 1 or a == b for side, a, b in zip(self.shape, self.stride, expected, strict=True)):
            self.held.stream.seek(self.held.at + self.offset * width)
            return self.held.stream.read(count * width)
        self.held.stream.seek(self.held.at)
        raw, places = self.held.stream.read(self.held.size), [self.offset]
        for side, step in zip(self.shape, self.stride, strict=True):
            places = [place + step * n for place in places for n in range(side)]
        return b"".join(raw[place * width : (place + 1) * width] for place in places)

    def as_json(self) -> dict[str, Any]:
        """As `format.encoded` writes it."""
        data = base64.b64encode(self.content()).decode("ascii")
        return {"dtype": self.dtype, "shape": list(self.shape), "data": data}


def tensor(held: Any, offset: Any, size: Any, stride: Any, dtype: str) -> Tensor:
    """The tensor, checked to be inside its storage. Raises CheckpointError."""
    sides, steps = list(size), list(stride)
    count = elements(dtype, sides)
    if type(offset) is not int or offset < 0 or any(type(step) is not int or step < 0 for step in steps):
        raise CheckpointError("a tensor with an invalid offset or strides")
    last = offset + sum((side - 1) * step for side, step in zip(sides, steps, strict=True))
    if not isinstance(held, StorageSlice) or (count and (last + 1) * WIDTHS[dtype] > held.size):
        raise CheckpointError("a tensor outside its storage")
    if count * WIDTHS[dtype] > held.size:
        raise CheckpointError("a tensor with more elements than its storage")
    return Tensor(held, dtype, tuple(sides), tuple(steps), offset)


def load(stream: IO[bytes], start: int, stop: int, depth: int = 0, budget: Budget | None = None) -> Any:
    """An archive's contents: plain values, Tensors, and UnpickledCall for the records in `plain_call`. Raises CheckpointError."""
    if depth > DEEPEST:
        raise CheckpointError("archives nested too deeply")
    inside = members(stream, start, stop)
    if "data.pkl" not in inside:
        raise CheckpointError("not an archive of torch.save (no data.pkl)")
    at, size = inside["data.pkl"]
    if size > LARGEST_PICKLE:
        raise CheckpointError(f"a pickle of {size} bytes")
    stream.seek(at)

    def storage(key: Any) -> StorageSlice:
        kind, name = key[1], f"data/{_shown(key[2])}"
        if key[0] != "storage" or name not in inside:
            raise CheckpointError(f"missing storage: {str(name)[:80]}")
        place, room = inside[name]
        return StorageSlice(stream, place, room, _storage_dtype(kind))

    budget = budget or Budget()
    return read(stream.read(size), plain_call(depth, budget=budget), storage, budget=budget)[0]


def _storage_dtype(kind: Any) -> str:
    if not isinstance(kind, Name) or kind.name not in _STORAGES or kind.module not in ("torch", "torch.storage"):
        raise CheckpointError(f"a storage of {_shown(kind)}")
    return _STORAGES[kind.name]


def dtype_of(name: Any) -> str:
    """torch's name of the dtype that a global refers to. Raises CheckpointError."""
    if not isinstance(name, Name) or name.module != "torch" or name.name not in WIDTHS:
        raise CheckpointError(f"{_shown(name)} is not a dtype")
    return name.name


def _shown(value: Any) -> str:
    """For messages: a name, or the type of anything else, whose text may be endless."""
    return str(value)[:80] if isinstance(value, (Name, str)) else f"a {type(value).__name__}"


def plain_call(
    depth: int = 0, records: Callable[[Name], bool] = lambda name: False, *, budget: Budget | None = None
) -> Callable[[Name, tuple[Any, ...]], Any]:
    """The value of a call: tensors, sizes and dicts; an UnpickledCall if the name is in `records`. Raises CheckpointError for any other.

    budget: of the pickle that calls, which archives inside of it share."""
    shared = budget or Budget()

    def call(name: Name, args: tuple[Any, ...]) -> Any:
        match (name.module, name.name):
            case ("torch._utils", "_rebuild_tensor_v2"):
                held, offset, size, stride = args[:4]
                return tensor(held, offset, size, stride, held.dtype)
            case ("torch._utils", "_rebuild_tensor_v3"):
                held, offset, size, stride, _, _, dtype = args[:7]
                return tensor(held, offset, size, stride, dtype_of(dtype))
            # megatron-core 0.20 puts the second in the place of the first when it is imported, so pickles written after that name it
            case ("torch.storage", "_load_from_bytes") | ("megatron.core.safe_globals", "safe_load_from_bytes"):
                return _from_bytes(args[0], depth + 1, shared)
            case ("torch", "Size") if len(args[0]) <= MOST_SIDES:
                return tuple(args[0])
            case ("collections", "OrderedDict") if not args:
                return {}
            case ("collections", "deque") if not args or args[0] in ([], ()):
                return []
        if records(name):
            return UnpickledCall(name, args)
        raise CheckpointError(f"it refers to {name}, which is not plain data")

    return call


def _from_bytes(data: Any, depth: int, budget: Budget) -> Any:
    """A storage saved in its own bytes, as an archive or in torch's older format."""
    if not isinstance(data, (bytes, bytearray)) or depth > DEEPEST:
        raise CheckpointError("archives nested too deeply")
    raw = bytes(data)
    # a pickle may name the same bytes again and again; opening an archive costs as much as that
    budget.spend(len(raw) // 64 + 1000)
    if raw[:2] == b"PK":
        return load(BytesIO(raw), 0, len(raw), depth, budget)
    at, kept = 0, {}

    def storage(key: Any) -> StorageSlice:
        if key[0] != "storage" or type(key[4]) is not int:
            raise CheckpointError("a missing storage")
        kept[key[2]] = _storage_dtype(key[1])
        size = key[4] * WIDTHS[kept[key[2]]]
        return StorageSlice(BytesIO(raw), len(raw) - size, size, kept[key[2]])

    values = []
    for _ in range(5):  # magic number, protocol, the writer's machine, the object, its storages' keys
        value, at = read(raw, plain_call(depth, budget=budget), storage, at, budget=budget)
        values.append(value)
    if values[0] != LEGACY_MAGIC or len(values[4]) != 1 or len(kept) != 1:
        raise CheckpointError("not a storage that torch saved")
    found = values[3]
    if not isinstance(found, StorageSlice) or found.at < at:
        raise CheckpointError("a truncated storage")
    return found


MOST = 5_000_000
"""Maximum number of values in one state; repeated references to a container count each time."""


def spelled(value: Any) -> Any:
    """`value` as JSON types. Raises CheckpointError for records, and for shared containers that expand to too many values."""
    left, waiting = MOST, [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        left -= 1
        if left < 0 or depth > 100:
            raise CheckpointError(f"more than {MOST} values, or values nested endlessly")
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple)):
            waiting += [(part, depth + 1) for part in item]
    return encoded(value)
