"""Scores: the effect of each format on the three products of each linear, and each unit's part of the gradient's squared error."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from mpbridge.numerics import Emulation
from mpbridge.numerics.gemm import Plug, QuantizedLinear, misfits
from mpbridge.numerics.linear import padded
from mpbridge.numerics.quantizer import Quantizer, Randomness
from mpbridge.precision.policy import PrecisionPolicy
from mpbridge.precision.regions import GEMMS, Gemm, Gemms, Quant, Region
from mpbridge.training.tune.choices import DecisionUnit
from mpbridge.training.tune.proof import Subject, prove

PIECE = 1 << 20
"""Elements of a product compared at a time."""


@dataclass(slots=True)
class Sums:
    """Sums for one linear in one format, over tokens and batches.

    GEMM -> [score, sum of e^2 over its output, sum of the squared output itself], e the error. fprop's score: sum of (g e)^2 over Y, g the loss's gradient
    there; dgrad's: sum of (x e)^2 over dX, x the input whose gradient it is; wgrad's: sum of e^2 over dW, which is itself a part of the gradient's squared error.
    """

    by_gemm: dict[Gemm, np.ndarray] = field(default_factory=lambda: {gemm: np.zeros(3) for gemm in GEMMS})

    def add(self, other: Sums) -> None:
        """Adds another rank's or batch's sums."""
        for gemm in GEMMS:
            self.by_gemm[gemm] += other.by_gemm[gemm]

    @property
    def score(self) -> dict[Gemm, float]:
        """The scores."""
        return {gemm: float(sums[0]) for gemm, sums in self.by_gemm.items()}

    def relative(self, gemm: Gemm) -> float:
        """||e|| / ||output|| of that GEMM."""
        _, error, size = self.by_gemm[gemm].tolist()
        return float((error / size) ** 0.5) if size else 0.0


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
    sums.by_gemm[gemm] += whole.cpu().numpy()


def merged(parts: Sequence[Scores]) -> Scores:
    """Sums over ranks, or over halves."""
    found: Scores = {}
    for part in parts:
        for key, sums in part.items():
            found.setdefault(key, Sums()).add(sums)
    return found


Joint = Mapping[str, Mapping[Gemm, float]]
"""Level -> GEMM -> (||g_q - g|| / ||g||)^2 with that GEMM of every linear at the level and the two others in high precision."""


def joint(
    subject: Subject,
    policy: PrecisionPolicy,
    levels: Mapping[str, Quant],
    refused: Mapping[tuple[str, str], str],
    batches: int,
) -> Joint:
    """The joint damage of each kind of GEMM at each level, from the first scoring batches. A linear that cannot take a level stays in high precision."""
    arms: dict[str, PrecisionPolicy] = {}
    for name, quant in levels.items():
        spared = tuple(Region(modules=slot) for slot, level in refused if level == name)
        for gemm in GEMMS:
            rules = Gemms(**{other: quant if other == gemm else None for other in GEMMS})
            kept = tuple(dataclasses.replace(region, quant=None, gemms=None) for region in policy.regions[:-1])
            regions = (*kept, *spared, Region(quant=quant, gemms=rules))
            arms[f"{name} {gemm}"] = dataclasses.replace(policy, regions=regions)
    found = prove(subject, arms, batches, split="train")
    squares = {arm: statistics.fmean(error * error for error in one.errors) for arm, one in found.items()}
    return {name: {gemm: squares[f"{name} {gemm}"] for gemm in GEMMS} for name in levels}


def damages(
    units: Sequence[DecisionUnit], levels: Mapping[str, Quant], scores: Scores, whole: Joint
) -> list[dict[str, float]]:
    """For each unit: level -> its part of the squared relative gradient error; levels that its shapes cannot take are omitted.

    The joint damage of each kind of GEMM is divided among the linears by their scores: the damage of one linear is about proportional to its score, and
    damage adds up over linears because their rounding errors are independent.
    """
    totals = {
        (name, gemm): math.fsum(sums.score[gemm] for (_, level), sums in scores.items() if level == name)
        for name in levels
        for gemm in GEMMS
    }
    found = []
    for unit in units:
        mine: dict[str, float] = {}
        for name in levels:
            parts = [scores.get((slot, name)) for slot in unit.slots]
            # an expert that got no token in any batch has no score and no observed damage
            if all(part is None for part in parts):
                continue
            known = [gemm for gemm in GEMMS if totals[name, gemm]]
            shares = (
                whole[name][gemm] * part.score[gemm] / totals[name, gemm] for part in parts if part for gemm in known
            )
            mine[name] = math.fsum(shares)
        found.append(mine)
    return found


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank; nan for fewer than three values or when one side is constant."""
    if len(first) < 3:
        return math.nan
    a, b = _ranks(np.asarray(first)), _ranks(np.asarray(second))
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread else math.nan


def _ranks(values: np.ndarray) -> np.ndarray:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2.0)[where]
