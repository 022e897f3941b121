"""Delayed scaling, emulated and in Transformer Engine: where its state is kept, and whether its scales follow the amax histories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mpbridge.common.formats import FORMATS
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
    state = state_of(module, name)
    if state is None or state[0].history.shape[0] < 2:
        return None
    table, column = state
    return float(table.history[1, column])


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
        fault = (
            ""
            if known and amax.get(name) == 0.0
            else _fault(where, quant, history, float(table.scale[column]), older, gradient=name == "dy", exact=True)
        )
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
        seen = history.numel() != quant.amax_history or bool(
            history[-1 if quant.amax_algo == "most_recent" else slice(None)].any()
        )
        if seen and history.numel() > 1 and float(history[-1]) < amax.get(where, 0.0) * (1 - 2.0**-6):
            yield f"{where}: the newest amax of its history is {float(history[-1]):.6g}, its input's {amax[where]:.6g}"
            continue
        yield (
            _fault(where, quant, history, float(scale), older, gradient=name.startswith("dy"), exact=False)
            if seen
            else ""
        )
