"""Golden quantizations: what Transformer Engine's own Python references say, kept because the package cannot be imported without CUDA.

Made by
    python tests/numerics/golden.py --from PATH_TO_A_TRANSFORMER_ENGINE_CHECKOUT_AT_TAG_v2.11
which runs three files of the checkout as they are, around stand-ins for the parts that need CUDA. Per tensor kind and quantization the
golden file holds a SHA-256 of the fp32 values, so that any differing bit shows, and two sums, so that a human sees how far off.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).resolve().parent / "golden_te_2_11.json"
SHAPE = (256, 384)


def inputs() -> dict[str, torch.Tensor]:
    """bf16 tensors of several characters, [256, 384], with the same bits on every CPU: drawn as integers and scaled by powers of two, since torch's
    `randn` and `exp` depend on the vector instructions. The sixteen terms of a Hadamard transform sum exactly, so their order does not matter either.
    """
    generator = torch.Generator().manual_seed(20260)

    def drawn(low: int, high: int, *more: int) -> torch.Tensor:
        return torch.randint(low, high, (*more, *SHAPE), generator=generator)

    normal = drawn(-(2**11), 2**11, 12).sum(0) * 2.0**-12  # Irwin and Hall: variance 1
    outliers = normal * torch.where(drawn(0, 1000) == 0, 64, 1)
    rows = normal * torch.exp2(torch.arange(SHAPE[0]) // 6 - 20.0)[:, None]
    zeros = normal.clone()
    zeros[32:160, 128:256] = 0
    wide = drawn(128, 256) * torch.exp2(drawn(-5, 6).float()) * (drawn(0, 2) * 2 - 1)
    kinds = {"normal": normal, "outliers": outliers, "row_scaled": rows, "zero_blocks": zeros, "wide": wide, "tiny": normal * 2.0**-100}  # fmt: skip
    return {name: x.bfloat16() for name, x in kinds.items()}


def digest(values: torch.Tensor) -> str:
    """SHA-256 of fp32 values; -0 counts as 0."""
    return hashlib.sha256((values.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()[:24]


def entry(values: torch.Tensor) -> dict[str, Any]:
    """What the golden file keeps of a tensor of dequantized values."""
    return {"sha": digest(values), "sum": float(values.double().sum()), "abs": float(values.double().abs().sum())}


# --- the references -----------------------------------------------------------------------------------------------------------------------
def _stand_ins() -> None:
    """Modules that the reference files import and that need CUDA; nothing of their content takes part in a quantization."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = sys.modules[name] = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(content)
        return made

    class Quantizer:
        def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
            self.rowwise_usage, self.columnwise_usage, self.internal = rowwise, columnwise, True

    class Storage:
        pass

    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module(name)
    module("transformer_engine.pytorch.custom_recipes")
    module("transformer_engine.pytorch.quantized_tensor", QuantizedTensorStorage=Storage, Quantizer=Quantizer)
    module("transformer_engine_torch", DType=types.SimpleNamespace(kFloat8E4M3=0, kFloat8E5M2=1))
    module("references")


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, made)
    spec.loader.exec_module(made)
    return made


def references(checkout: Path) -> dict[str, dict[str, Any]]:
    """quantization -> tensor kind -> entry, from the reference files of a checkout."""
    _stand_ins()
    pytorch, tests = checkout / "transformer_engine" / "pytorch", checkout / "tests" / "pytorch" / "references"
    base = "transformer_engine.pytorch.custom_recipes"
    for name in ("utils", "quantization"):
        _load(f"{base}.{name}", pytorch / "custom_recipes" / f"{name}.py")
    nvfp4 = _load(f"{base}.quantization_nvfp4", pytorch / "custom_recipes" / "quantization_nvfp4.py")
    file = pytorch / "custom_recipes" / "quantization_current_scaling.py"
    current = _load(f"{base}.quantization_current_scaling", file)
    _load("references.quantize_scale_calc", tests / "quantize_scale_calc.py")
    blockwise = _load("references.blockwise_quantizer_reference", tests / "blockwise_quantizer_reference.py")
    found: dict[str, dict[str, Any]] = {}
    for kind, x in inputs().items():
        for name, values in (_nvfp4(nvfp4, x) | _current(current, x) | _blockwise(blockwise, x)).items():
            found.setdefault(name, {})[kind] = entry(values)
    return found


def _nvfp4(reference: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    formats = sys.modules["transformer_engine.pytorch.custom_recipes.utils"].Fp4Formats

    def values(codes: torch.Tensor, scale: torch.Tensor, tile: int) -> torch.Tensor:
        grid = reference.cast_from_fp4x2(codes, torch.float32)
        spread = scale.view(torch.float8_e4m3fn).float() if scale.dtype == torch.uint8 else scale.float()
        return grid * spread.repeat_interleave(16, 1)[: grid.shape[0], : grid.shape[1]]

    out = {}
    for name, tile, rotated in (("nvfp4_activation", (1, 16), True), ("nvfp4_weight", (16, 16), False)):
        how = {"dtype": formats.E2M1, "quant_tile_shape": tile, "pow_2_scales": False, "with_rht": rotated}
        made = reference.NVFP4QuantizerRef(**how).quantize(x)
        out[f"{name}_row"] = values(made.data, made.scale, tile[0])
        out[f"{name}_column"] = values(made.data_t, made.scale_t, tile[0]).t()
    return out


def _current(reference: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    out = {}
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        made = reference.CurrentScalingQuantizerRef(dtype=dtype, rowwise=True, columnwise=False).quantize(x)
        out[f"tensorwise_{name}"] = made.data.view(dtype).float()
    return out


def _blockwise(reference: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    out = {}
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        for kind, tile in (("activation", (1, 128)), ("weight", (128, 128))):
            quantizer = reference.BlockwiseQuantizerReference()
            how = {"return_transpose": True, "eps": 0.0, "pow_2_scales": True, "quant_tile_shape": tile}
            made = quantizer.quantize(x, quant_dtype=dtype, **how)
            row = quantizer.ref_dequantize_rowwise(made.data, tile, made.scale, torch.float32)
            column = quantizer.ref_dequantize_rowwise(made.data_t, tile, made.scale_t, torch.float32)
            out |= {f"blockwise_{kind}_{name}_row": row, f"blockwise_{kind}_{name}_column": column.t()}
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="checkout", type=Path, required=True)
    made = references(parser.parse_args().checkout)
    kept = {"made_by": "python tests/numerics/golden.py --from CHECKOUT", "release": "2.11", "values": made}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{GOLDEN.name}: {sum(map(len, made.values()))} entries")
