"""Why served bytes are not training's: the rules of other quantizers, tried one by one on the weight that training cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from mpbridge.common.formats import E4M3
from mpbridge.numerics.codes import encode_e2m1, encode_fp8, pack_e2m1
from mpbridge.numerics.scales import release_of
from mpbridge.numerics.stored import StoredWeight
from mpbridge.precision.regions import Quant
from mpbridge.settings.huggingface.served import ranks
from mpbridge.settings.huggingface.tensors import Mapped
from mpbridge.training.serving.cast import Part, Quantize, ServedWeights, TrainedWith, values
from mpbridge.training.serving.files import apart

F8 = torch.float8_e4m3fn


class Source(NamedTuple):
    """A tensor that a parameter may have been cast from."""

    words: str
    tensor: torch.Tensor


class Way(NamedTuple):
    """A rule that some other quantizer follows."""

    words: str
    holds: Callable[[Quant], bool]
    quantize: Callable[[Quant, torch.Tensor], StoredWeight]


def _again(training: Quantize, first: Quant, second: Quant, weight: torch.Tensor) -> StoredWeight:
    made = training(first, weight)
    return training(second, values(made.codes, made.scales))


def _blocks(quant: Quant, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 amax for every row and block along it; the same for every element)."""
    rows, columns = weight.shape
    square = quant.row.has("square_weights") and bool(quant.option("square_weights"))
    block = quant.row.block(weight=True, square=square)
    assert block is not None
    across, along = block.across or rows, block.along or columns
    padded = torch.nn.functional.pad(weight.float().abs(), (0, -columns % along, 0, -rows % across))
    peaks = padded.view(padded.shape[0] // across, across, -1, along).amax((1, 3)).repeat_interleave(across, 0)[:rows]
    return peaks, peaks.repeat_interleave(along, 1)[:, :columns]


def _narrow(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


def _over(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448 as a division: by a number it may become a multiplication."""
    return amax / torch.full_like(amax, E4M3.largest)


def _factor(amax: torch.Tensor) -> torch.Tensor:
    """448 / amax as eager torch computes it."""
    return amax.reciprocal() * E4M3.largest


def _no_zeros(scale: torch.Tensor) -> torch.Tensor:
    """Scales that E4M3 would round to zero are 0.125."""
    return torch.where(scale <= 2.0**-10, 0.125, scale)


def _fp8(
    scale: Callable[[torch.Tensor], torch.Tensor], scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[[Quant, torch.Tensor], StoredWeight]:
    """FP8 with scale(amax), and codes of scaled(weight, amax)."""

    def made(quant: Quant, weight: torch.Tensor) -> StoredWeight:
        peaks, wide = _blocks(quant, weight)
        return StoredWeight(encode_fp8(scaled(weight.float(), wide), E4M3).view(F8), scale(peaks))

    return made


def _fp4(
    level: Callable[[torch.Tensor], tuple[torch.Tensor, float]],
    block: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    scaled: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    signed_zeros: bool = True,
) -> Callable[[Quant, torch.Tensor], StoredWeight]:
    """NVFP4 with the second level / reach of level(amax), block scales of block(their amax, second level, its reciprocal), and codes of scaled(weight, block scale, second level, its reciprocal)."""

    def made(quant: Quant, weight: torch.Tensor) -> StoredWeight:
        peaks, wide = _blocks(quant, weight)
        amax, reach = level(peaks.amax())
        second, factor = amax / reach, reach / amax
        scales, each = (encode_fp8(block(one, second, factor), E4M3).view(F8) for one in (peaks, wide))
        codes = encode_e2m1(scaled(weight.float(), each.float(), second, factor).nan_to_num())
        codes = codes if signed_zeros else torch.where(codes == 8, 0, codes)
        return StoredWeight(pack_e2m1(codes), scales, amax, reach)

    return made


def _exponent(rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Quant, torch.Tensor], StoredWeight]:
    def made(quant: Quant, weight: torch.Tensor) -> StoredWeight:
        peaks, wide = _blocks(quant, weight)
        codes = encode_fp8(weight.float() * torch.exp2(-rule(wide)), E4M3).view(F8)
        return StoredWeight(codes, (rule(peaks) + 127).clamp(0, 254).to(torch.uint8))

    return made


def _exponent_from(mantissa_of_next: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The exponent of 448's binade that holds amax, and the next one from that mantissa on; of zero: the smallest."""

    def rule(amax: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(amax)
        return torch.where(amax == 0, -127.0, exponent.float() - 9 + (mantissa * 2 >= mantissa_of_next))

    return rule


_MX = lambda quant: quant.row.name == "mxfp8"  # noqa: E731
_FP4 = lambda quant: quant.row.name == "nvfp4"  # noqa: E731
_FP8 = lambda quant: quant.row.emulation in ("current", "fp32_blocks", "torchao")  # noqa: E731

ARITHMETIC = (
    Way("a division by amax / 448 instead of a multiplication by its reciprocal", _FP8, _fp8(_over, lambda w, amax: w / _over(amax))),
    Way("a multiplication by the reciprocal of amax / 448", _FP8, _fp8(_over, lambda w, amax: w * (1.0 / _over(amax)))),
    Way(
        "a multiplication by 448 times the reciprocal of amax", _FP8,
        _fp8(lambda amax: 1.0 / _factor(amax), lambda w, amax: w * _factor(amax)),
    ),
    Way(
        "scale and quotient computed in BF16", _FP8,
        _fp8(lambda amax: _narrow(_over(amax)), lambda w, amax: _narrow(_narrow(w) / _narrow(_over(amax)))),
    ),
    Way(
        "divisions by amax / 2688 and by the product of both scales, block scales of at least 2**-9 and of 1 for zeros", _FP4,
        _fp4(
            lambda amax: (amax, 2688.0),
            lambda amax, second, factor: torch.where(amax == 0, 1.0, (amax / (6.0 * second)).clamp(2.0**-9, E4M3.largest)),
            lambda w, scale, second, factor: w / (scale * second),
        ),
    ),
    Way(
        "both levels of scales computed in BF16", _FP4,
        _fp4(
            lambda amax: (torch.ones(()), float(_narrow(_narrow(amax.reciprocal()) * 2688.0))),
            lambda amax, second, factor: _no_zeros(_narrow(amax / 6.0) * factor),
            lambda w, scale, second, factor: w / (scale / factor),
        ),
    ),
    Way(
        "reciprocals of the product of both scales, and zeros without a sign", _FP4,
        _fp4(
            lambda amax: (amax, 2688.0),
            lambda amax, second, factor: (1.0 / second) * (amax * (1.0 / 6.0)),
            lambda w, scale, second, factor: w * (1.0 / (scale * (1.0 / (1.0 / second)))),
            signed_zeros=False,
        ),
    ),
    Way("exponents rounded down (the floor rule of OCP MX)", _MX, _exponent(_exponent_from(2))),
    Way("exponents rounded to even", _MX, _exponent(_exponent_from(1.9375))),
    Way("exponents rounded up from an amax of exactly 1.75 * 2^n", _MX, _exponent(_exponent_from(1.75))),
)  # fmt: skip
"""Sources, in this order: vLLM 0.33 (channels) and ModelOpt 0.47; vLLM's per_block_cast_to_fp8; transformers 5.17 Fp8Quantize;
compressed-tensors 0.20 (FP8); ModelOpt; compressed-tensors (NVFP4); vLLM's online/lm_head.py; torchao 0.18 FLOOR and EVEN; compressed-tensors."""

_FP32_SCALES = "FP32 scales instead of powers of two"


def _turned(quant: Quant, release: tuple[int, int]) -> Iterator[tuple[str, Quant]]:
    """(cause, the rule with another shape of blocks or another kind of scales), of those that the release has."""
    flat, square = quant.row.block(weight=True, square=False), quant.row.block(weight=True)
    words: dict[str, tuple[str, str]] = {"power_of_two": ("powers of two instead of FP32 scales", _FP32_SCALES)}
    if flat is not None and square is not None:
        size = f"{square.across} x {square.along}"
        words["square_weights"] = (
            f"blocks of {size} instead of {flat.along}",
            f"1-D blocks of {flat.along} instead of {size}",
        )
    for option in quant.row.options:
        if option.name in words and release_of(option.since) <= release:
            now = bool(quant.option(option.name))
            turned = {**dict(quant.options), option.name: not now}
            yield words[option.name][now], replace(quant, options=tuple(sorted(turned.items())))


def ways(trained: TrainedWith, quant: Quant) -> Iterator[tuple[str, Callable[[torch.Tensor], StoredWeight]]]:
    """(cause, rule for a weight [rows, columns]) of other quantizers' rules, in the order of likelihood."""
    training = trained.stored
    for words, rule in (("", quant), *_turned(quant, trained.release)):
        if words:
            yield words, partial(training, rule)
        if words and rule.row.has("power_of_two"):
            kind = "power-of-two" if rule.option("power_of_two") else "FP32"
            yield f"the codes quantized a second time, to {kind} scales", partial(_again, training, quant, rule)
        if rule.row.has("power_of_two") and rule.option("power_of_two"):
            continue  # then no arithmetic changes the scales
        kind = _FP32_SCALES if rule.row.emulation == "torchao" else ""  # its recipes have powers of two, and no option
        for way in ARITHMETIC:
            if way.holds(rule):
                yield _both(words, kind, way.words), partial(way.quantize, rule)


def explanations(served: ServedWeights, one: Mapped, sources: list[Source]) -> Iterator[tuple[str, Mapping[str, Part]]]:
    """(cause, the parts that it would give): another source, another rule, and both, in the order of likelihood. sources: training's first."""
    quant = served.rules[one.name]
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
        for words, rule in ways(served.training, quant):
            yield _both(where, words), served.parts(one, source.tensor, _any(rule))
            if len(one.parts) > 1:
                apart_too = _each(served, one, source.tensor, _any(rule))
                yield _both(where, words, "fused linears quantized apart"), apart_too


def _any(rule: Callable[[torch.Tensor], StoredWeight]) -> Quantize:
    return lambda quant, weight: rule(weight)


def _both(*words: str) -> str:
    return "; ".join(word for word in words if word)


def _each(served: ServedWeights, one: Mapped, whole: torch.Tensor, rule: Quantize | None = None) -> dict[str, Part]:
    found = {}
    for (name, _), weight in zip(one.parts, apart(whole, one.layout, served.facts.shape), strict=True):
        piece = (rule or served.training.stored)(served.rules[one.name], weight.contiguous())
        found[name.removesuffix(".weight")] = Part(piece.codes, piece.scales, piece)
    return found
