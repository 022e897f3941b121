"""Rules and regions as people read them: one wording for `show`, `plan`, rules and the audit."""

from __future__ import annotations

from mpbridge.common.formats import say
from mpbridge.precision.modules import layers_text
from mpbridge.precision.regions import GEMMS, Gemms, Quant, Region

HIGH = "high precision"
NOT_QUANTIZED = "not quantized"


def quant_text(quant: Quant) -> str:
    """One line about a quantization."""
    parts = [f"{quant.format}, {quant.scaling} scaling"]
    if quant.row.history:
        parts.append(f"amax history {quant.amax_history} ({quant.amax_algo}), margin {quant.margin}")
        parts += [] if quant.wgrad else ["weight gradients in high precision"]
    parts += [f"{name} {say(value)}" for name, value in quant.options]
    parts += ["weights stored quantized"] if quant.stored else []
    parts += [f"{quant.attention} attention too"] if quant.attention != "none" else []
    return ", ".join(parts + ([f"quantizers from {quant.factory}"] if quant.factory else []))


def rule_words(gemms: Gemms) -> str:
    """What two sides of a rule can be compared by: 'hybrid delayed', or one for each GEMM; HIGH without quantization. An author's factory decides the formats itself."""
    words = [
        HIGH if quant is None else quant.scaling if quant.row.factory else f"{quant.format} {quant.scaling}"
        for quant in gemms
    ]
    return words[0] if gemms.one else ", ".join(f"{gemm} {word}" for gemm, word in zip(GEMMS, words, strict=True))


def region_text(region: Region) -> str:
    """Which linears a region is about."""
    modules = "all linears" if region.modules == "*" else region.modules
    if region.first is not None or region.last is not None:
        return f"{'linears' if region.modules == '*' else modules} of {_ends(region.first or 0, region.last or 0)}"
    if region.layers is None:
        return modules
    one = len(region.layers) == 1 and region.layers[0][0] == region.layers[0][1]
    return f"{modules} of layer{'' if one else 's'} {layers_text(region.layers)}"


def _ends(first: int, last: int) -> str:
    if first and first == last:
        return "the first and last layers" if first == 1 else f"the first {first} and last {last} layers"
    ends = [(word, count) for word, count in (("first", first), ("last", last)) if count]
    found = [f"the {word} layer" if count == 1 else f"the {word} {count} layers" for word, count in ends]
    return " and ".join(found) or "no layer at either end"


def region_rule(region: Region) -> str:
    """What a region's linears run in."""
    if region.gemms is not None:
        texts = [HIGH if quant is None else quant_text(quant) for quant in region.gemms]
        return "; ".join(f"{gemm}: {text}" for gemm, text in zip(GEMMS, texts, strict=True))
    return NOT_QUANTIZED if region.quant is None else quant_text(region.quant)
