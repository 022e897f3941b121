"""Quantize kernels, compiled by torch.compile if a compiler is available.

A kernel returns values on the low-precision grid, already multiplied by the block's scale, in a dtype that holds them exactly: a
power-of-two scale times a code (blockwise, MXFP8), an E2M1 code times an E4M3 scale (NVFP4), or the bare code if one fp32 factor applies to
the whole tensor. That factor goes into the GEMM's epilogue.

Blocks are passed as views, without index arithmetic inside a kernel: [blocks, along] for blocks along a row,
[groups, along, columns] for blocks down the columns, [elements] without blocks. This way one compiled kernel serves every shape
at full vector speed. Scales and codes are separate kernels, because in fused ones inductor accesses memory against its layout (twice as slow).
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from mpbridge.common.formats import E2M1, NumberFormat
from mpbridge.numerics.codes import round_nearest, round_stochastic
from mpbridge.numerics.scales import (
    Rules,
    magnitude,
    mxfp8_exponent,
    mxfp8_factors,
    nvfp4_block,
    nvfp4_candidates,
    nvfp4_global,
    scale_from_amax,
)

_log = logging.getLogger(__name__)
TensorPair = tuple[torch.Tensor, torch.Tensor]
Factors = Callable[[torch.Tensor, NumberFormat, float, bool, Rules], TensorPair]
"""(amaxes of blocks, element format, largest value of the input's dtype, whether scales are powers of two, the release's rules) -> (multiplier before the
cast, factor after it)."""


# --- amax ---------------------------------------------------------------------------------------------------------------------------------
def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Amax of the whole tensor, an fp32 scalar."""
    return magnitude(x).amax().float()


def peaks(view: torch.Tensor) -> torch.Tensor:
    """fp32 amax of each block of a view, shaped to multiply the view."""
    return magnitude(view).amax(1, keepdim=True).float()


# --- (multiplier before the cast, factor after it) from the amaxes of blocks --------------------------------------------------------------
def blockwise_factors(
    amax: torch.Tensor, number: NumberFormat, overflow: float, power_of_two: bool, rules: Rules
) -> TensorPair:
    """Float8BlockScaling: (scale, 1/scale). overflow: the largest value of the *input's* dtype, TE's scale for blocks with a vanishing amax."""
    scale = scale_from_amax(amax, number.largest, power_of_two=power_of_two, when_infinite=overflow)
    return scale, 1.0 / scale


def mxfp8_block_factors(
    amax: torch.Tensor, number: NumberFormat, overflow: float, power_of_two: bool, rules: Rules
) -> TensorPair:
    """MXFP8: (2**(127-e), 2**(e-127))."""
    return mxfp8_factors(mxfp8_exponent(amax, number), rules)


BLOCK_RULES: Mapping[str, Factors] = types.MappingProxyType(
    {
        "fp32_blocks": blockwise_factors,
        "e8m0_blocks": mxfp8_block_factors,
    }
)
"""`emulation` of a row of precision/scalings -> its arithmetic."""


def four_over_six(
    view: torch.Tensor,
    amax: torch.Tensor,
    overall: torch.Tensor,
    bound: float,
    squared: bool,
    square: bool,
    *,
    fast: bool = False,
) -> TensorPair:
    """NVFP4's Four Over Six: (multiplier, E4M3 block scale) of the candidate with the smaller error in each block; a tie goes to 6.

    view: [.., 16 along, ..] blocks along axis 1; amax: of each block, shaped to multiply the view; overall: the tensor's amax, or one that multiplies
    the view. bound: 448 or 256. squared: compare sums of squares. square: blocks are 16 lines of the view's last axis wide, with one choice per block.
    fast: errors are those of the scaled tensor, code times block scale (exact in FP16) against x * S, rounded once.
    Source: `common/cast/nvfp4/quantize_4over6_nvfp4.cuh` (v2.17): errors are summed in fp32 one by one along the block, and pairwise across lines.
    """
    encode = nvfp4_global(overall, bound)
    candidates = nvfp4_candidates(amax, encode)
    x = view.float()
    errors = []
    for multiplier, scale in candidates:
        codes = round_nearest(x * multiplier, E2M1)
        if fast:
            difference = codes * scale - x * encode
        else:
            product = codes * scale * overall
            difference = torch.div(product, torch.full_like(product, E2M1.largest * bound)) - x
        size = difference * difference if squared else difference.abs()
        total = torch.zeros_like(size[:, :1])
        for i in range(view.shape[1]):
            total = total + size[:, i : i + 1]
        errors.append(_across(total) if square else total)
    four = errors[1] < errors[0]
    (six_multiplier, six), (four_multiplier, scale) = candidates
    return torch.where(four, four_multiplier, six_multiplier), torch.where(four, scale, six)


def _across(error: torch.Tensor) -> torch.Tensor:
    """Errors of lines, [blocks, 1, columns], summed over the 16 lines of each square block in the order of a warp's reduction."""
    lines = error.reshape(error.shape[0], 1, -1, 16)
    for half in (8, 4, 2, 1):
        lines = lines[..., :half] + lines[..., half:]
    return lines.repeat_interleave(16, 3).reshape(error.shape)


def block_scales(
    view: torch.Tensor, factors: Factors, number: NumberFormat, power_of_two: bool, rules: Rules
) -> TensorPair:
    """`factors`, of BLOCK_RULES, of a view."""
    return factors(peaks(view), number, torch.finfo(view.dtype).max, power_of_two, rules)


