"""The same BF16 weights quantized by training's rules and by tools that make served folders: the share of codes and scales that differ, and why.

`python scripts/evidence/stacks/served_bytes.py` runs the tools that are installed and writes their rows of scripts/evidence/data/served.json; VLLM_SOURCE is
a checkout or unpacked wheel of vLLM with its Python requirements: its quantizers for online quantization run without its compiled part.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch
from served_data import record, vllm

from mpbridge import ConfigContainer
from mpbridge.numerics.stored import StoredWeight
from mpbridge.precision.regions import Quant
from mpbridge.precision.registry import get_mixed_precision_config
from mpbridge.precision.resolve import resolve
from mpbridge.training.serving.cast import TrainedWith
from mpbridge.training.serving.causes import ways

F8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Made:
    """A quantized weight [rows, columns] as a tool left it, scales spread to one row per row of the weight."""

    codes: torch.Tensor
    """float8_e4m3fn [rows, columns], or packed uint8 [rows, columns / 2]."""
    scales: torch.Tensor
    """In the tool's dtype: multipliers, or E8M0 bytes."""
    second: torch.Tensor | None = None
    """NVFP4's second level as the tool stores it."""
    divides: bool = False
    """Whether `second` is a divisor."""


Tool = Callable[[torch.Tensor], Made]


def weights() -> dict[str, torch.Tensor]:
    """Three linears of a decoder layer, twice: as initialized, and with heavy tails, rows of different size and blocks of zeros."""
    random = torch.Generator().manual_seed(1)
    shapes = {"proj": (512, 512), "up": (768, 512), "down": (512, 768)}
    found = {}
    for kind in ("initial", "trained"):
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=random) * 0.02
            if kind == "trained":
                tails = torch.randn((5, *shape), generator=random).square().mean(0).sqrt()
                weight = weight / tails * torch.exp(0.5 * torch.randn((shape[0], 1), generator=random))
                weight[3, :64] = 0
            found[f"{kind}.{name}"] = weight.bfloat16()
    return found


def lines(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of any layout as [rows, blocks]."""
    flat = scales.reshape(1, 1) if scales.numel() == 1 else scales.squeeze() if scales.dim() == 4 else scales
    flat = flat.reshape(flat.shape[0], -1)
    return flat.repeat_interleave(rows // flat.shape[0], 0)


def compressed_tensors(preset: str) -> Tool:
    """llm-compressor's observer and compressed-tensors' compressor."""

    def made(weight: torch.Tensor) -> Made:
        from compressed_tensors.compressors.base import BaseCompressor
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
        from llmcompressor.observers.base import Observer

        scheme = preset_name_to_scheme(preset, ["Linear"])
        observer: Any = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=scheme.weights)
        observer(weight)
        found = observer.get_qparams()
        state = {"weight": weight.clone(), "weight_scale": found["scale"]}
        if found["global_scale"] is not None:
            state["weight_global_scale"] = found["global_scale"]
        name: Any = infer_module_format(torch.nn.Linear, scheme)
        out = BaseCompressor.get_value_from_registry(getattr(name, "value", name)).compress(state, scheme)
        codes = out.get("weight_packed", out.get("weight"))
        return Made(codes, lines(out["weight_scale"], len(weight)), out.get("weight_global_scale"), divides=True)

    return made


def modelopt(config: str) -> Tool:
    """A linear through mtq.quantize and the exporter's own functions."""

    def made(weight: torch.Tensor) -> Made:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import quant_utils

        rows, columns = weight.shape
        model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False, dtype=weight.dtype))
        model[0].weight.data.copy_(weight)
        module = mtq.quantize(
            model, getattr(mtq, config), lambda model: model(torch.ones(1, columns, dtype=weight.dtype))
        )[0]
        scale, second = quant_utils.get_weight_scaling_factor(module), quant_utils.get_weight_scaling_factor_2(module)
        kind, size = quant_utils.get_quantization_format(module), quant_utils.get_weight_block_size(module)
        codes = quant_utils.to_quantized_weight(module.weight.detach().clone(), scale, kind, second, size)
        return Made(codes, lines(scale, rows), second)

    return made


def torchao(mode: str) -> Tool:
    def made(weight: torch.Tensor) -> Made:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

        scale, codes = to_mx(weight, F8, 32, ScaleCalculationMode[mode])
        return Made(codes.view(weight.shape), scale.view(torch.uint8).view(len(weight), -1))

    return made


