"""A small Llama whose heads fit every served format, as a checkpoint, and readers of served folders by the formats' definitions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mpbridge.training.serving.document import Served
from mpbridge.training.weights.to_checkpoint import to_checkpoint
from mpbridge.training.weights.to_folder import to_folder
from tests.training.weights import folders

CONFIG = folders.LLAMA | {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 320,
}  # fmt: skip
SIZES = {
    "input_layernorm.weight": (256,), "self_attn.q_proj.weight": (256, 256), "self_attn.k_proj.weight": (256, 256), "self_attn.v_proj.weight": (256, 256),
    "self_attn.o_proj.weight": (256, 256), "post_attention_layernorm.weight": (256,), "mlp.gate_proj.weight": (384, 256), "mlp.up_proj.weight": (384, 256),
    "mlp.down_proj.weight": (256, 384),
}  # fmt: skip
RECIPES = {
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "rowwise": "bf16_with_fp8_rowwise",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
PARTS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
"""A linear of training -> the folder's."""


def weights() -> dict[str, torch.Tensor]:
    """Half of them with heavy tails, where rules differ most."""
    random = torch.Generator().manual_seed(7)  # amaxes whose quotient by 448 and its reciprocal differ
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (320, 256),
        "model.norm.weight": (256,),
        "lm_head.weight": (320, 256),
    }
    sizes |= {f"model.layers.{layer}.{name}": size for layer in range(3) for name, size in SIZES.items()}
    made = {}
    for number, (name, size) in enumerate(sizes.items()):
        value = torch.randn(size, generator=random) * 0.05
        made[name] = (value * (1 + value.abs() * 40 * (number % 2)) + (len(size) == 1)).bfloat16()
    return made


def apart(module: str, rows: torch.Tensor) -> list[torch.Tensor]:
    """The rows of a linear of training, by the folder's linears: queries, key and value of each of two groups follow one another."""
    if module != "self_attention.linear_qkv":
        return list(rows.chunk(len(PARTS[module])))
    q0, k0, v0, q1, k1, v1 = rows.chunk(6)
    return [torch.cat(pair) for pair in ((q0, q1), (k0, k1), (v0, v1))]


def checkpoint(root: Path, *overrides: str) -> Path:
    """The weights as a checkpoint."""
    place = folders.write(root / "bf16", CONFIG, weights())
    return to_checkpoint(place, root / "run", folders.run_of(place, *overrides)).path


def serve(path: Path, target: Path, method: str, recipe: str | None = None) -> Path:
    """A served folder of that checkpoint."""
    return to_folder(path, target, casting=partial(Served.of, method=method, recipe=recipe)).path


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    """Module -> FP32 values of every quantized linear."""
    held: dict[str, Any] = load_file(folder / "model.safetensors")
    found = {}
    for name, codes in held.items():
        module, _, last = name.rpartition(".")
        scale = held.get(f"{module}.weight_scale", held.get(f"{module}.weight_scale_inv"))
        if last in ("weight", "weight_packed") and scale is not None:
            second = held.get(f"{module}.weight_scale_2")
            divisor = held.get(f"{module}.weight_global_scale")
            found[module] = values(
                codes,
                scale,
                1.0 if second is None and divisor is None else second if divisor is None else 1.0 / divisor,
            )
    return found


def values(codes: torch.Tensor, scale: torch.Tensor, second: Any) -> torch.Tensor:
    if codes.dtype is torch.uint8:
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
        wide = grid[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    else:
        wide = codes.float()
    scale = torch.exp2(scale.float() - 127) if scale.dtype is torch.uint8 else scale.float()
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0]
    scale = scale.reshape(scale.shape[0], -1)
    rows, columns = wide.shape
    scale = scale.repeat_interleave(rows // scale.shape[0], 0).repeat_interleave(columns // scale.shape[1], 1)
    return wide * (scale * second)
