"""Encodes plain values as JSON and back, bit for bit: counters, schedules, random states, scaling states. Nothing else can be encoded.

JSON values encode themselves. The rest is an object with one key: `{"tuple": [...]}`, `{"float": "nan"}`, `{"map": [[key, value], ...]}`
(every dict) and `{"tensor": {"dtype", "shape", "data"}}` with the elements' bytes, little-endian, in base64.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
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
