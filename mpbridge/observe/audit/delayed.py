"""Delayed scaling of an emulated linear: where its state is kept, and whether its scales follow the amax histories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mpbridge.common.formats import FORMATS
from mpbridge.precision.regions import Quant

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


def scale_faults(
    path: str, quant: Quant, module: Any, amax: Mapping[str, float], left: Mapping[str, float]
) -> Iterator[tuple[str, float, str]]:
    """(tensor, newest entry of its history, '' or what is wrong with its scale) of each tensor that is new in every micro-batch.

    amax: 'x', 'dy' -> absolute maximum in the last micro-batch. left: 'x', 'dy' -> the entry that the update dropped.
    """
    for name in TENSORS:
        state = state_of(module, name)
        if state is None:
            continue
        table, column = state
        history, scale = table.history[:, column], float(table.scale[column])
        where = f"{path} {name}"
        if history.numel() != quant.amax_history:
            yield where, math.nan, f"{where}: promised an amax history of {quant.amax_history}, found {history.numel()}"
            continue
        if history.numel() == 1:  # one entry, cleared when the scale is computed
            yield where, math.nan, ""
            continue
        newest = float(history[-1])
        largest = FORMATS[quant.element(gradient=name == "dy")].largest
        basis = newest if quant.amax_algo == "most_recent" else max(float(history.max()), left.get(name, 0.0))
        wanted = largest * 2.0**-quant.margin / basis if basis > 0 else scale
        # after an amax of 0, scale and history stay as they are, and the entry behind the scale may be long gone
        fits = amax.get(name) == 0.0 or math.isclose(scale, wanted, rel_tol=1e-5)
        yield where, newest, "" if fits else f"{where}: scale {scale:.6g}, its history gives {wanted:.6g}"
