"""operands.safetensors: windows of some linears' inputs, weights and output gradients at a run's last measured step, for `mpbridge certify --tensors RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.files import write
from mpbridge.numerics.statistics import spread
from mpbridge.observe.telemetry.native import normalised

FILE = "operands.safetensors"
"""Its name in the run's folder."""
LINEARS, SIDE, UNIT = 4, 256, 128
"""Linears, evenly spread over the model; the largest side of a window; what sides and beginnings are multiples of, so that blocks stay whole."""


class Windows:
    """Copies around the largest element of each input, on its device and without waiting for it. paths: of the rank's linears, in the model's order."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._wanted = {paths[int(i)] for i in spread(len(paths), LINEARS, torch.device("cpu"))} if paths else set()
        self._found: dict[str, dict[str, torch.Tensor]] = {}
        self._rows: dict[str, tuple[int, torch.Tensor]] = {}

    def see(self, path: str, module: Any, side: str, tensor: torch.Tensor) -> None:
        """A linear's input ('x', first) or output gradient ('dy'); of any shape with the features last."""
        weight: Any = getattr(module, "weight", None)
        if path not in self._wanted or type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dim() != 2:
            return
        flat, outer = tensor.reshape(-1, tensor.shape[-1]), weight.shape[0] // UNIT * UNIT
        if side == "x" and min(*flat.shape, outer) >= UNIT and flat.shape[1] == weight.shape[1]:
            at = flat.abs().argmax()
            rows, columns = (_around(where, size) for where, size in zip((at // flat.shape[1], at % flat.shape[1]), flat.shape, strict=True))  # fmt: skip
            self._rows[path] = len(flat), rows
            self._found[path] = {
                "x": normalised(module, flat[rows])[:, columns].to(flat.dtype),
                "w": weight.detach()[: min(outer, SIDE), columns],
            }
        elif side == "dy" and path in self._found and flat.shape == (self._rows[path][0], weight.shape[0]):
            self._found[path]["dy"] = flat[self._rows[path][1], : min(outer, SIDE)].clone()

    def write(self, folder: Path) -> None:
        """Replaces the folder's file; nothing if no linear is complete, finite and other than zero, or safetensors is not installed. Raises OSError."""
        whole = {p: one for p, one in self._found.items() if "dy" in one and all(bool(t.isfinite().all() and t.any()) for t in one.values())}  # fmt: skip
        try:
            from safetensors.torch import save
        except ImportError:
            return
        if whole:
            flat = {f"{path}.{side}": t.cpu().contiguous() for path, one in whole.items() for side, t in one.items()}
            write(folder / FILE, save(flat))


def _around(at: torch.Tensor, size: int) -> torch.Tensor:
    """Positions of a window that contains `at`, on its device."""
    count = min(size // UNIT * UNIT, SIDE)
    start = (at // UNIT * UNIT).clamp_max(size // UNIT * UNIT - count)
    return start + torch.arange(count, device=at.device)