def nvfp4_scales(view: torch.Tensor, rules: Rules, fused: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4, of a view: (multiplier, E4M3 block scale, fp32 amax of the whole tensor).

    fused: by the casts that are fused with the Hadamard transform, where a block with a NaN gets a NaN scale and does not contribute to the tensor's amax.
    """
    amax = view.abs().amax(1, keepdim=True).float() if fused else peaks(view)
    overall = (torch.where(amax == amax, amax, 0.0) if fused else amax).amax()
    multiplier, scale = nvfp4_block(amax, nvfp4_global(overall), rules)
    return multiplier, scale, overall


# --- codes --------------------------------------------------------------------------------------------------------------------------------
def values(
    view: torch.Tensor, multiplier: torch.Tensor, factor: torch.Tensor, number: NumberFormat, out: torch.dtype
) -> torch.Tensor:
    """Code times factor of every element."""
    return (round_nearest(view.float() * multiplier, number) * factor).to(out)


def values_stochastic(
    view: torch.Tensor, multiplier: torch.Tensor, factor: torch.Tensor, random: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    """As `values` in E2M1 with stochastic rounding; random: uint8 of the view's shape."""
    return (round_stochastic(view.float() * multiplier, random) * factor).to(out)


def tensorwise(x: torch.Tensor, number: NumberFormat, out: torch.dtype, power_of_two: bool) -> TensorPair:
    """Current scaling: (codes, 1/scale)."""
    scale = scale_from_amax(amax_of(x), number.largest, power_of_two=power_of_two)
    return round_nearest(x.float() * scale, number).to(out), 1.0 / scale


def delayed(x: torch.Tensor, scale: torch.Tensor, number: NumberFormat, out: torch.dtype) -> TensorPair:
    """Delayed scaling: (codes under the stored scale, amax of x)."""
    return round_nearest(x.float() * scale, number).to(out), amax_of(x)


# --- the random Hadamard transform --------------------------------------------------------------------------------------------------------
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def sylvester(n: int) -> torch.Tensor:
    """The [n, n] Hadamard matrix of signs; n: a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@functools.lru_cache(maxsize=8)
def hadamard(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The transposed 16x16 matrix diag(signs) H / 4: orthogonal, so wgrad is unchanged up to rounding. Signs: TE's nvfp4_tensor.py."""
    signs = torch.diag(torch.tensor(_SIGNS, dtype=torch.float32))
    return (signs @ sylvester(16) * 0.25).t().contiguous().to(device, dtype)


def rotate(x: torch.Tensor, *, rounded: bool = True) -> torch.Tensor:
    """The transform of [tokens, features] along the tokens in groups of 16, rounded to x's dtype as TE does before the cast, or in fp32 (fast math)."""
    x = x if rounded else x.float()
    groups = x.reshape(x.shape[0] // 16, 16, x.shape[1])
    return torch.matmul(hadamard(x.device, x.dtype), groups).reshape(x.shape)


# --- compilation --------------------------------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1)
def compiler() -> str | None:
    """The reason why nothing is compiled; None if torch.compile has what it needs."""
    if torch.cuda.is_available():
        return None
    # seen with 2.13: kernels of another vector width crash, or compute something else
    if "ATEN_CPU_CAPABILITY" in os.environ:
        return "ATEN_CPU_CAPABILITY is set, and torch's cache of compiled kernels does not ask for it: the quantize kernels run uncompiled, several times slower, with the same results"
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "no C++ compiler found (g++ or clang++): the quantize kernels run uncompiled, several times slower, with the same results"
    return None


@functools.lru_cache(maxsize=256)
def kernel(
    function: Callable[..., Any], compiled: bool, kind: tuple[int, torch.dtype], *fixed: Any
) -> Callable[..., Any]:
    """`function` with its trailing arguments fixed, compiled for any shape of one kind: (dimensions, dtype) of its first tensor.

    Each gets its own code object: torch counts recompilations per code object and gives up after eight.
    """

    def call(*tensors: torch.Tensor) -> Any:
        return function(*tensors, *fixed)

    if not compiled or compiler() is not None:
        return call
    said = tuple(getattr(value, "__name__", value) for value in fixed)  # a function's repr has its address
    name = f"{function.__name__}_{zlib.crc32(repr((kind, said)).encode()):08x}"
    code = call.__code__.replace(co_name=name)
    own = types.FunctionType(code, call.__globals__, name, call.__defaults__, call.__closure__)
    return _Guarded(torch.compile(own), call)


class _Guarded:
    """A compiled kernel that falls back to eager execution, once and with a warning, if compiling fails on this machine."""

    def __init__(self, fast: Callable[..., Any], slow: Callable[..., Any]) -> None:
        self._call, self._slow, self._proven = fast, slow, False

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if torch._C._len_torch_dispatch_stack():
            # in such a mode torch.compile would mark the code as never to be compiled. A mode that observes (the audit's) needs no operation of a
            # kernel, and is set aside; one that computes in place of torch (fake tensors) must see them all
            plain = all(type(one) in (torch.Tensor, torch.nn.Parameter) for one in tensors)
            if not plain or not is_in_torch_dispatch_mode(include_infra_modes=False):
                return self._slow(*tensors)
            with _disable_current_modes():
                return self(*tensors)
        if self._proven:
            return self._call(*tensors)
        try:
            # only these two axes vary: marking more (or dynamic=True) turns block lengths and format constants into run-time values, four
            # times slower. And sizes that happen to be equal in the first call must not be taken for one size: that would compile for every
            # shape.
            for tensor in tensors:
                for axis in range(0, tensor.dim(), 2):
                    if tensor.shape[axis] > 1:
                        torch._dynamo.maybe_mark_dynamic(tensor, axis)
            with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                result = self._call(*tensors)
        except Exception as error:  # any toolchain failure: the results do not depend on it
            what = "torch.compile failed (%s): quantize kernels run uncompiled, slower, with the same results"
            _log.warning(what, type(error).__name__)
            self._call = self._slow
            result = self._slow(*tensors)
        self._proven = True
        return result
