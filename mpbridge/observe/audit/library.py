"""State of Transformer Engine's modules that can be inspected although their GEMMs cannot: weights quantized once per step, scales and amax histories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.observation.modules import module_paths
from mpbridge.observe.audit.delayed import tables
from mpbridge.observe.telemetry.native import normalised

_CODES = ("_data", "_rowwise_data", "_columnwise_data", "_scale_inv")
"""Inner tensors of a quantized tensor that depend on its values alone, not on a release's layout of block scales."""


def scales_of(engine: Any) -> dict[str, float]:
    """'LINEAR x', 'LINEAR dy' -> the delayed scale of each Transformer Engine linear."""
    return {
        f"{path} {name}": float(scale)
        for module, path in module_paths(engine.model).items()
        for name, _, scale in tables(module)
    }


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
    left: dict[str, float] = field(default_factory=dict)
    """'LINEAR x' -> the delayed scale that the step before left; empty: unknown."""
    moved: list[str] = field(default_factory=list)
    """Scales that are not those in the first forward pass."""
    _seen: set[str] = field(default_factory=set)

    def enters(self, module: Any, path: str, source: torch.Tensor) -> None:
        """Call before a linear's forward pass; source: its input."""
        names = set()
        for name, history, scale in tables(module):
            key = f"{path} {name}"
            if key not in self.begun and self.left.get(key, float(scale)) != float(scale):
                self.moved.append(f"{key}: scale {float(scale):.6g}, the step before left {self.left[key]:.6g}")
            self.begun[key] = history.detach().clone()
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


_ROOM = 1.0 + 2.0**-7
"""Margin for the rounding of the FP32 scales."""


def is_quantized(stored: Any) -> bool:
    """Whether the tensor is one of Transformer Engine's quantized tensors."""
    return hasattr(stored, "_scale_inv") or hasattr(stored, "_rowwise_scale_inv")


@torch.no_grad()
def is_rounded(stored: Any, main: torch.Tensor, begin: int) -> bool:
    """Whether the elements of the flattened quantized weight `stored`, from `begin` on, match the FP32 numbers `main` to within half a step of E4M3.

    With a scale s, an element w becomes a code with 3 bits after the leading one: the code is within a relative 2**-4 of s w, and below the normal range
    within half of the smallest subnormal, 2**-10. A block's scale is above half of 448 / (the whole weight's amax), since rounding a scale to a power of two loses
    a factor below 2. With one scale for the whole tensor, values beyond its range saturate.
    """
    return all(_is_near(one, stored, main, begin) for one in _copies(stored))


def _copies(stored: Any) -> Iterator[torch.Tensor]:
    """The values of its row copy and, of one with other scales along columns (MXFP8), of its column copy, which dgrad reads; flat."""
    yield stored.dequantize(dtype=torch.float32).reshape(-1)
    codes, scales = getattr(stored, "_columnwise_data", None), getattr(stored, "_columnwise_scale_inv", None)
    if type(stored).__name__ != "MXFP8Tensor" or codes is None or scales is None:
        return
    rows, columns = codes.shape
    lines = scales[: -(-rows // 32), :columns].float()  # E8M0: a power of two; the table is padded
    factor = torch.exp2(lines - 127).repeat_interleave(32, dim=0)[:rows]
    yield (codes.view(torch.float8_e4m3fn).float() * factor).reshape(-1)


def _is_near(whole: torch.Tensor, stored: Any, main: torch.Tensor, begin: int) -> bool:
    found, wanted = whole[begin : begin + main.numel()], main.float()
    if found.numel() != main.numel():
        return False
    inverse = getattr(stored, "_scale_inv", None)
    if isinstance(inverse, torch.Tensor) and inverse.numel() == 1:
        step = float(inverse)
        wanted = wanted.clamp(-E4M3.largest * step, E4M3.largest * step)
    else:
        # the largest element was itself rounded, by at most 2**-4
        step = 2.0 * (1.0 + 2.0**-3) * float(whole.abs().amax() if whole.numel() else 0.0) / E4M3.largest
    # the optimizer's cast goes by way of the model's dtype: a subnormal of FP16 loses up to half of the smallest before it is quantized
    between = torch.finfo(stored.dtype)
    bound = wanted.abs() * 2.0 ** -(E4M3.mantissa + 1) + E4M3.smallest / 2 * step
    bound += between.smallest_normal * between.eps / 2
    return not bool((~((found - wanted).abs() <= bound * _ROOM)).any())  # NaN is not near
