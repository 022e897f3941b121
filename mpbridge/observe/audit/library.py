"""State of Transformer Engine's modules that can be inspected although their GEMMs cannot: weights quantized once per step, scales and amax histories."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.observe.audit.delayed import tables
from mpbridge.observe.telemetry.native import normalised

_CODES = ("_data", "_rowwise_data", "_columnwise_data", "_scale_inv")
"""Inner tensors of a quantized tensor that depend on its values alone, not on a release's layout of block scales."""


@dataclass
class LibraryObservation:
    """One rank's observation of a step."""

    cached: int = 0
    """Quantized copies of weights that a forward pass read, and column copies that its backward pass reads."""
    stale: list[str] = field(default_factory=list)
    """Copies that do not equal the quantized weight."""
    begun: dict[str, torch.Tensor] = field(default_factory=dict)
    """'LINEAR x', 'LINEAR dy' -> the amax history at the start of the last micro-batch."""
    amax: dict[str, float] = field(default_factory=dict)
    """'LINEAR x' -> largest element of its input in the last micro-batch, behind a fused norm; not of grouped linears."""
    _seen: set[str] = field(default_factory=set)

    def enters(self, module: Any, path: str, source: torch.Tensor) -> None:
        """Call before a linear's forward pass; source: its input."""
        names = set()
        for name, history, _ in tables(module):
            self.begun[f"{path} {name}"] = history.detach().clone()
            names.add(name)
        if "x" in names and "x1" not in names and source.numel() and type(source) in (torch.Tensor, torch.nn.Parameter):
            self.amax[f"{path} x"] = float(normalised(module, source.detach()).abs().amax())

    def leaves(self, module: Any, path: str) -> None:
        """Call after a linear's forward pass: checks that the copy it just read is its weight, quantized, and that the backward pass will read the same."""
        if torch.is_grad_enabled() and f"{path} dgrad" not in self._seen:
            self._seen.add(f"{path} dgrad")
            for name, weight in module.named_parameters(recurse=False):
                if (agrees := _copies_agree(weight)) is not None:
                    self.cached += 1
                    self.stale += [] if agrees else [f"{path}.{name} (its column copy)"]
        if path in self._seen:
            return
        self._seen.add(path)
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
