"""Transformer Engine's quantized tensors as they enter its GEMMs, compared with the tensors from which they were quantized.

All of them pass through `entry(A, transA, B, transB, ...)` of one of `GEMM_ENTRIES` (pytorch/cpp_extensions/gemm.py), where fprop is TN of
(weight, x), dgrad NN of (weight, dy) and wgrad NT of (x, dy); grouped ones take lists or grouped tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mpbridge.common.formats import FORMATS
from mpbridge.common.transformer_engine import GEMM_ENTRIES
from mpbridge.common.upstream import Patch, Replacement
from mpbridge.numerics.statistics import errors, spread
from mpbridge.observe.telemetry.probe import Noise, Probe, normalised
from mpbridge.observe.telemetry.records import OPERANDS
from mpbridge.precision.regions import Gemm, Gemms
from mpbridge.te_cpu.grouped_buffers import members
from mpbridge.te_cpu.operands import codes_at_limit, gemm_values, scale_of
from mpbridge.te_cpu.storages import storage_kind

_GEMM: dict[tuple[bool, bool], Gemm] = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
_SIDES: dict[Gemm, tuple[str, str]] = {"fprop": ("w", "x"), "dgrad": ("w", "dy"), "wgrad": ("x", "dy")}
ROWS = 256
"""Number of rows of an operand that are compared with their source."""


class Tap:
    """Observes the quantized operands of one step's GEMMs. gemms_of: the policy's rules for a linear."""

    def __init__(self, probe: Probe, noise: Noise, gemms_of: Callable[[str], Gemms | None]) -> None:
        self.probe, self.noise, self.gemms_of = probe, noise, gemms_of
        self.found: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.unread: dict[str, int] = {}
        """Reason why operands could not be read -> how many."""
        self._sources: dict[tuple[str, str], torch.Tensor] = {}
        self._modules: dict[str, Any] = {}
        self._doors = Replacement(self._patches)

    # --- begin and end -------------------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Wraps the GEMM functions of the compiled extension, if it is loaded."""
        self.probe.sources.append(self._source)
        self._doors.enter()

    def stop(self) -> None:
        """Restores them."""
        self._doors.leave()
        self._sources.clear()
        self._modules.clear()
        self.probe.sources.remove(self._source)

    def _patches(self) -> Iterator[Patch]:
        extension = sys.modules.get("transformer_engine_torch")
        for name in GEMM_ENTRIES:
            if (real := getattr(extension, name, None)) is not None:
                yield extension, name, self._watched(real)

    def rows(self) -> list[list[Any]]:
        """Rows of records.OPERANDS."""
        known = self.found.items()
        return [[*key, "+".join(one["gemms"]), *(one[name] for name in OPERANDS[4:])] for key, one in known]

    # --- what passes ---------------------------------------------------------------------------------------------------------------------
    def _source(self, path: str, module: Any, side: str, tensor: torch.Tensor) -> None:
        self._modules[path] = module
        self._sources[path, side] = tensor.reshape(-1, tensor.shape[-1])

    def _watched(self, real: Any) -> Any:
        def call(A: Any, transa: bool, B: Any, transb: bool, *args: Any, **named: Any) -> Any:
            gemm = _GEMM.get((bool(transa), bool(transb)))
            # forward runs inside a linear, backward after the hook on its output; a recomputed forward pass is a forward pass again
            path = self.probe.inside if gemm == "fprop" else self.probe.gradients
            if gemm is not None and path is not None:
                grouped = any(_is_group(operand) for operand in (A, B))
                for number, pair in enumerate(zip(self._members(A), self._members(B), strict=False)):
                    name = f"{path}.{number}" if grouped else path
                    for side, operand, column in zip(_SIDES[gemm], pair, (not transa, bool(transb)), strict=True):
                        self._see(name, path, gemm, side, operand, column=column)
            return real(A, transa, B, transb, *args, **named)

        return call

    def _members(self, operand: Any) -> list[Any]:
        """The tensors of an operand: one, or those of a list or a grouped tensor."""
        if isinstance(operand, (list, tuple)):
            return list(operand)
        if not _is_group(operand):
            return [operand]
        try:
            return [one for one, _, _ in members(operand)]
        except Exception as error:  # another layout or device: noted, and the run continues
            self._note(f"{type(operand).__name__}: {type(error).__name__}")
            return []

    def _note(self, why: str) -> None:
        self.unread[why] = self.unread.get(why, 0) + 1

    def _see(self, name: str, path: str, gemm: Gemm, side: str, operand: Any, *, column: bool) -> None:
        kind = storage_kind(operand)
        gemms = self.gemms_of(path)
        quant = None if gemms is None else getattr(gemms, gemm)
        if kind is None or quant is None:
            return
        copy = "row" if quant.row.per_tensor or not column else "column"
        known = self.found.get((name, side, copy))
        if known is not None:
            if gemm not in known["gemms"]:
                known["gemms"].append(gemm)
            return
        try:
            values = gemm_values(operand, column=column)
        except Exception as error:  # a release, a layout or a device that cannot be read: noted, and the run continues
            self._note(f"{type(operand).__name__}, {'column' if column else 'row'} copy: {type(error).__name__}")
            return
        source = None if name != path else self._exact(path, side, values, column=column, bits=quant.bits)
        number = FORMATS[quant.element(gradient=side == "dy")]
        scale = scale_of(operand, column=column)
        seen = _compared(values, source, codes_at_limit(operand, values.shape, column=column))
        if quant.row.history:
            wanted = number.largest * 2.0**-quant.margin / max(seen["amax"] or 0.0, 1e-38)
            seen["staleness"] = math.log2(wanted / scale) if scale else None
        named = {"gemms": [gemm], "format": number.name, "scaling": quant.scaling, "scale": scale}
        self.found[name, side, copy] = named | seen
        if source is not None and side != "w" and (gemm == "wgrad" or quant.row.per_tensor):
            self.noise.note(path, side, source, values)

    def _exact(self, path: str, side: str, values: torch.Tensor, *, column: bool, bits: int) -> torch.Tensor | None:
        """The tensor from which the operand was quantized; None if it is not available (gathered, grouped, or rotated before the cast)."""
        if bits == 4 and column and side != "w":
            return None  # rotated by a Hadamard transform
        module: Any = self._modules.get(path)
        if side == "w":
            weight: Any = getattr(module, "weight", None)
            plain = type(weight) in (torch.Tensor, torch.nn.Parameter)
            return weight.detach() if plain and weight.shape == values.shape else None
        found = self._sources.get((path, side))
        if found is None or found.shape != values.shape:
            return None
        return normalised(module, found) if side == "x" else found