def transformers(scale_fmt: str | None) -> Tool:
    def made(weight: torch.Tensor) -> Made:
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt=scale_fmt)
        out = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": weight})
        return Made(out["a.weight"], lines(out["a.weight_scale_inv"].float(), len(weight)))

    return made


def vllm_channel(weight: torch.Tensor) -> Made:
    from vllm.model_executor.layers.quantization.online import fp8

    scale = fp8._fp8_channel_scale(weight.abs().amax(1, keepdim=True))
    return Made(fp8._fp8_quant_per_channel(weight, scale), scale)


def vllm_blocks(ue8m0: bool) -> Tool:
    def made(weight: torch.Tensor) -> Made:
        from vllm.utils.deep_gemm import per_block_cast_to_fp8

        codes, scale = per_block_cast_to_fp8(weight, [128, 128], ue8m0)
        return Made(codes, lines(scale, len(weight)))

    return made


def vllm_mxfp8(weight: torch.Tensor) -> Made:
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    return Made(*mxfp8_utils._mxfp8_e4m3_quantize_torch(weight))


def vllm_nvfp4(weight: torch.Tensor) -> Made:
    from vllm.model_executor.layers.quantization.online import lm_head

    return Made(*lm_head._quantize_nvfp4(weight))


@dataclass(frozen=True, slots=True)
class Case:
    """A rule of training, and a tool's for the same scaling."""

    rule: str
    """A key of RULES."""
    tool: str
    package: str
    make: Tool = field(repr=False)

    @property
    def installed(self) -> str:
        """The package's release; '': not installed."""
        if self.package == "vllm":
            return vllm()
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""


