"""Classifies the operands of a quantized GEMM from their values: their grid, rotation and kind of rounding; and what a rule's options promise of them."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass

import torch

from mpbridge.common.formats import E4M3, E5M2, NumberFormat
from mpbridge.numerics.observation.tensors import has_bits, power_below
from mpbridge.precision.policy import Quant

_FP32_MANTISSA = 23
_ENOUGH = 64
"""Nonzero elements below which the absence of odd codes proves nothing."""
_DISTINCT = 24
"""Distinct values below which it proves nothing either: a tensor of ones has one code."""
_PART = 2048
"""Number of elements in which they are counted."""
LOOKED = 8192
"""Number of elements of an operand that are judged: enough for `_STRAY` to be more than a few of them, and a fraction of the GEMM's own time."""
_WIDE = 256
"""Number of neighbours along the contraction that are judged in a line; a multiple of every block."""
_NORMAL = 2.0 ** (1 - E4M3.bias)
"""The smallest E4M3 number with full precision."""
ALIKE = 0.9
"""A four-bit copy whose cosine with a tensor is below this was not made from that tensor."""
STRANGE = "not what its tensor rounds to"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Patch:
    """Which part of an operand is judged: whole blocks, spread over its lines."""

    lines: torch.Tensor
    """Indices of lines, in groups that share their blocks' scales."""
    columns: slice
    """Neighbours along the contraction."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """That part of a two-dimensional tensor whose columns run along the contraction."""
        return whole[:, self.columns].index_select(0, self.lines)


def patch_of(whole: torch.Tensor, *, across: int, seed: int) -> Patch:
    """About `LOOKED` elements of an operand, the contraction along its columns. across: number of lines that share a block's scale. seed: draws the part; over many seeds every block comes up."""
    lines, columns = whole.shape
    draw = random.Random(seed)  # lines and columns independently: under one stride of both, some blocks never come up
    begin = draw.randrange(-(-columns // _WIDE)) * _WIDE
    width = min(columns - begin, _WIDE)
    groups, wanted = -(-lines // across), max(2, LOOKED // (min(columns, _WIDE) * across))
    if groups <= wanted:
        rows = torch.arange(lines, device=whole.device)
    else:
        shift = draw.randrange(groups)
        first = (torch.arange(wanted, device=whole.device) * groups // wanted + shift) % groups * across
        rows = (first[:, None] + torch.arange(across, device=whole.device)).reshape(-1)
        rows = rows[rows < lines]
    return Patch(rows, slice(begin, begin + width))


@dataclass(frozen=True, slots=True)
class Grid:
    """The grids that an operand's values fit."""

    nonzero: int
    codes: tuple[str, ...]
    """Formats in which every value is itself a code: one factor for the whole tensor."""
    scaled: tuple[str, ...]
    """Formats in which every value is a code times a power of two."""
    fours: bool
    """Whether every 16 neighbours along the contraction are E2M1 codes times one common number; only looked at where no 8-bit format fits, or on demand."""
    needed: str
    """The narrowest 8-bit format whose significant bits represent every value; 'more' if none does, '' if there are too few values to tell."""
    largest: float

    def fits(self, number: str, *, per_tensor: bool) -> bool:
        """Whether this is an operand of element format `number`; per_tensor: it has a single scale, which is not part of the values."""
        if not self.nonzero:
            return True
        if number == "e2m1":
            return self.fours
        if number not in (self.codes if per_tensor else self.scaled):
            return False
        # a narrower format fits as well: the extra bits were never used
        return not self.needed or self.needed == number

    def text(self) -> str:
        """A readable name for the values' format."""
        if self.fours and not self.codes and not self.scaled:
            return "E2M1"
        return {"e4m3": "E4M3", "e5m2": "E5M2", "": "too few values to tell"}.get(self.needed, "not quantized")


def _holds(bits: torch.Tensor, number: NumberFormat) -> bool:
    return not has_bits(bits, (1 << (_FP32_MANTISSA - number.mantissa)) - 1)


def _codes(values: torch.Tensor, largest: float, number: NumberFormat) -> bool:
    step = 2.0 ** (1 - number.bias - number.mantissa)  # the smallest subnormal
    return largest <= number.largest and bool(torch.equal(torch.round(values / step) * step, values))


@torch.no_grad()
def grid_of(lines: torch.Tensor, *, fours: bool = False) -> Grid:
    """The grid of a two-dimensional operand, the contraction along its columns. fours: look for E2M1 in any case."""
    values = lines.detach().float().contiguous()
    nonzero = int(torch.count_nonzero(values))
    if not nonzero:
        return Grid(0, ("e4m3", "e5m2"), ("e4m3", "e5m2"), True, "", 0.0)
    bits, largest = values.view(torch.int32), float(values.abs().amax())
    scaled = tuple(number.name for number in (E4M3, E5M2) if _holds(bits, number))
    codes = tuple(n.name for n in (E4M3, E5M2) if n.name in scaled and _codes(values, largest, n))
    enough = nonzero >= _ENOUGH and torch.unique(values.reshape(-1)[:_PART]).numel() >= _DISTINCT
    needed = "" if not enough else "e5m2" if "e5m2" in scaled else "e4m3" if scaled else "more"
    return Grid(nonzero, codes, scaled, (fours or not scaled) and _fours(values), needed, largest)


def _fours(lines: torch.Tensor) -> bool:
    """Whether every 16 neighbours in a line are E2M1 codes times a number of their own, the largest of them being one of the codes."""
    if lines.shape[1] % 16:
        return False
    blocks = lines.reshape(-1, 16).abs()
    peak = blocks.amax(1, keepdim=True)
    grid = torch.tensor(_E2M1, device=lines.device)
    fits = peak.squeeze(1) == 0
    for top in _E2M1[:0:-1]:
        ratio = blocks / (peak / top).clamp_min(1e-38)
        near = grid[torch.bucketize(ratio * 0.999, grid).clamp_max(len(_E2M1) - 1)]
        fits = fits | ((ratio - near).abs() <= 1e-5 * top).all(1)
        if bool(fits.all()):
            return True
    return False


@torch.no_grad()
def fits_blocks(operand: torch.Tensor, number: NumberFormat, *, across: int, along: int) -> bool:
    """Whether the values are codes of `number` times one FP32 scale for each block, which maps the block's largest value to the format's largest.

    operand: with the contraction along its columns. across, along: the block's extent beside and along it.
    """
    lines = operand.detach().float()
    rows, columns = -lines.shape[0] % across, -lines.shape[1] % along
    filled = torch.nn.functional.pad(lines, (0, columns, 0, rows))
    blocks = filled.reshape(filled.shape[0] // across, across, filled.shape[1] // along, along)
    peaks = blocks.abs().amax((1, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    ratio = blocks / peaks * number.largest
    narrow = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[number.name]
    near = ratio.to(narrow).float()
    return bool(((ratio - near).abs() <= 1e-3 * near.abs() + number.smallest / 8).all())


_STRAY = 2e-3
"""Share of elements that may be further off than rounding allows: ties, and scales that differ in the last bit."""
_FAR = 4.0
"""No element may be off by more than this multiple of the rounding error."""


def _but_strays(values: torch.Tensor, count: int, *, largest: bool) -> float:
    """The largest (or smallest) value, apart from the share of strays among `count` of them."""
    return float(values.reshape(-1).topk(int(_STRAY * count) + 1, largest=largest).values[-1])


@torch.no_grad()
def is_rounded_with(
    codes: torch.Tensor, source: torch.Tensor, number: NumberFormat, *, amax: float, current: bool
) -> bool:
    """Whether codes are their source's elements times one factor, rounded once to `number`.

    Every element bounds the factor from both sides; some factor must satisfy all but a few of them. current: the factor maps amax, the largest
    element, to the format's maximum, or down to half of it if the factor is a power of two; otherwise it comes from a history and may saturate values.
    """
    wide, found = source.detach().float().abs(), codes.detach().float().abs()
    shows = (wide > 0) & ((found > 0) | (wide > 0.5 * amax))
    inside = shows & (found < number.largest)
    shown, within = int(shows.sum()), int(inside.sum())
    if not shown:
        return True
    half = power_below(found.clamp_min(2.0 ** (1 - number.bias))) * 2.0 ** (-1 - number.mantissa)
    # what does not show lies at the other end of the order
    low = _but_strays(((found - half) / wide).clamp_min_(0.0).masked_fill_(~shows, 0.0), shown, largest=True)
    high = _but_strays(((found + half) / wide).masked_fill_(~inside, float("inf")), within, largest=False)
    if current:
        factor = number.largest / amax
        low, high = max(low, 0.499 * factor), min(high, 1.001 * factor)
    if low > high * 1.001 or bool((codes * source < 0).any()):
        return False
    meant = wide * (low if high == float("inf") else (low + high) / 2)
    return not bool(((found - meant.clamp_max(number.largest)).abs() > _FAR * half).any())


@torch.no_grad()
def is_rounded_from(
    values: torch.Tensor, source: torch.Tensor, number: NumberFormat, *, amax: float, along: int | None, fitted: bool
) -> bool:
    """Whether values that include their scales are their source's elements, rounded once to `number` under scales that use the format's range.

    Both two-dimensional, the contraction along the columns. amax: the largest element of the whole tensor. along: neighbours that share a scale; None: not
    along the columns. fitted: the values may omit a per-tensor factor, and rounding may be stochastic, with errors of up to a whole step.
    """
    wide, found = source.detach().double(), values.detach().double()
    size = float((wide * wide).sum())
    factor = float((wide * found).sum()) / size if size and fitted else 1.0
    if not size:
        return not bool(found.any())
    if not factor > 0.0:
        return False
    peaks = torch.full_like(wide, amax)
    if along is not None and not wide.shape[1] % along:
        blocks = wide.view(wide.shape[0], -1, along).abs().amax(2, keepdim=True)
        peaks = blocks.expand(-1, -1, along).reshape(wide.shape)
    # a power-of-two scale leaves up to half of the range unused
    step = 2.0**-number.mantissa * wide.abs() + 2 * number.smallest / number.largest * peaks
    if fitted:
        # NVFP4's block scales are E4M3, the largest near 448: the scale of a block far below the tensor's amax is coarse or zero, and so are its elements
        step += E4M3.smallest / 2 / E4M3.largest * amax
    error, most = (found / factor - wide).abs(), step * (1.1 if fitted else 0.505)
    return int((error > most).sum()) <= max(2, _STRAY * error.numel()) and not bool((error > _FAR * most).any())


@torch.no_grad()
def is_nearest_e2m1(values: torch.Tensor, source: torch.Tensor, *, across: int) -> bool:
    """Whether NVFP4 values are the E2M1 codes nearest to their source's elements, all under one factor; an earlier rounding would move some of them.

    Both two-dimensional, the contraction along the columns. values: codes times block scales, without the factor of the tensor; across: lines that share a
    block's scale. Each block's largest element is the code 6.
    """
    rows, columns = source.shape
    if rows % across or columns % 16:
        return True
    found, wide = (one.detach().double().abs() for one in (values, source))
    scales = found.view(rows // across, across, columns // 16, 16).amax((1, 3), keepdim=True) / 6.0
    scales = scales.expand(-1, across, -1, 16).reshape(rows, columns)
    grid = torch.tensor(_E2M1, dtype=torch.float64, device=found.device)
    middle = (grid[1:] + grid[:-1]) / 2
    # a block far below the tensor's largest element has a subnormal scale of few bits, so its peak need not be a 6
    shows = (wide > 0) & (scales > 2 * _NORMAL)
    if not bool(shows.any()):
        return True
    which = torch.bucketize(found[shows] / scales[shows] * 0.999, grid)
    below, above = which > 0, which < len(_E2M1) - 1
    unit = scales[shows] / wide[shows]
    least = (middle[(which - 1).clamp_min(0)] * unit)[below]
    most = (middle[which.clamp_max(len(_E2M1) - 2)] * unit)[above]
    if not (least.numel() and most.numel()):
        return True
    return _but_strays(least, least.numel(), largest=True) <= _but_strays(most, most.numel(), largest=False) * 1.001


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two tensors as vectors; 0 if one of them is zero."""
    x, y = a.double().reshape(-1), b.double().reshape(-1)
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size else 0.0


@torch.no_grad()
def strays(values: torch.Tensor, source: torch.Tensor, amax: float) -> tuple[float, float] | None:
    """(share of NVFP4 elements that were not rounded to the nearest code: 0 under rounding to nearest, about a quarter under stochastic rounding; sum of the
    errors of magnitudes in standard deviations of an unbiased rounding's sum).

    values: codes times block scales, [tokens, features]; source: the elements they were made from, amax: the largest of the whole tensor. None if there are too few elements to tell.
    The block scale is E4M3 of (block amax / 6) x (2688 / amax), as the format defines it.
    """
    wide = source.float()
    if not amax or wide.shape[1] % 16:
        return None
    scaled = (wide * (2688.0 / amax)).reshape(-1, 16)
    scale = (scaled.abs().amax(1, keepdim=True) / 6.0).to(torch.float8_e4m3fn).float()
    usable = scale.squeeze(1) > 0
    if not bool(usable.any()):
        return None
    wanted = (scaled[usable] / scale[usable]).abs()
    found = (values.float().reshape(-1, 16)[usable] / scale[usable]).abs()
    grid = torch.tensor(_E2M1, device=source.device)
    middle = (grid[1:] + grid[:-1]) / 2
    nearest = grid[torch.bucketize(wanted, middle)]
    # saturated values and exact codes reveal nothing about the rounding
    shows = (wanted < 5.9) & ((wanted - nearest).abs() > 0.02)
    if int(shows.sum()) < _ENOUGH:
        return None
    above = torch.bucketize(wanted, grid).clamp(1, len(grid) - 1)
    spread = float(((grid[above] - wanted) * (wanted - grid[above - 1]))[shows].double().sum())
    error = float((found - wanted)[shows].double().sum())
    return float(((found - nearest).abs()[shows] > 0.1).double().mean()), error / math.sqrt(spread)


def is_nearest(quant: Quant, name: str) -> bool:
    """Whether a four-bit operand has the codes nearest to its tensor's elements, under one factor and with a maximum of 6 in each block."""
    if quant.bits != 4 or (name == "dy" and asked(quant, "stochastic_rounding")):
        return False
    if name == "x" and asked(quant, "row_scaled_activations"):
        return False
    six = quant.option("four_over_six", os.environ) if quant.row.has("four_over_six") else "none"
    return six in (None, "none", "weights" if name == "x" else "activations") and not asked(quant, "fast_math")


def across_of(quant: Quant, name: str) -> int:
    """Number of lines of an operand that share a block's scale."""
    block = quant.row.block(weight=name == "w", square=asked(quant, "square_weights"))
    return block.across if block is not None and name == "w" and asked(quant, "square_weights") else 1


def together(quant: Quant, name: str) -> int:
    """Number of neighbouring lines whose blocks an operand's copy may share, in either direction."""
    block = quant.row.block(weight=name == "w")
    return max(1, block.across) if block is not None else 1


def asked(quant: Quant, option: str) -> bool:
    """Whether a switch of the rule's scaling is on; a missing switch is off."""
    return quant.row.has(option) and bool(quant.option(option, os.environ))


def turned_fault(column: torch.Tensor, source: torch.Tensor, *, rotated: bool, nearest: bool) -> str:
    """'' if a four-bit copy with blocks along the tokens was made from its tensor, or what is wrong: E2M1 leaves a cosine of at least 0.97.

    rotated: by the Hadamard transform. nearest: also check every code.
    """
    from mpbridge.numerics.kernels import rotate

    count = min(column.shape[0], source.shape[0]) // 16 * 16
    if not count or column.shape[1] != source.shape[1] or not source.any():
        return ""
    plain, found = source[:count].to(torch.bfloat16), column[:count]
    wanted = rotate(plain) if rotated else plain
    if cosine(wanted, found) <= ALIKE:
        return "no Hadamard transform" if rotated and cosine(plain, found) > ALIKE else STRANGE
    return "" if not nearest or is_nearest_e2m1(found.t(), wanted.t(), across=1) else STRANGE


def backward_is_quantized(quant: Quant) -> bool:
    """Whether dgrad and wgrad read quantized operands; some scalings have an option that disables it."""
    return not quant.row.has("backward") or quant.option("backward", os.environ) == "quantized"
