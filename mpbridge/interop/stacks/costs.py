"""What one setup costs or loses compared with another, row by row: bytes kept, bytes sent, mantissa bits."""

from __future__ import annotations

from mpbridge.common.formats import DType
from mpbridge.interop.stacks.meaning import Meaning

_ROUNDED = (
    "compute", "autocast", "wire", "accumulator", "exp_avg", "exp_avg_sq", "output", "pipeline", "logits", "router",
)  # fmt: skip
"""Rows whose dtype rounds the values that pass through."""
_SENT = {"wire": "gradients on the wire", "pipeline": "activations between stages"}
"""Rows whose dtype decides how much is sent."""
_TIMES = {0.5: "half", 2.0: "twice"}


def cost(row: str, ours: Meaning, theirs: Meaning) -> str:
    """The cost of `theirs` relative to `ours` in a row where they differ ('2 bytes per parameter more'); '' if it has no number.

    Bytes are per parameter of a dense model before anything is divided over ranks; bits those of the mantissa.
    """
    if row in ("quantization", "stored"):
        return _of_quantized(ours, theirs)
    found = []
    before, after = _held(row, ours, theirs), _held(row, theirs, ours)
    if before != after:
        copied = row == "accumulator" and ours.held["optimizer_reads"] != theirs.held["optimizer_reads"]
        copy = " with the optimizer's copy" if copied else ""
        found.append(f"{_count(abs(after - before), 'byte')} per parameter {_than(before, after)}{copy}")
    mine, there = _dtype(row, ours), _dtype(row, theirs)
    if mine is None or there is None:
        return ", ".join(found)
    if row in _SENT and mine.bytes != there.bytes:
        factor = there.bytes / mine.bytes
        found.append(f"{_TIMES.get(factor, f'{factor:g} times')} the bytes of {_SENT[row]}")
    if row in _ROUNDED and mine.mantissa is not None and there.mantissa is not None and there.mantissa < mine.mantissa:
        found.append(f"{_count(mine.mantissa - there.mantissa, 'bit')} of mantissa fewer")
    return ", ".join(found)


def _held(row: str, one: Meaning, other: Meaning) -> int:
    """Bytes of a row; an accumulator's include the copy that the optimizer then needs."""
    held = one.held
    if row == "optimizer_reads" and one.accumulator is not other.accumulator:
        return 0
    return held["accumulator"] + held["optimizer_reads"] if row == "accumulator" else held.get(row, 0)


def _of_quantized(ours: Meaning, theirs: Meaning) -> str:
    """Operand bits of the linears without a rule of their own, and bytes of their stored weights."""
    (operands, weights, low), (operands_there, weights_there, low_there) = _linear(ours), _linear(theirs)
    found = []
    if operands != operands_there:
        found.append(f"operands of {operands_there} bits instead of {operands}")
    if weights != weights_there and (low or low_there):  # else it is the stored parameters' row
        apart = abs(weights_there - weights) / 8
        found.append(f"{apart:g} byte{'' if apart == 1 else 's'} per quantized weight {_than(weights, weights_there)}")
    return ", ".join(found)


def _linear(meaning: Meaning) -> tuple[int, int, bool]:
    """(bits of an operand, bits of a stored weight, whether it is stored quantized) of a linear under the last rule."""
    wide, quants = 8 * meaning.compute.bytes, meaning.regions[-1].rules.distinct
    operand = min((quant.bits for quant in quants), default=wide)
    rests = [quant.bits for quant in quants if quant.stored]
    return operand, min(rests, default=8 * meaning.storage.bytes), bool(rests)


def _dtype(row: str, meaning: Meaning) -> DType | None:
    """The dtype of a row as it acts: without autocast operations run in the compute dtype, and modules hand on what they computed. None: no such tensor."""
    if not meaning.optimizer.keeps(row):
        return None
    value = meaning.in_force(row) if row in ("output", "pipeline") else getattr(meaning, row, None)
    if value is None and row in ("autocast", "output", "pipeline", "logits"):
        return meaning.compute
    return value if isinstance(value, DType) else None


def _than(before: int, after: int) -> str:
    return "more" if after > before else "fewer"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" + ("" if number == 1 else "s")