def _is_group(operand: Any) -> bool:
    return isinstance(operand, (list, tuple)) or hasattr(operand, "num_tensors")


def _compared(values: torch.Tensor, source: torch.Tensor | None, limit: torch.Tensor | None) -> dict[str, Any]:
    """Shares and errors on a sample of rows; without the source only what the codes themselves show (amax and non-finite values)."""
    made: dict[str, Any] = dict.fromkeys(("flushed", "saturated", "staleness", "sqnr", "row_error"))
    if source is None:
        largest = float(values.abs().amax()) if values.numel() else 0.0
        return made | {"amax": largest, "nonfinite": int((~values.isfinite()).sum())}
    picked = spread(values.shape[0], ROWS, values.device)
    x, q = source[picked].float(), values[picked]
    finite = x.isfinite() & q.isfinite()
    bad = int((~finite).sum())
    x, q = torch.where(finite, x, 0.0), torch.where(finite, q, 0.0)
    count, relative, row, flushed = errors(x, q)
    clipped = 0 if limit is None else int((limit[picked] & (x.abs() > q.abs() * (1 + 2.0**-20)) & (q != 0)).sum())
    made |= {"flushed": flushed, "row_error": row, "amax": float(source.abs().amax()), "nonfinite": bad}
    made["saturated"] = clipped / count if limit is not None else None
    return made | {"sqnr": -20 * math.log10(relative) if relative else math.inf}
