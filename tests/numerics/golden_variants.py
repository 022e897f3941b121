"""Golden quantizations of NVFP4's variants (Four Over Six, scales by rows, the rules of 2.14 and later), from Transformer Engine's Python reference.

Made by
    python -m tests.numerics.golden_variants --from PATH_TO_A_TRANSFORMER_ENGINE_CHECKOUT
at commit d0067d0d (2026-08-22), as golden.py does: the reference file of the checkout as it is, around stand-ins for what needs CUDA.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

from tests.numerics import golden

GOLDEN = Path(__file__).resolve().parent / "golden_te_main.json"
SCOPES = {"activation": (1, 16), "weight": (16, 16)}


def variants() -> dict[str, dict[str, Any]]:
    """name -> arguments of the reference's quantizer."""
    found: dict[str, dict[str, Any]] = {
        "activation_plain": {"quant_tile_shape": (1, 16), "with_rht": True},
        "weight_plain": {"quant_tile_shape": (16, 16)},
        "weight_lines": {"quant_tile_shape": (1, 16)},
        "activation_rows": {"quant_tile_shape": (1, 16), "row_scaled_nvfp4": True},
        "activation_rows_448_MAE": {
            "quant_tile_shape": (1, 16), "row_scaled_nvfp4": True, "nvfp4_use_4over6": True, "nvfp4_e4m3_max": 448,
        },
    }  # fmt: skip
    for scope, tile in SCOPES.items():
        for bound in (448, 256):
            for error in ("MAE", "MSE"):
                found[f"{scope}_{bound}_{error}"] = {
                    "quant_tile_shape": tile, "nvfp4_use_4over6": True, "nvfp4_e4m3_max": bound, "nvfp4_4over6_err_mode": error,
                }  # fmt: skip
    return found


def reference(checkout: Path) -> Any:
    """The reference module of a checkout, loaded around stand-ins."""
    golden._stand_ins()
    utils = sys.modules["transformer_engine.pytorch.tensor.utils"] = types.ModuleType("utils")
    utils.is_custom = lambda x: True  # type: ignore[attr-defined]
    sys.modules["transformer_engine.pytorch.tensor"] = types.ModuleType("tensor")
    folder = checkout / "transformer_engine" / "pytorch" / "custom_recipes"
    for name in ("reference_utils", "gemm"):
        golden._load(f"transformer_engine.pytorch.custom_recipes.{name}", folder / f"{name}.py")
    return golden._load("transformer_engine.pytorch.custom_recipes.reference_nvfp4", folder / "reference_nvfp4.py")


def entries(module: Any) -> dict[str, dict[str, Any]]:
    """variant, copy -> tensor kind -> entry of code x block scale, and of the second-level amax."""
    found: dict[str, dict[str, Any]] = {}
    formats = sys.modules["transformer_engine.pytorch.custom_recipes.reference_utils"].Fp4Formats
    for name, arguments in variants().items():
        for kind, x in golden.inputs().items():
            made = module.NVFP4QuantizerRef(dtype=formats.E2M1, pow_2_scales=False, **arguments)._quantize(x)
            codes, scales, codes_t, scales_t, row, column = made
            for copy, q, s, amax in (("row", codes, scales, row), ("column", codes_t, scales_t, column)):
                values = module.cast_from_fp4x2(q, torch.float32) * s.float().repeat_interleave(16, 1)
                # a row of the transposed tensor is a column of ours
                values = values if copy == "row" else values.t()
                entry = {"values": golden.entry(values), "amax": golden.entry(amax)}
                found.setdefault(f"{name}_{copy}", {})[kind] = entry
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="checkout", type=Path, required=True)
    made = entries(reference(parser.parse_args().checkout))
    kept = {"made_by": "python -m tests.numerics.golden_variants --from CHECKOUT", "commit": "d0067d0d", "values": made}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{GOLDEN.name}: {sum(map(len, made.values()))} entries")
