"""Why served bytes are not training's: the rules of other quantizers, tried one by one on the weight that training cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_e2m1, encode_fp8, pack_e2m1
from mpbridge.numerics.stored import StoredWeight
from mpbridge.precision.regions import Quant
from mpbridge.settings.huggingface.served import ranks
from mpbridge.settings.huggingface.tensors import Mapped
from mpbridge.training.serving.cast import Part, Quantize, ServedWeights, values
from mpbridge.training.weights.layouts import apart

F8 = torch.float8_e4m3fn


class Source(NamedTuple):
    """A tensor that a parameter may have been cast from."""

    words: str
    tensor: torch.Tensor


class Way(NamedTuple):
    """A rule that some other quantizer follows."""

    words: str
    holds: Callable[[Quant], bool]
    quantize: Callable[[Quantize, Quant, torch.Tensor], StoredWeight]


def _option(name: str) -> Callable[[Quant], bool]:
    return lambda quant: any(option.name == name for option in quant.row.options)


def _flipped(name: str) -> Callable[[Quantize, Quant, torch.Tensor], StoredWeight]:
    def made(training: Quantize, quant: Quant, weight: torch.Tensor) -> StoredWeight:
        options = {**dict(quant.options), name: not quant.option(name)}
        return training(replace(quant, options=tuple(sorted(options.items()))), weight)

    return made


def _again(training: Quantize, quant: Quant, weight: torch.Tensor) -> StoredWeight:
    first = training(quant, weight)
    return _flipped("power_of_two")(training, quant, values(first.codes, first.scales))


def _blocks(quant: Quant, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 amax for every row and block along it; the same for every element)."""
    rows, columns = weight.shape
    assert quant.row.blocks is not None
    block = quant.row.blocks[quant.row.name != "nvfp4" or bool(quant.option("square_weights"))]
    across, along = block.across or rows, block.along or columns
    padded = torch.nn.functional.pad(weight.float().abs(), (0, -columns % along, 0, -rows % across))
    peaks = padded.view(padded.shape[0] // across, across, -1, along).amax((1, 3)).repeat_interleave(across, 0)[:rows]
    return peaks, peaks.repeat_interleave(along, 1)[:, :columns]


def _wide(scales: torch.Tensor, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(-(-columns // scales.shape[1]) if scales.shape[1] > 1 else columns, 1)[:, :columns]


def _divided(narrow: torch.dtype) -> Callable[[Quantize, Quant, torch.Tensor], StoredWeight]:
    """amax / 448 and a quotient, each rounded to `narrow`; NVFP4: amax / 2688 and a quotient by both levels."""

    def made(training: Quantize, quant: Quant, weight: torch.Tensor) -> StoredWeight:
        peaks, wide = _blocks(quant, weight)
        if quant.row.name != "nvfp4":
            scales = torch.div(peaks, torch.full_like(peaks, E4M3.largest)).to(narrow)
            full = torch.div(wide, torch.full_like(wide, E4M3.largest)).to(narrow)
            quotient = (weight.to(narrow) / full).float()
            return StoredWeight(encode_fp8(quotient, E4M3).view(F8), scales.float())
        amax = weight.float().abs().amax()
        second = (amax / 2688).to(narrow) if narrow is torch.float32 else 1 / (2688 / amax).to(narrow)
        block = encode_fp8((peaks / (6 * second.float())).to(narrow).float(), E4M3).view(F8)
        each = _wide(block.float(), weight.shape[1]) * second.float()
        codes = encode_e2m1(torch.where(each == 0, 0.0, weight.float() / each))
        return StoredWeight(pack_e2m1(codes), block, second.float() * 2688, 2688)

    return made


def _exponent(rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Quantize, Quant, torch.Tensor], StoredWeight]:
    def made(training: Quantize, quant: Quant, weight: torch.Tensor) -> StoredWeight:
        peaks, wide = _blocks(quant, weight)
        codes = encode_fp8(weight.float() * torch.exp2(-rule(wide)), E4M3).view(F8)
        return StoredWeight(codes, (rule(peaks) + 127).clamp(0, 254).to(torch.uint8))

    return made


def _floor(amax: torch.Tensor) -> torch.Tensor:
    return torch.frexp(amax).exponent.float() - 1 - 8


def _even(amax: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(amax)
    return exponent.float() - 1 - 8 + (mantissa * 2 >= 1.9375)


def _up(amax: torch.Tensor) -> torch.Tensor:
    """Up from 1.75 * 2**n, which still fits below 448."""
    mantissa, exponent = torch.frexp(amax)
    return exponent.float() - 1 - 8 + (mantissa * 2 >= 1.75)


_FP32_SCALES = lambda quant: quant.row.emulation in ("current", "fp32_blocks", "e4m3_blocks")  # noqa: E731
_MX = lambda quant: quant.row.name == "mxfp8"  # noqa: E731
WAYS = (
    Way("1-D blocks of 16 instead of 16 x 16, or the reverse", _option("square_weights"), _flipped("square_weights")),
    Way(
        "power-of-two scales instead of FP32 scales, or the reverse", _option("power_of_two"), _flipped("power_of_two")
    ),
    Way("the codes quantized a second time, to power-of-two scales or to FP32 scales", _option("power_of_two"), _again),
    Way(
        "a division by amax / 448 instead of a multiplication by its reciprocal", _FP32_SCALES, _divided(torch.float32)
    ),
    Way("scale and quotient computed in BF16", _FP32_SCALES, _divided(torch.bfloat16)),
    Way("exponents rounded down (the floor rule of OCP MX)", _MX, _exponent(_floor)),
    Way("exponents rounded to even", _MX, _exponent(_even)),
    Way("exponents rounded up from an amax of exactly 1.75 * 2^n", _MX, _exponent(_up)),
)


def explanations(served: ServedWeights, one: Mapped, sources: list[Source]) -> Iterator[tuple[str, Mapping[str, Part]]]:
    """(cause, the parts that it would give): another source, another rule, and both, in the order of likelihood. sources: training's first."""
    quant = served.rules[one.name]
    training = served.training.stored
    for number, source in enumerate(sources):
        where = f"cast from {source.words} instead of {sources[0].words}" if number else ""
        if number:
            yield where, served.parts(one, source.tensor)
        if len(one.parts) > 1:
            yield _both(where, "fused linears quantized apart"), _each(served, one, source.tensor)
        if ranks(one, served.facts) > 1:
            yield (
                _both(where, "one scale for the tensor instead of one for each rank"),
                served.parts(one, source.tensor, split=1),
            )
        for way in WAYS:
            if way.holds(quant):
                rule = _rule(way, training)
                yield _both(where, way.words), served.parts(one, source.tensor, rule)
                if len(one.parts) > 1:
                    yield (
                        _both(where, way.words, "fused linears quantized apart"),
                        _each(served, one, source.tensor, rule),
                    )


def _rule(way: Way, training: Quantize) -> Quantize:
    return lambda quant, weight: way.quantize(training, quant, weight)


def _both(*words: str) -> str:
    return "; ".join(word for word in words if word)


def _each(served: ServedWeights, one: Mapped, whole: torch.Tensor, rule: Quantize | None = None) -> dict[str, Part]:
    """Every linear quantized by itself."""
    found = {}
    for (name, _), weight in zip(one.parts, apart(whole, one.layout, served.facts.shape), strict=True):
        piece = (rule or served.training.stored)(served.rules[one.name], weight.contiguous())
        found[name.removesuffix(".weight")] = Part(piece.codes, piece.scales, piece)
    return found
