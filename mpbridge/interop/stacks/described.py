"""Settings that a stack accepts but resolve refuses: described as far as possible, with what the description omits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from mpbridge.common.errors import MpbridgeError
from mpbridge.common.formats import DType, say
from mpbridge.common.traits import DEFAULT
from mpbridge.interop.stacks.meaning import Meaning, Sharded, of_policy
from mpbridge.precision.config import MixedPrecisionConfig
from mpbridge.precision.resolve import resolve

_BASE = frozenset({"bf16", "fp16", "fp32", "grad_reduce_in_fp32"})


def described(
    fields: Mapping[str, Any], contradicts: list[str], *, engine: str = DEFAULT, sharded: Sharded | None = None
) -> Meaning:
    """The meaning of MixedPrecisionConfig fields; if they are refused, the meaning of most of them, with the refusal and the omissions in `contradicts`."""
    try:
        return of_policy(resolve(MixedPrecisionConfig.from_data(fields)), engine=engine, sharded=sharded)
    except MpbridgeError as error:
        contradicts.append(str(error))
    # quantization details come last, after the facts that readers look for first
    optional = sorted((name for name in fields if name not in _BASE), key=lambda name: name.startswith(("fp8", "fp4")))
    quantized = tuple(name for name in optional if name.startswith(("fp8", "fp4", "first_", "num_layers")))
    for left in (
        *itertools.combinations(optional, 1),
        *itertools.combinations(optional, 2),
        quantized,
        tuple(optional),
    ):
        rest = {name: value for name, value in fields.items() if name not in left}
        try:
            meaning = of_policy(resolve(MixedPrecisionConfig.from_data(rest)), engine=engine, sharded=sharded)
        except MpbridgeError:
            continue
        if left:
            contradicts.append(f"not described: {', '.join(f'{name}={say(fields[name])}' for name in left)}")
        return meaning
    base = DType.BF16 if fields.get("bf16") else DType.FP16 if fields.get("fp16") else DType.FP32
    wire = DType.FP32 if fields.get("grad_reduce_in_fp32", True) else base
    main = None if base is DType.FP32 else DType.FP32
    contradicts.append("only storage and communication are described")
    return Meaning(storage=base, compute=base, main=main, wire=wire, accumulator=wire, sharded=sharded or "optimizer")
