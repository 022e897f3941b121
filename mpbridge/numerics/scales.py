"""The scale rules of Transformer Engine's recipes, with the changes between its releases in one table; the options that a recipe or the environment sets; and the state of
delayed scaling.

Read from Transformer Engine's sources at v2.11 (file names are relative to `transformer_engine/`): `common/recipe/recipe_common.cuh`,
`common/recipe/current_scaling.cu`, `common/cast/mxfp8/quantize_mxfp8.cuh`, `common/util/ptx.cuh`, `common/cast/nvfp4/core_nvfp4.cuh`.
All arithmetic is fp32 in the order of the kernels, because the last bit of a scale decides ties. NaN never enters an amax: the
kernels reduce with fmaxf, which prefers the number. The one exception is a block's amax in NVFP4's casts that are fused with the Hadamard
transform (`common/hadamard_transform/hadamard_transform_cast_fusion.cu`, v2.9 on): CUTLASS's reduction propagates NaN there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mpbridge.common.errors import BadValue, CheckpointError, Refused
from mpbridge.common.formats import E2M1, E4M3, E5M2, NumberFormat, say
from mpbridge.numerics.codes import round_nearest, smallest_normal
from mpbridge.precision.policy import Quant

FP32_LARGEST = torch.finfo(torch.float32).max
_EXPONENT_BITS = -8388608  # 0xFF800000 as a signed int32: sign and exponent of an fp32 number
_RECIPROCAL = {
    number.name: float(torch.tensor(1.0 / number.largest, dtype=torch.float32)) for number in (E4M3, E5M2, E2M1)
}


Release = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Differences between releases in what they compute."""

    since: Release
    """First Transformer Engine release (major, minor) with this row."""
    nvfp4_divides: bool
    """NVFP4 block scale: e4m3((amax / 6) * S) when true, e4m3(amax * (S * fp32(1/6))) when false; they differ on rounding ties only."""
    nvfp4_fused_rows: bool = False
    """NVFP4's row copy is made by the kernel that also makes the rotated column copy (if the sizes allow it) and propagates NaN."""
    mxfp8_flushes: bool
    """MXFP8 blocks whose exponent byte is 0 (amax <= 2.6e-36 for E4M3) become zero; false: they are represented."""
    nvfp4_scale_up: bool = False
    """NVFP4 block scales are rounded up, so that no block's maximum exceeds 6. No release does this; certificates compare with it."""
    nvfp4_headroom: float = 1.0
    """NVFP4 maps a block's maximum to 6 / headroom. 17/16 in the baselines of arXiv 2601.22813; 1 in every release."""


RULES: tuple[Rules, ...] = (
    # custom quantizers, which megatron-core 0.16.1 needs, start with 2.9
    Rules(since=(2, 9), nvfp4_divides=True, mxfp8_flushes=True),
    Rules(since=(2, 13), nvfp4_divides=True, mxfp8_flushes=False),
    Rules(since=(2, 14), nvfp4_divides=False, nvfp4_fused_rows=True, mxfp8_flushes=False),
)
DEFAULT_RELEASE = (2, 11)
"""The newest release that megatron-core 0.16.1 accepts (`transformer-engine >=2.9,<2.12`)."""


def release_of(text: str | Release | None) -> Release:
    """(major, minor) of '2.14', '2.14.1' or a pair; None: the newest that megatron-core 0.16.1 accepts. Raises BadValue."""
    if text is None:
        return DEFAULT_RELEASE
    if isinstance(text, tuple):
        return text[0], text[1]
    parts = str(text).split("+")[0].split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise BadValue(f"{text!r} is not a Transformer Engine release (expected one such as '2.14')")
    return int(parts[0]), int(parts[1])


