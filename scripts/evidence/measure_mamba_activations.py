"""Bytes a token that autograd keeps for one of megatron-core's Mamba layers over Transformer Engine's Python on a CPU, next to what `mpbridge memory` counts.

`python scripts/evidence/measure_mamba_activations.py [RECIPE ...] [--machine b200]`; each recipe in a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import te_folders  # noqa: F401  # it says where Transformer Engine lies

from mpbridge import ConfigContainer, transformer_engine_on_cpu

MODEL = {
    "hybrid_override_pattern": "M", "hidden_size": 256, "num_attention_heads": 4, "mamba_num_heads": 32, "mamba_head_dim": 16, "mamba_num_groups": 2,
    "mamba_state_dim": 64, "normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0, "vocab_size": 64, "max_sequence_length": 128,
    "position_embedding_type": "none", "gradient_accumulation_fusion": False,
}  # fmt: skip
SEQUENCE, BATCH = 128, 3
RECIPES = ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed")


def measured(recipe: str, machine: str) -> tuple[float, float]:
    """(kept, counted) bytes a token of one layer."""
    kind = (
        {"recipe": recipe}
        if recipe == "bf16_mixed"
        else {
            "recipe": recipe,
            "first_last_layers_bf16": False,
            "fp8_param": False,
            "reuse_grad_buf_for_mxfp8_param_ag": False,
        }
    )
    sections = {
        "model": MODEL,
        "optimizer": {"lr": 1e-3},
        "train": {"micro_batch_size": BATCH, "global_batch_size": BATCH, "train_iters": 1},
    }
    run = ConfigContainer(mixed_precision=kind, emulate="te", target=machine, **sections).resolved()
    from mpbridge.planning.memory.activations import _layer

    counted = _layer(run.policy, run.facts, 0).whole / run.facts.tokens
    with transformer_engine_on_cpu(machine):
        import torch
        from megatron.core.fp8_utils import get_fp8_context

        from mpbridge.backend.engines.parallel import start_process_group
        from mpbridge.backend.engines.registry import build_engine

        start_process_group(True)
        engine = build_engine(run)
        layer = engine.model[0].module.module.decoder.layers[0]
        own = {p.untyped_storage().data_ptr() for p in layer.parameters() if type(p) is torch.nn.Parameter}
        # quantized copies of weights, plain or transposed; 384 tokens are no width of this layer
        weights = {tuple(p.shape) for p in layer.parameters() if p.dim() == 2}
        weights |= {shape[::-1] for shape in weights}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage() if type(tensor) is torch.Tensor else None
            if storage is not None and storage.data_ptr() not in own and tuple(tensor.shape) not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        config = engine.configs.model
        x = torch.randn(SEQUENCE, BATCH, 256, dtype=torch.bfloat16, requires_grad=True)
        context = get_fp8_context(config, 0) if config.fp8 else nullcontext()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
            out = layer(x)
        total = sum(kept.values())
        out.sum().backward()
        engine.close()
    return total / (SEQUENCE * BATCH), counted


def main() -> None:
    """Prints a row per recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--machine", default="b200")
    args = parser.parse_args()
    if len(args.recipes) > 1:
        for recipe in args.recipes:
            subprocess.run([sys.executable, "-W", "ignore", __file__, recipe, "--machine", args.machine], check=True)
        return
    kept, counted = measured(args.recipes[0], args.machine)
    print(f"{args.recipes[0]:40} kept {kept:8.1f}  counted {counted:8.1f} bytes a token")


if __name__ == "__main__":
    main()
