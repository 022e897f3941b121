"""Scores: the effect that each format would have on the three products of each linear, from one high-precision forward and backward pass per batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from mpbridge.numerics import Emulation
from mpbridge.numerics.gemm import Plug, QuantizedLinear, misfits
from mpbridge.numerics.linear import padded
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.precision.regions import GEMMS, Gemm, Gemms, Quant

PIECE = 1 << 20
"""Elements of a product compared at a time."""


@dataclass(slots=True)
class Sums:
    """Sums for one linear in one format, over tokens and batches."""

    score: dict[Gemm, float] = field(default_factory=lambda: dict.fromkeys(GEMMS, 0.0))
    """fprop: sum of (g e)^2 over Y, g the loss's gradient there and e the error; dgrad: sum of (x e)^2 over dX, x the input whose gradient it is;
    wgrad: sum of e^2 over dW, which is itself a part of the gradient's squared error."""
    error: dict[Gemm, float] = field(default_factory=lambda: dict.fromkeys(GEMMS, 0.0))
    """Sum of e^2 over the GEMM's output."""
    size: dict[Gemm, float] = field(default_factory=lambda: dict.fromkeys(GEMMS, 0.0))
    """Sum of the squared output itself."""

    def add(self, other: Sums) -> None:
        """Adds another rank's or batch's sums."""
        for gemm in GEMMS:
            self.score[gemm] += other.score[gemm]
            self.error[gemm] += other.error[gemm]
            self.size[gemm] += other.size[gemm]

    def relative(self, gemm: Gemm) -> float:
        """||e|| / ||output|| of that GEMM."""
        return (self.error[gemm] / self.size[gemm]) ** 0.5 if self.size[gemm] else 0.0


Scores = dict[tuple[str, str], Sums]
"""(slot, level) -> its sums."""


class Scorer:
    """A listener that replays every linear under each level's format; `batch` sets which batch comes next.

    levels: level -> its rule. release, seed and so on are the emulation's. Only the sums are kept for a linear, so memory grows by the operands and
    outputs of one linear at a time.
    """

    def __init__(self, levels: Mapping[str, Quant], emulation: Emulation) -> None:
        self.levels = dict(levels)
        self.halves: tuple[Scores, Scores] = ({}, {})
        """Scores of the even and of the odd batches."""
        self.refused: dict[tuple[str, str], str] = {}
        """(slot, level) -> why its shapes cannot be quantized this way."""
        self.inputs: dict[str, Hashable] = {}
        """slot -> identity of the tensor that it read in the last batch."""
        self.shapes: dict[str, tuple[int, int, int]] = {}
        """slot -> (tokens, output features, input features) of its last call."""
        slots = [name for _, name, *_ in emulation.linears()]
        self._randomness = Randomness(emulation.seed, emulation.device)
        self._quantizers = {
            name: Quantizer(
                quant,
                slots,
                randomness=self._randomness,
                device=emulation.device,
                release=emulation.release,
                compiled=emulation.compiled,
                environment=emulation.environment,
            )
            for name, quant in self.levels.items()
        }
        self._half = self.halves[0]

    def batch(self, number: int) -> None:
        """Sets which batch (0-based) comes next."""
        self._half = self.halves[number % 2]
        self._randomness.begin(number + 1)

    def hear(
        self,
        slot: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        dy: torch.Tensor,
        dx: torch.Tensor | None,
        dw: torch.Tensor | None,
        *,
        expert: bool,
    ) -> None:
        """See Listener."""
        self.inputs[slot] = (x.data_ptr(), x.shape)
        self.shapes[slot] = (x.shape[0], weight.shape[0], weight.shape[1])
        y = x @ weight.to(x.dtype).t()
        # fprop's output is weighted by the loss's gradient, dgrad's by the activation, wgrad's not at all
        high = {"fprop": (y, dy), "dgrad": (dx, x), "wgrad": (dw, None)}
        for level, quant in self.levels.items():
            mine, theirs = (padded(x, quant), padded(dy, quant)) if expert else (x, dy)
            odd = misfits(quant.row, mine.shape[0], weight.shape)
            if odd:
                self.refused[slot, level] = "; ".join(odd)
                continue
            low = self._replayed(level, slot, mine, weight, theirs, x.shape[0])
            sums = self._half.setdefault((slot, level), Sums())
            for gemm, output in zip(GEMMS, low, strict=True):
                exact, weigh = high[gemm]
                if exact is not None:
                    _tally(sums, gemm, output, exact, weigh)

    def _replayed(
        self, level: str, slot: str, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Y, dX and dW of the emulated linear for these operands."""
        quantizer, quant = self._quantizers[level], self.levels[level]
        plug = Plug(
            slot=slot,
            gemms=Gemms(fprop=quant, dgrad=quant, wgrad=quant),
            fprop=quantizer,
            dgrad=quantizer,
            wgrad=quantizer,
            emulation=SimpleNamespace(observer=None),
        )
        with torch.enable_grad():
            inner, own = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y: torch.Tensor = QuantizedLinear.apply(inner, own, None, plug, False, False)  # type: ignore[no-untyped-call]
            dx, dw = torch.autograd.grad(y, (inner, own), dy)
        return y.detach()[:tokens], dx[:tokens], dw


def _tally(sums: Sums, gemm: Gemm, low: torch.Tensor, exact: torch.Tensor, weigh: torch.Tensor | None) -> None:
    """Adds a product's squares, some lines at a time, so that no full FP32 copy of a large weight's gradient is made."""
    whole = torch.zeros(3, dtype=torch.float64, device=low.device)
    step = max(1, PIECE // low.shape[1])
    for first in range(0, low.shape[0], step):
        piece = slice(first, first + step)
        high = exact[piece].float()
        error = low[piece].float() - high
        weighed = error if weigh is None else error * weigh[piece].float()
        whole += torch.stack([one.square().sum(dtype=torch.float64) for one in (weighed, error, high)])
    score, off, size = whole.tolist()
    sums.score[gemm] += score
    sums.error[gemm] += off
    sums.size[gemm] += size


def merged(parts: Sequence[Scores]) -> Scores:
    """Sums over ranks, or over halves."""
    found: Scores = {}
    for part in parts:
        for key, sums in part.items():
            found.setdefault(key, Sums()).add(sums)
    return found