_NVFP4_2D, _NVFP4_1D = "NVFP4, blocks of 16 x 16", "NVFP4, blocks of 16"
_POWERS, _FP32 = "blockwise, powers of two", "blockwise, FP32 scales"
RULES: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "tensorwise": ("bf16_with_fp8_current_scaling_mixed", {}),
    "rowwise": ("bf16_with_fp8_rowwise", {}),
    _POWERS: ("bf16_with_fp8_subchannel_scaling_mixed", {"power_of_two": True}),
    _FP32: ("bf16_with_fp8_subchannel_scaling_mixed", {"power_of_two": False}),
    "MXFP8": ("bf16_with_mxfp8_mixed", {}),
    _NVFP4_2D: ("bf16_with_nvfp4_mixed", {"square_weights": True}),
    _NVFP4_1D: ("bf16_with_nvfp4_mixed", {"square_weights": False}),
}
"""Name -> (recipe, options of its scaling)."""
_CT, _MO = "llmcompressor", "nvidia-modelopt"
CASES = (
    Case("tensorwise", "compressed-tensors FP8", _CT, compressed_tensors("FP8")),
    Case("tensorwise", "ModelOpt FP8", _MO, modelopt("FP8_DEFAULT_CFG")),
    Case("rowwise", "compressed-tensors FP8_DYNAMIC", _CT, compressed_tensors("FP8_DYNAMIC")),
    Case("rowwise", "ModelOpt FP8_PER_CHANNEL_PER_TOKEN", _MO, modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG")),
    Case("rowwise", "vLLM online fp8_per_channel", "vllm", vllm_channel),
    *(
        case
        for rule, powers in ((_POWERS, True), (_FP32, False))
        for case in (
            Case(rule, "compressed-tensors FP8_BLOCK", _CT, compressed_tensors("FP8_BLOCK")),
            Case(rule, "ModelOpt FP8_PB_WO", _MO, modelopt("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG")),
            Case(rule, f"transformers FineGrainedFP8{', ue8m0' * powers}", "transformers", transformers("ue8m0" if powers else None)),
            Case(rule, f"vLLM online fp8_per_block{', ue8m0' * powers}", "vllm", vllm_blocks(powers)),
        )
    ),
    Case("MXFP8", "compressed-tensors MXFP8", _CT, compressed_tensors("MXFP8")),
    Case("MXFP8", "ModelOpt MXFP8", _MO, modelopt("MXFP8_DEFAULT_CFG")),
    Case("MXFP8", "vLLM online mxfp8", "vllm", vllm_mxfp8),
    *(Case("MXFP8", f"torchao MX, {mode}", "torchao", torchao(mode)) for mode in ("RCEIL", "FLOOR", "EVEN")),
    *(
        case
        for rule in (_NVFP4_2D, _NVFP4_1D)
        for case in (
            Case(rule, "compressed-tensors NVFP4", _CT, compressed_tensors("NVFP4")),
            Case(rule, "ModelOpt NVFP4", _MO, modelopt("NVFP4_DEFAULT_CFG")),
            Case(rule, "vLLM online nvfp4", "vllm", vllm_nvfp4),
        )
    ),
)  # fmt: skip


def training() -> TrainedWith:
    """Training's rules, of a run that stores BF16 parameters."""
    run = ConfigContainer.load("gpt_tiny").resolved(training=False)
    return TrainedWith.of(Path(), run, ())


def rule_of(name: str) -> Quant:
    """The rule by which fprop quantizes a weight of a middle layer."""
    recipe, options = RULES[name]
    quant = resolve(get_mixed_precision_config(recipe)).of_path("decoder.layers.2.mlp.linear_fc1", 4).fprop
    assert quant is not None
    return replace(quant, options=tuple(sorted({**dict(quant.options), **options}.items())))


def codes_of(tensor: torch.Tensor) -> torch.Tensor:
    """One byte for each code of a weight, packed or not."""
    raw = tensor.view(torch.uint8)
    return raw if tensor.dtype is F8 else torch.stack([raw & 15, raw >> 4], -1)


def second_of(stored: StoredWeight, divides: bool) -> torch.Tensor:
    """The second level as a format stores it."""
    assert stored.amax is not None
    return stored.divisor if divides else stored.amax / stored.reach


def same(stored: StoredWeight, made: Made) -> bool:
    """Whether a rule gives a tool's codes bit for bit, and its scales: rounded to BF16 where the tool stores them so."""
    if not torch.equal(stored.codes.view(torch.uint8), made.codes.view(torch.uint8)):
        return False
    if not torch.equal(stored.scales.to(made.scales.dtype).float(), made.scales.float()):
        return False
    return made.second is None or bool((second_of(stored, made.divides) == made.second).all())


@dataclass(frozen=True, slots=True)
class Compared:
    """A tool's bytes of every weight beside training's."""

    codes: float
    """Share that differs."""
    scales: float
    second: bool | None
    """Whether every second-level scale is training's; None: the format has none."""
    cause: str
    """The rule that gives the tool's bytes of every weight; '': training's own; 'not explained'."""


def compare(
    case: Case, training: TrainedWith, quant: Quant, given: Mapping[str, torch.Tensor], made: Mapping[str, Made]
) -> Compared:
    """made: what the tool made of each weight."""
    ours = {name: training.stored(quant, weight) for name, weight in given.items()}
    wrong = [codes_of(ours[name].codes) != codes_of(made[name].codes) for name in given]
    scales = [ours[name].scales.float() != made[name].scales.float() for name in given]
    second = None
    if ours[next(iter(given))].amax is not None:
        second = all(bool((second_of(ours[n], made[n].divides) == made[n].second).all()) for n in given)
    shares = [float(torch.cat([one.flatten() for one in part]).double().mean()) for part in (wrong, scales)]
    cause = "" if all(same(ours[name], made[name]) for name in given) else "not explained"
    rules: Iterator[Any] = iter(()) if not cause else ways(training, quant)
    for words, rule in rules:
        if all(same(rule(given[name]), made[name]) for name in given):
            cause = words
            break
    return Compared(*shares, second, cause)


def measured() -> dict[str, list[dict[str, Any]]]:
    """A row for every case whose tool is installed."""
    given, trained, made = weights(), training(), dict[str, dict[str, Made]]()
    rows = []
    for case in CASES:
        if not case.installed:
            print(f"{case.tool}: {case.package} is not installed", flush=True)
            continue
        made.setdefault(
            case.tool, {name: case.make(weight) for name, weight in given.items()} if case.tool not in made else {}
        )
        found = compare(case, trained, rule_of(case.rule), given, made[case.tool])
        row = {"rule": case.rule, "tool": case.tool, "release": release_of(case)} | asdict(found)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return {"weights": sum(weight.numel() for weight in given.values()), "rows": rows}  # type: ignore[dict-item]


def release_of(case: Case) -> str:
    """'compressed-tensors 0.20.0 and llmcompressor 0.14.0.1'."""
    beside = f"compressed-tensors {importlib.metadata.version('compressed-tensors')}, " if case.package == _CT else ""
    return f"{beside}{case.package} {case.installed}"


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    found = measured()
    record(bytes=found)
    print(
        f"{len(found['rows'])} of {len(CASES)} cases; not explained: {[row['tool'] for row in found['rows'] if row['cause'] == 'not explained'] or 'none'}"
    )


if __name__ == "__main__":
    main()