def rules_for(release: Release = DEFAULT_RELEASE) -> Rules:
    """The row of a Transformer Engine release; raises BadValue before 2.9."""
    rows = [row for row in RULES if row.since <= tuple(release[:2])]
    if not rows:
        named = ".".join(map(str, release))
        raise BadValue(f"Transformer Engine {named} is older than any known rule (expected 2.9 or newer)")
    return rows[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one Quant, each with its value."""

    values: Mapping[str, Any]
    notes: tuple[str, ...]
    """Options that differ from the scaling's defaults with who set them, and settings without effect: one sentence each."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option; `default` if the scaling has no such option."""
        return self.values.get(name, default)


def options_of(quant: Quant, release: Release, environment: Mapping[str, str]) -> Options:
    """The options of `quant` under `release`: the recipe's value, else the environment's, else the default.

    Raises Refused for an option that the recipe sets but the release does not have, and for options that exclude each other; BadValue for a value
    that Transformer Engine refuses.
    """
    values: dict[str, Any] = {}
    notes, faults, named = [], [], ".".join(map(str, release))
    stated = dict(quant.options)
    for option in quant.row.options:
        known = release_of(option.since) <= release
        values[option.name] = option.default
        outside = option.read(environment)
        if option.name in stated:
            values[option.name] = stated[option.name]
            if not known and stated[option.name] != option.default:
                needs = f"{option.name}={say(stated[option.name])} needs Transformer Engine {option.since} or later"
                faults.append(f"{needs}, but the rules of {named} are emulated (--te {option.since})")
            elif stated[option.name] != option.default:
                notes.append(f"{quant.scaling}: {option.name}={say(values[option.name])} (the recipe)")
        elif outside != option.default and known:
            values[option.name] = outside
            notes.append(f"{quant.scaling}: {option.name}={say(outside)} ({option.variable})")
        elif outside != option.default:
            notes.append(f"{option.variable} is set but has no effect before Transformer Engine {option.since}")
    faults += quant.row.clashes(values, named)
    if faults:
        raise Refused(f"{quant.scaling} scaling cannot be emulated like this: {'; '.join(faults)}")
    return Options(values=MappingProxyType(values), notes=tuple(notes))


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x| with NaN replaced by zero, so that a maximum over it is Transformer Engine's amax."""
    return torch.fmax(x.abs(), torch.zeros_like(x))


_BF16_INFINITY = 0x7F80


def peaks_over(x: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """fp32 maximum of `magnitude` over `dim` (None: over everything). For bf16 it compares bit patterns, which are ordered like magnitudes."""
    axes: Any = () if dim is None else dim
    if x.dtype is torch.bfloat16:
        bits = x.view(torch.int16) & 0x7FFF
        # a maximum along short rows leaves the vector registers, one of their halves does not
        while dim == 1 and bits.dim() == 2 and bits.shape[1] > 16 and bits.shape[1] % 2 == 0:
            bits = torch.maximum(*bits.chunk(2, 1))
        bits = torch.amax(bits, axes)
        if int(bits.amax()) <= _BF16_INFINITY:
            return bits.view(torch.bfloat16).float()
    else:
        found = torch.amax(x.abs(), axes)
        if not bool(found.isnan().any()):
            return found.float()
    return torch.amax(magnitude(x), axes).float()


def _quotient(numerator: float, amax: torch.Tensor) -> torch.Tensor:
    # Python's `number / tensor` is reciprocal-then-multiply in eager torch: one ulp off in a quarter of all cases
    return torch.div(torch.full_like(amax, numerator), amax)


def scale_from_amax(
    amax: torch.Tensor, largest: float, *, power_of_two: bool, when_infinite: float = FP32_LARGEST
) -> torch.Tensor:
    """fp32 factor that maps `amax` (fp32) to `largest`; 1 where amax is 0 or not finite; `when_infinite` if the quotient overflows.

    power_of_two: rounded down to a power of two, by clearing the mantissa.
    """
    scale = _quotient(largest, amax)
    scale = torch.where(scale.isinf(), torch.full_like(scale, when_infinite), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    usable = amax.isfinite() & (amax != 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def mxfp8_exponent(amax: torch.Tensor, number: NumberFormat) -> torch.Tensor:
    """Biased E8M0 byte (int32) of amax/largest, rounded up; 0 for 0, 254 for infinity, 255 for NaN."""
    ratio = amax * _RECIPROCAL[number.name]
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return torch.where(ratio.isinf(), torch.full_like(exponent, 0xFE), exponent + up.to(torch.int32))


def mxfp8_factors(exponent: torch.Tensor, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """(multiplier before the cast, value of the scale) for E8M0 bytes: 2**(127-e) and 2**(e-127), with the release's edge cases."""
    if rules.mxfp8_flushes:
        # fp32 built from the exponent field alone: byte 0 should give 2**127 and gives 1, byte 254 gets 0, byte 255 minus infinity
        multiplier = torch.where(exponent == 0, torch.full_like(exponent, 127), 254 - exponent) << 23
        value = (exponent << 23).view(torch.float32)
        return multiplier.view(torch.float32), value
    half = 0x00400000  # 2**-127, subnormal
    multiplier = torch.where(exponent == 254, torch.full_like(exponent, half), (254 - exponent) << 23)
    value = torch.where(exponent == 0, torch.full_like(exponent, half), exponent << 23)
    nan, invalid = torch.full_like(multiplier, 0x7FC00000), exponent == 255
    multiplier, value = (torch.where(invalid, nan, one).view(torch.float32) for one in (multiplier, value))
    return multiplier, value


def nvfp4_global(amax: torch.Tensor, bound: float = E4M3.largest) -> torch.Tensor:
    """First-level fp32 scale S = bound * 6 / amax, at most fp32's largest; 1 where amax or S is 0. bound: the intended largest block scale, 448 or 256."""
    scale = _quotient(bound * E2M1.largest, amax).clamp_max(FP32_LARGEST)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def nvfp4_block(amax: torch.Tensor, overall: torch.Tensor, rules: Rules) -> tuple[torch.Tensor, torch.Tensor]:
    """(multiplier before the cast, E4M3 block scale) from block amaxes and S. A block's value is code * block scale * 1/S."""
    if rules.nvfp4_divides:
        wanted = torch.div(amax, torch.full_like(amax, E2M1.largest)) * overall
    else:
        wanted = amax * (overall * _RECIPROCAL["e2m1"])
    scale = round_nearest(wanted.clamp_max(FP32_LARGEST), E4M3)
    if rules.nvfp4_scale_up:
        scale = torch.where(scale < wanted, next_e4m3(scale), scale)
    encode = overall if rules.nvfp4_headroom == 1.0 else overall / rules.nvfp4_headroom
    return (1.0 / (scale * (1.0 / encode))).clamp_max(FP32_LARGEST), scale


def next_e4m3(value: torch.Tensor) -> torch.Tensor:
    """The E4M3 number above a non-negative one, at most 448."""
    exponent = torch.frexp(value.clamp_min(smallest_normal(E4M3))).exponent - 1
    return (value + torch.exp2((exponent - E4M3.mantissa).float())).clamp_max(E4M3.largest)


def nvfp4_fast_multiplier(scale: torch.Tensor, overall: torch.Tensor) -> torch.Tensor:
    """The multiplier before the cast under NVTE_USE_FAST_MATH, from block scales and S: S / scale, at most BF16's largest, in BF16 (as fp32).

    Source: `common/cast/nvfp4/specialized/quantize_transpose_nvfp4_tuned_1D.cuh` compute_nvfp4_scaling_coefficient (v2.14).
    """
    quotient = torch.div(overall.expand_as(scale), scale).clamp_max(torch.finfo(torch.bfloat16).max)
    return quotient.to(torch.bfloat16).float()


def nvfp4_candidates(
    amax: torch.Tensor, overall: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Four Over Six, from block amaxes and S: (multiplier, E4M3 block scale) with the block's largest value mapped to 6, and to 4 by a scale 1.5 times as large.

    Source: `common/cast/nvfp4/quantize_4over6_nvfp4.cuh` compute_scale_pair (v2.17).
    """
    base = torch.div(amax, torch.full_like(amax, E2M1.largest)) * overall
    inverse = 1.0 / overall
    pairs = []
    for wanted in (base, base * 1.5):
        scale = round_nearest(wanted.clamp_max(E4M3.largest), E4M3)
        pairs.append(((1.0 / (scale * inverse)).clamp_max(FP32_LARGEST), scale))
    return pairs[0], pairs[1]


# --- delayed scaling: amax histories and scales of many tensors, updated together as Transformer Engine's fused kernel does ------------------
def updated(
    history: torch.Tensor, scale: torch.Tensor, last: torch.Tensor, algo: str, largest: float, margin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(history [length, tensors], scale [tensors]) after an interval with the amaxes `last`: rolled and renewed; a tensor with amax 0 keeps both.

    Source: `common/recipe/delayed_scaling.cu` of Transformer Engine (the fused kernel).
    """
    moved = last != 0
    rolled = torch.roll(history, -1, 0)
    rolled[-1] = last
    # the kernel reduces before it clears row 0, so a history of one still sees the last amax
    amax = last if algo == "most_recent" else magnitude(rolled).amax(0)
    rolled[0] = 0
    renewed = _quotient(largest * 2.0**-margin, amax).clamp_max(FP32_LARGEST)
    usable = moved & amax.isfinite() & (amax > 0)
    return torch.where(moved, rolled, history), torch.where(usable, renewed, scale)


class AmaxTable:
    """Scale and amax history of a fixed list of tensors that share a format.

    history: [length, tensors] fp32, in which row 0 collects the running interval's amax. scale: [tensors] fp32, 1 at the start.
    """

    def __init__(self, names: Sequence[str], quant: Quant, largest: float, device: torch.device) -> None:
        self.names, self.quant, self.largest = tuple(names), quant, largest
        self.scale = torch.ones(len(self.names), device=device)
        self.history = torch.zeros(quant.amax_history, len(self.names), device=device)

    def observe(self, index: int, amax: torch.Tensor) -> None:
        """Adds an fp32 scalar amax to the running interval."""
        slot = self.history[0, index]
        torch.fmax(slot, amax, out=slot)

    def update(self, group: Any = None) -> None:
        """Ends an interval: max over `group` (a process group, or None), roll, new scales; a tensor with amax 0 keeps history and scale."""
        last = self.history[0].clone()
        if group is not None and torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(last, op=torch.distributed.ReduceOp.MAX, group=group)
        algo, margin = self.quant.amax_algo, self.quant.margin
        self.history, self.scale = updated(self.history, self.scale, last, algo, self.largest, margin)

    def state(self) -> dict[str, torch.Tensor]:
        """name -> [1 + length] fp32: the scale, then the history."""
        return {name: torch.cat([self.scale[i : i + 1], self.history[:, i]]) for i, name in enumerate(self.names)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads the result of `state`; raises CheckpointError that lists all missing names and all tensors with another history length."""
        length = 1 + self.history.shape[0]
        missing = [name for name in self.names if name not in state]
        shapes = {name: tuple(state[name].shape) for name in self.names if name in state}
        odd = [f"{name}: {shape}" for name, shape in shapes.items() if shape != (length,)]
        faults = [f"missing: {', '.join(missing)}"] if missing else []
        faults += [f"expected shape ({length},): {'; '.join(odd)}"] if odd else []
        if faults:
            what = f"delayed scaling's state does not fit this model: {'; '.join(faults)}"
            raise CheckpointError(f"{what} (start with a fresh state instead)")
        for i, name in enumerate(self.names):
            self.scale[i], self.history[:, i] = state[name][0], state[name][1:]
