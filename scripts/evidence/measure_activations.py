"""Bytes a token that autograd keeps for one of megatron-core's layers over Transformer Engine's Python on a CPU, next to what `mpbridge memory` counts.

`python scripts/evidence/measure_activations.py [mamba|experts|latent ...] [--recipe NAME ...] [--machine b200]`; each in a process of its own. Of attention
only inputs and outputs are compared: on a CPU it is not fused, and what it keeps of scores is left out of both.
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

SEQUENCE, BATCH = 320, 3
PLAIN = {
    "hidden_size": 256, "num_attention_heads": 4, "normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "vocab_size": 64, "max_sequence_length": SEQUENCE, "gradient_accumulation_fusion": False,
}  # fmt: skip
EXPERTS = {
    "num_layers": 1, "ffn_hidden_size": 512, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 160, "moe_shared_expert_intermediate_size": 96,
    "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none",
    "gated_linear_unit": True, "activation_func": "silu", "bias_activation_fusion": True,
}  # fmt: skip
LAYERS = {
    "mamba": {
        "hybrid_override_pattern": "M", "mamba_num_heads": 32, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 64, "position_embedding_type": "none",
    },
    "experts": EXPERTS,
    "unfused": EXPERTS | {"bias_activation_fusion": False},
    "recomputed": EXPERTS | {"recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"]},
    "latent": EXPERTS | {
        "multi_latent_attention": True, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 32, "qk_layernorm": True,
    },
}  # fmt: skip
"""Name -> settings of a model of one layer. Its numbers of tokens are no width of the layer."""
RECIPES = ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed")
DATA = ("_data", "_transpose", "_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")
"""Of Transformer Engine's quantized tensors."""


def measured(name: str, recipe: str, machine: str) -> tuple[float, float]:
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
        "model": PLAIN | LAYERS[name],
        "optimizer": {"lr": 1e-3},
        "train": {"micro_batch_size": BATCH, "global_batch_size": BATCH, "train_iters": 1},
    }
    run = ConfigContainer(mixed_precision=kind, emulate="te", target=machine, **sections).resolved()
    from mpbridge.planning.memory.activations import kept as kept_of

    counted = kept_of(run.policy, run.facts, 0, {}).each / run.facts.tokens
    with transformer_engine_on_cpu(machine):
        import torch
        from megatron.core.fp8_utils import get_fp8_context

        from mpbridge.backend.engines.parallel import start_process_group
        from mpbridge.backend.engines.registry import build_engine

        start_process_group(True)
        torch.manual_seed(1)
        engine = build_engine(run)
        layer = engine.model[0].module.module.decoder.layers[0]
        own = {p.untyped_storage().data_ptr() for p in layer.parameters() if type(p) is torch.nn.Parameter}
        # quantized copies of weights, plain or transposed
        weights = {tuple(p.shape) for p in layer.parameters() if p.dim() == 2}
        weights |= {shape[::-1] for shape in weights}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if (
                isinstance(tensor, torch.nn.Parameter)
                or tuple(tensor.shape) in weights
                or tensor.shape[-2:] == (SEQUENCE, SEQUENCE)
            ):
                return tensor
            parts = [getattr(tensor, part, None) for part in DATA] if type(tensor) is not torch.Tensor else [tensor]
            for part in parts:
                if part is not None and part.untyped_storage().data_ptr() not in own:
                    kept[part.untyped_storage().data_ptr()] = part.untyped_storage()
            return tensor

        config = engine.configs.model
        x = torch.randn(SEQUENCE, BATCH, 256, dtype=torch.bfloat16, requires_grad=True)
        context = get_fp8_context(config, 0) if config.fp8 else nullcontext()
        turned = {} if name in ("mamba", "latent") else {"rotary_pos_emb": torch.zeros(SEQUENCE, 1, 1, 64)}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
            out = layer(x, **turned)
        out = out[0] if isinstance(out, tuple) else out
        total = sum(storage.nbytes() for storage in kept.values())  # what is recomputed has given its storage back
        out.sum().backward()
        engine.close()
    return total / (SEQUENCE * BATCH), counted


def main() -> None:
    """Prints a row per layer and recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--recipe", nargs="*", default=RECIPES)
    parser.add_argument("--machine", default="b200")
    args = parser.parse_args()
    pairs = [(layer, recipe) for layer in args.layers for recipe in args.recipe]
    if len(pairs) > 1:
        for layer, recipe in pairs:
            alone = [sys.executable, "-W", "ignore", __file__, layer, "--recipe", recipe, "--machine", args.machine]
            subprocess.run(alone, check=True)
        return
    kept, counted = measured(*pairs[0], args.machine)
    print(f"{pairs[0][0]:10} {pairs[0][1]:40} kept {kept:8.1f}  counted {counted:8.1f} bytes a token")


if __name__ == "__main__":
    main()
