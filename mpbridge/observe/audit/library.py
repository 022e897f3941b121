"""State of Transformer Engine's modules that can be inspected although their GEMMs cannot: weights quantized once per step, scales and amax histories.

Delayed scaling is judged alike where it is emulated: whether scales follow their amax histories.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpbridge.common.formats import E4M3, FORMATS
from mpbridge.numerics.observation.modules import module_paths
from mpbridge.observe.telemetry.probe import normalised
from mpbridge.precision.regions import Quant

_FORWARD, _BACKWARD = 3, 2
"""Columns that one GEMM has in the tables of delayed scaling: input, weight, output; gradient of the output, of the input (module/base.py)."""
TENSORS = ("x", "dy")
"""Tensors that are new in every micro-batch; a weight's amax is counted once per step."""


def state_of(module: Any, name: str) -> tuple[Any, int] | None:
    """The table with `name` ('x' or 'dy') of a linear, and its column there; None without delayed scaling."""
    plug = getattr(module, "plug", None)
    quantizer: Any = getattr(plug, "quantizer", None)
    if plug is None or getattr(quantizer, "forward_table", None) is None:
        return None
    table = quantizer.backward_table if name == "dy" else quantizer.forward_table
    return table, table.names.index(f"{plug.slot}.{name}")


def leaving(module: Any, name: str) -> float | None:
    """The oldest entry of a history, read before the interval's update: it counts for the new scale and then leaves the history."""
    table, column = state_of(module, name) or (None, 0)
    return None if table is None or table.history.shape[0] < 2 else float(table.history[1, column])


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


def _fault(
    where: str, quant: Quant, history: torch.Tensor, scale: float, left: Sequence[float], *, gradient: bool, exact: bool
) -> str:
    """'' or what is wrong with a scale. left: entries that left its history in the update; exact: the scale includes them if they are larger."""
    if history.numel() != quant.amax_history:
        return f"{where}: promised an amax history of {quant.amax_history}, found {history.numel()}"
    if history.numel() == 1:  # one entry, cleared when the scale is computed
        return ""
    recent = quant.amax_algo == "most_recent"
    basis = float(history[-1] if recent else history.max())
    older = [] if recent else [amax for amax in left if amax > basis]
    largest = FORMATS[quant.element(gradient=gradient)].largest * 2.0**-quant.margin
    wanted = [largest / amax for amax in (older if exact and older else (basis, *older)) if amax]
    if not wanted or any(math.isclose(scale, one, rel_tol=1e-5) for one in wanted):
        return ""
    return f"{where}: scale {scale:.6g}, its history gives {wanted[0]:.6g}"


def scale_faults(
    path: str, quant: Quant, module: Any, amax: Mapping[str, float], left: Mapping[str, float]
) -> Iterator[tuple[str, float, str]]:
    """(tensor, newest entry of its history, '' or what is wrong with its scale) of each tensor of an emulated linear that is new in every micro-batch.

    amax: 'x', 'dy' -> absolute maximum in the last micro-batch. left: 'x', 'dy' -> the entry that the update dropped.
    """
    for name in TENSORS:
        state = state_of(module, name)
        if state is None:
            continue
        table, column = state
        history, where = table.history[:, column], f"{path} {name}"
        known = history.numel() == quant.amax_history and history.numel() > 1
        # after an amax of 0, scale and history stay as they are, and the entry behind the scale may be long gone
        older = [left.get(name, 0.0)]
        fault = ""
        if not known or amax.get(name) != 0.0:
            fault = _fault(where, quant, history, float(table.scale[column]), older, gradient=name == "dy", exact=True)
        yield where, float(history[-1]) if known else math.nan, fault


def library_faults(
    path: str, quant: Quant, module: Any, begun: Mapping[str, torch.Tensor], amax: Mapping[str, float]
) -> Iterator[str]:
    """'' or the fault, for each tensor of a Transformer Engine linear that is scaled by its history.

    The update rolls the history up by one, puts the newest amax last, clears the first entry, and computes the scale from the largest (or the newest) entry,
    including the one that leaves. A tensor whose amax was 0 keeps both: so any entry of the history at the start of the micro-batch (`begun`) may be behind the
    scale. amax: 'LINEAR x' -> largest element of this rank's input, which the newest entry, a maximum over ranks, is not below (a kernel's norm rounds otherwise).
    Source: common/recipe/delayed_scaling.cu.
    """
    for name, history, scale in tables(module):
        where, before = f"{path} {name}", begun.get(f"{path} {name}")
        waiting = float(history[0])
        if waiting and history.numel() > 1 and history.numel() == quant.amax_history:
            yield f"{where}: amax {waiting:.6g} was recorded but the scale was not updated"
            continue
        older = [] if before is None else before.tolist()
        # nothing of this tensor was seen since the scale was computed
        read = history[-1:] if quant.amax_algo == "most_recent" else history
        seen = history.numel() != quant.amax_history or bool(read.any())
        if seen and history.numel() > 1 and float(history[-1]) < amax.get(where, 0.0) * (1 - 2.0**-6):
            yield f"{where}: the newest amax of its history is {float(history[-1]):.6g}, its input's {amax[where]:.6g}"
            continue
        how = {"gradient": name.startswith("dy"), "exact": False}
        yield _fault(where, quant, history, float(scale), older, **how) if seen else ""


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
        # the history that a recomputation finds is no longer the one that the update rolled
        recomputed = torch._C._current_autograd_node() is not None
        for name, history, scale in () if recomputed else tables(module):
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
            pairs: Any = ((getattr(copy, part, None), getattr(anew, part, None)) for part in _CODES)
            both = (pair for pair in pairs if all(isinstance(one, torch.Tensor) for one in pair))  # a GEMM may need one
            if not all(torch.equal(*pair) for pair in both):
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
