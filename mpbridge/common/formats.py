"""Number formats, the dtype parser, and the only (lazy) access to torch's dtypes. Imports no framework."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from mpbridge.common.errors import BadValue, brief

if TYPE_CHECKING:
    import torch


class DType(enum.Enum):
    """A storage dtype of tensors; the value is torch's name for it."""

    FP64 = "float64"
    FP32 = "float32"
    BF16 = "bfloat16"
    FP16 = "float16"
    UINT8 = "uint8"
    INT16 = "int16"

    __hash__ = object.__hash__  # members are singletons; Enum hashes the name, in Python

    @property
    def short(self) -> str:
        """The short name: 'bf16'."""
        return {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(self.value, self.value)

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return _BYTES[self]

    @property
    def mantissa(self) -> int | None:
        """Number of stored mantissa bits (IEEE 754; bfloat16 keeps the upper seven of FP32's 23); None for integers."""
        return {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10}.get(self.value)

    def torch(self) -> torch.dtype:
        """The torch dtype; imports torch."""
        # import_module, so that the contract "data layers import no framework" stays checkable
        return cast("torch.dtype", getattr(importlib.import_module("torch"), self.value))

    def __repr__(self) -> str:
        return self.short


_BYTES: Mapping[DType, int] = MappingProxyType(dict.fromkeys(DType, 2) | {DType.FP64: 8, DType.FP32: 4, DType.UINT8: 1})
_SPELLINGS: Mapping[str, DType] = MappingProxyType(
    {member.value: member for member in DType}
    | {member.short: member for member in DType}
    | {"float": DType.FP32, "single": DType.FP32, "32": DType.FP32, "half": DType.FP16, "double": DType.FP64}
    # Megatron-LM's flags use "fp8" for Adam moments and mean uint8 storage with a scale
    | {"fp8": DType.UINT8, "byte": DType.UINT8, "short": DType.INT16}
)


def dtype(spelling: object) -> DType:
    """The DType for 'bf16', 'bfloat16', 'torch.bfloat16', torch.bfloat16 or a DType. Raises BadValue."""
    if isinstance(spelling, DType):
        return spelling
    # str() of a torch.dtype is 'torch.bfloat16', so it can be read without importing torch
    name = str(spelling).strip().lower().removeprefix("torch.")
    if name not in _SPELLINGS:
        legal = ", ".join(member.short for member in DType)
        raise BadValue(f"{brief(spelling)} is not a dtype (expected one of {legal}, or torch's name for it)")
    return _SPELLINGS[name]


def say(value: Any) -> str:
    """A value as displayed: dtypes in any spelling by their short name, None as 'none', powers of two as '2**32'."""
    if isinstance(value, DType):
        return value.short
    text = str(value)
    if text.startswith("torch."):
        return dtype(text).short if text.removeprefix("torch.") in _SPELLINGS else text
    if value is None:
        return "none"
    if isinstance(value, bool):
        return text.lower()
    if isinstance(value, (int, float)) and 65536 <= value < math.inf:
        power = int(value).bit_length() - 1
        return f"2**{power}" if value == 2**power else text
    return getattr(value, "__qualname__", text) if callable(value) else text


def plain(value: Any) -> Any:
    """A value in plain YAML and JSON types: dtypes by their short names, dataclasses as mappings, tuples as lists. Raises BadValue for any other object."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return dtype(value).short


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A low-precision element or scale format.

    exponent, mantissa: bits of each field; bias: subtracted from the stored exponent; largest: largest finite value;
    smallest: smallest positive value (subnormal, if the format has subnormals); signed: has a sign bit.
    Sources: E4M3 and E5M2: arXiv 2209.05433 (E4M3 here is the "fn" variant: no infinities); E2M1 and E8M0: OCP Microscaling Formats v1.0."""

    name: str
    exponent: int
    mantissa: int
    bias: int
    largest: float
    smallest: float
    signed: bool = True

    @property
    def bits(self) -> int:
        """Number of storage bits."""
        return self.signed + self.exponent + self.mantissa


E4M3 = NumberFormat(name="e4m3", exponent=4, mantissa=3, bias=7, largest=448.0, smallest=2.0**-9)
E5M2 = NumberFormat(name="e5m2", exponent=5, mantissa=2, bias=15, largest=57344.0, smallest=2.0**-16)
E2M1 = NumberFormat(name="e2m1", exponent=2, mantissa=1, bias=1, largest=6.0, smallest=0.5)
E8M0 = NumberFormat(name="e8m0", exponent=8, mantissa=0, bias=127, largest=2.0**127, smallest=2.0**-127, signed=False)
FORMATS: Mapping[str, NumberFormat] = MappingProxyType({f.name: f for f in (E4M3, E5M2, E2M1, E8M0)})
