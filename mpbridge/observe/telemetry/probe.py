"""What one step shows of a run's own tensors: inputs and output gradients of linears, the share of noise in weight gradients, parameters after the update, and windows of operands for `mpbridge certify`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.files import write
from mpbridge.numerics.observation.modules import floating, hooked, linears
from mpbridge.numerics.observation.tensors import local, plain_moment
from mpbridge.numerics.statistics import spread
from mpbridge.observe.telemetry.records import LINEARS


class Probe:
    """Statistics of the first micro-batch's inputs and output gradients, by linear; `rows` reads them after the step.

    Until then the numbers stay on their device, so that a GPU never waits.
    """

    def __init__(self) -> None:
        self.inside: str | None = None
        """The linear whose forward pass is running; None outside of one."""
        self.gradients: str | None = None
        """The linear whose backward pass started last; None during the forward pass."""
        self.sources: list[Callable[[str, Any, str, torch.Tensor], None]] = []
        """Called with (path, module, 'x' or 'dy', tensor) for each of them, before the linear's GEMMs run."""
        self._hooks = ExitStack()
        self._found: dict[str, dict[str, torch.Tensor]] = {}
        self._seen: set[str] = set()

    def start(self, chunks: list[Any]) -> None:
        """Installs the hooks."""
        self._hooks = hooked({module: path for path, module in linears(chunks).items()}, self._enters, self._leaves)

    def stop(self) -> None:
        """Removes the hooks."""
        self._hooks.close()
        self.inside = self.gradients = None

    def _enters(self, module: Any, path: str, args: Any) -> None:
        self.inside, self.gradients = path, None
        tensor = floating(args)
        if tensor is None or not tensor.numel() or path in self._found:
            return
        # with activation recomputation the forward pass is repeated in backward; the first one counts
        self._found[path] = _input(tensor.detach())
        for source in self.sources:
            source(path, module, "x", tensor.detach())

    def _leaves(self, module: Any, path: str, args: Any, output: Any) -> None:
        self.inside = None
        made = floating(output)
        if made is None or not made.requires_grad:
            return

        def gradient(grad: torch.Tensor) -> None:
            self.gradients = path
            if path not in self._seen and grad.numel():
                self._seen.add(path)
                peak = grad.detach().abs().amax().float()
                made = {"dy_amax": peak, "dy_rms": _rms(grad.detach()), "bad_dy": (~peak.isfinite()).sum()}
                self._found.setdefault(path, {}).update(made)
                for source in self.sources:
                    source(path, module, "dy", grad.detach())

        made.register_hook(gradient)  # type: ignore[no-untyped-call]

    def rows(self, noise: dict[str, float]) -> list[list[Any]]:
        """Rows of records.LINEARS; noise: linear -> grad_to_noise."""
        made = []
        for path in dict.fromkeys([*self._found, *noise]):
            values: dict[str, Any] = {name: float(value) for name, value in self._found.get(path, {}).items()}
            bad = int(values.get("bad_x", 0) + values.get("bad_dy", 0))
            values |= {"linear": path, "nonfinite": bad, "grad_to_noise": noise.get(path)}
            values |= {"x_channel": int(values["x_channel"])} if "x_channel" in values else {}
            made.append([values.get(name) for name in LINEARS])
        return made


def _input(x: torch.Tensor) -> dict[str, torch.Tensor]:
    channels = x.abs().reshape(-1, x.shape[-1]).amax(0).float()
    top = channels.nan_to_num(math.inf).argmax()
    bulk = channels.median()
    # if most channels are zero for every token, there is no typical channel to compare with
    outlier = torch.where(bulk > 0, channels[top] / bulk, torch.ones_like(bulk))
    found = {"x_amax": channels[top], "x_rms": _rms(x), "x_outlier": outlier, "x_channel": top}
    return found | {"bad_x": (~channels.isfinite()).sum()}


