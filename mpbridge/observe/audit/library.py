"""State of Transformer Engine's modules that can be inspected although their GEMMs cannot: weights quantized once per step, scales and amax histories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.common.formats import FORMATS
from mpbridge.precision.regions import Quant

_CODES = ("_data", "_rowwise_data", "_columnwise_data", "_scale_inv")
"""Inner tensors of a quantized tensor that depend on its values alone, not on a release's layout of block scales."""
_FORWARD, _BACKWARD = 3, 2
"""Columns that one GEMM has in the tables of delayed scaling: input, weight, output; gradient of the output, of the input (module/base.py)."""


@dataclass
class LibraryObservation:
    """One rank's observation of a step."""

    cached: int = 0
    """Quantized copies of weights that a forward pass read, and column copies that its backward pass reads."""
    stale: list[str] = field(default_factory=list)
    """Copies that do not equal the quantized weight."""
    begun: dict[str, torch.Tensor] = field(default_factory=dict)
    """'LINEAR x', 'LINEAR dy' -> the amax history at the start of the last micro-batch."""
    _seen: set[str] = field(default_factory=set)

    def enters(self, module: Any, path: str) -> None:
        """Call before a linear's forward pass."""
        for name, history, _ in tables(module):
            self.begun[f"{path} {name}"] = history.detach().clone()

    def leaves(self, module: Any, path: str) -> None:
        """Call after a linear's forward pass: checks that the copy it just read is its weight, quantized."""
        if path in self._seen:
            return
        self._seen.add(path)
        for name, weight in module.named_parameters(recurse=False):
            if (agrees := _copies_agree(weight)) is not None:
                self.cached += 1
                self.stale += [] if agrees else [f"{path}.{name} (its column copy)"]
        held = getattr(module, "_fp8_workspaces", None) or {}
        for name, copy in held.items():
            weight, quantizer = getattr(module, name, None), _quantizer(module, name)
            if not isinstance(weight, torch.Tensor) or quantizer is None or copy.shape != weight.shape:
                continue  # several parameters in one GEMM, or a shard
            self.cached += 1
            with torch.no_grad():
                anew = quantizer(weight.detach())
            if not all(_same(getattr(copy, part, None), getattr(anew, part, None)) for part in _CODES):
                self.stale.append(f"{path}.{name}")


def _copies_agree(weight: Any) -> bool | None:
    """Whether the column copy of a stored quantized weight has the codes of its row copy; None if it does not have two copies that must agree."""
    rows, columns = getattr(weight, "_data", None), getattr(weight, "_transpose", None)
    if getattr(weight, "_transpose_invalid", False):
        columns = None  # it is rebuilt before it is read
    if getattr(weight, "_is_2D_scaled", False) and "COMPACT" not in str(getattr(weight, "_data_format", "")):
        rows, columns = weight._rowwise_data, weight._columnwise_data
    if rows is None or columns is None:
        return None
    return torch.equal(columns.reshape(columns.shape[0], -1), rows.reshape(-1, rows.shape[-1]).t())


def _quantizer(module: Any, name: str) -> Any:
    """The quantizer of that weight; None if there is none (releases and modules that use other names)."""
    all_of = getattr(module, "_get_weight_quantizers", None)
    found = [] if all_of is None else all_of()
    number = "".join(letter for letter in name if letter.isdigit())
    index = int(number or 0) - (1 if name.startswith("fc") else 0)
    return found[index] if index < len(found) else None


def _same(held: Any, anew: Any) -> bool:
    if not isinstance(held, torch.Tensor) or not isinstance(anew, torch.Tensor):
        return True  # this GEMM does not need the copy
    return torch.equal(held, anew)


def tables(module: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(tensor, amax history, scale) of each tensor that a Transformer Engine module scales by its history; 'x', 'dy', in a grouped linear 'x1', 'dy1' ..."""
    meta: Any = getattr(module, "fp8_meta", None)
    recipe: Any = meta.get("recipe") if isinstance(meta, dict) else None
    if recipe is None or not getattr(module, "fp8", False) or not recipe.delayed():
        return
    for name, key, columns in (("x", "scaling_fwd", _FORWARD), ("dy", "scaling_bwd", _BACKWARD)):
        table = meta.get(key)
        if table is None or not hasattr(table, "amax_history"):
            continue
        for gemm in range(table.amax_history.shape[1] // columns):
            column = gemm * columns
            yield f"{name}{gemm or ''}", table.amax_history[:, column], table.scale[column]


def scale_faults(path: str, quant: Quant, module: Any, begun: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """'' or the fault, for each tensor of a linear that is scaled by its history.

    The update rolls the history up by one, puts the newest amax last, clears the first entry, and computes the scale from the largest (or the newest) entry,
    including the one that leaves. A tensor whose amax was 0 keeps both. Source: common/recipe/delayed_scaling.cu.
    """
    for name, history, stored in tables(module):
        where, scale = f"{path} {name}", float(stored)
        if history.numel() != quant.amax_history:
            yield f"{where}: promised an amax history of {quant.amax_history}, found {history.numel()}"
            continue
        newest, waiting = float(history[-1]), float(history[0])
        if waiting and history.numel() > 1:
            yield f"{where}: amax {waiting:.6g} was recorded but the scale was not updated"
            continue
        if history.numel() == 1:  # one entry, cleared when the scale is computed
            yield ""
            continue
        basis = newest if quant.amax_algo == "most_recent" else float(history.max())
        before = begun.get(where)
        # computed from an entry that left in the same update, or kept because the amax was 0
        older = [] if before is None or quant.amax_algo == "most_recent" else before[before > basis].tolist()
        good = (
            not basis
            or any(
                math.isclose(scale, _scale(quant, name, amax), rel_tol=1e-5) for amax in (basis, *older)
            )
        )  # fmt: skip
        yield "" if good else f"{where}: scale {scale:.6g}, its history gives {_scale(quant, name, basis):.6g}"


def _scale(quant: Quant, name: str, amax: float) -> float:
    return FORMATS[quant.element(gradient=name.startswith("dy"))].largest * 2.0**-quant.margin / amax