def _rms(x: torch.Tensor) -> torch.Tensor:
    """Root mean square in FP32; the vector norm sums in FP32 without a copy of the tensor."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float32)
    return norm / math.sqrt(x.numel())


SAMPLE = 64
"""Input and output features in the sample: 64 x 64 elements of the gradient, spread evenly over the weight."""


@dataclass(slots=True)
class Noise:
    """Sampled features of x and dy, exact and quantized: [tokens, features]. They are multiplied after the step, when no observer is active."""

    exact: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    rounded: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def note(self, linear: str, side: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """exact, rounded: [tokens, features] of one operand of wgrad. The first ones of a step count, and a copy made for wgrad before a shared one."""
        picked = spread(exact.shape[1], SAMPLE, exact.device)
        self.exact[linear, side] = exact[:, picked].float()
        self.rounded[linear, side] = rounded[:, picked].float()

    def ratios(self) -> dict[str, float]:
        """linear -> |g| / |g' - g|, g' being the gradient of the quantized operands; linears without noise are omitted."""
        found = {}
        for linear in {name for name, _ in self.exact}:
            pairs = [(table.get((linear, "dy")), table.get((linear, "x"))) for table in (self.exact, self.rounded)]
            if any(one is None for pair in pairs for one in pair):
                continue
            exact, rounded = (_product(*pair) for pair in pairs)
            noise = float((rounded - exact).norm())
            if noise > 0:
                found[linear] = float(exact.norm()) / noise
        self.exact.clear()
        self.rounded.clear()
        return found


def _product(dy: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor:
    assert dy is not None
    assert x is not None
    count = min(dy.shape[0], x.shape[0])  # an expert's padding
    with torch._C.DisableTorchFunction():
        return dy[:count].t() @ x[:count]


def weight_rows(tensors: Iterable[Any]) -> list[list[Any]]:
    """Rows of records.WEIGHTS from an engine's live tensors (this rank's shards)."""
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for one in tensors:
        if one.parameter and one.role in ("params", "main_params", "exp_avg", "exp_avg_sq"):
            by_name.setdefault(one.parameter, {})[one.role] = local(one.tensor)
    rows = []
    for name, roles in by_name.items():
        weight = _numbers(roles.get("params"))
        # under full sharding this rank may hold no part of a parameter
        source = weight if weight is not None else _numbers(roles.get("main_params"))
        if source is None:
            continue
        peak, size = float(source.abs().amax()), float(_rms(source))
        states = (roles.get(role) for role in ("exp_avg", "exp_avg_sq"))
        first, second = (None if one is None or not one.numel() else plain_moment(one) for one in states)
        bad = 0 if math.isfinite(peak) else int((~source.isfinite()).sum())
        moments = (
            None if first is None else float(_rms(first)),
            None if second is None else float(second.float().mean()),
        )
        share = peak * peak / (size * size * source.numel()) if 0 < peak < math.inf else None
        rows.append([name, size, peak, bad, _gap(weight, roles.get("main_params")), *moments, share])
    return rows


def _numbers(tensor: Any) -> torch.Tensor | None:
    """A tensor's values; None if it has none, or none that can be read directly."""
    if tensor is None or not tensor.numel():
        return None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        widen = getattr(tensor, "dequantize", None)
        return None if widen is None else widen().detach()
    return tensor.detach() if tensor.is_floating_point() else None


def _gap(weight: torch.Tensor | None, main: Any) -> float | None:
    """Share of elements that differ from the main weight rounded to the weight's dtype; None if the two cannot be compared."""
    high = _numbers(main)
    if weight is None or high is None or high.shape != weight.shape or weight.dtype.itemsize < 2:
        return None
    return float((high.to(weight.dtype) != weight).float().mean())


def normalised(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The input that a linear with a fused norm quantizes: the norm's result, in FP32 as in the fused kernel."""
    weight = getattr(module, "layer_norm_weight", None)
    if weight is None:
        return x
    gain = weight.detach().float() + (1.0 if getattr(module, "zero_centered_gamma", False) else 0.0)
    wide = x.float()
    if getattr(module, "normalization", "LayerNorm") == "RMSNorm":
        made: torch.Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.eps) * gain
        return made
    bias = getattr(module, "layer_norm_bias", None)
    bias = None if bias is None else bias.detach().float()
    return torch.nn.functional.layer_norm(wide, (wide.shape[-1],), gain, bias, module.eps)


WINDOWS = "operands.safetensors"
"""Its name in the run's folder."""
_LINEARS, SIDE, UNIT = 4, 256, 128
"""Linears, evenly spread over the model; the largest side of a window; what sides and beginnings are multiples of, so that blocks stay whole."""


class Windows:
    """Copies around the largest element of each input, on its device and without waiting for it. paths: of the rank's linears, in the model's order."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._wanted = {paths[int(i)] for i in spread(len(paths), _LINEARS, torch.device("cpu"))} if paths else set()
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
            write(folder / WINDOWS, save(flat))


def _around(at: torch.Tensor, size: int) -> torch.Tensor:
    """Positions of a window that contains `at`, on its device."""
    count = min(size // UNIT * UNIT, SIDE)
    start = (at // UNIT * UNIT).clamp_max(size // UNIT * UNIT - count)
    return start + torch.arange(count, device=at.device)
