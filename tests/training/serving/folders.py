"""Small folders in Hugging Face's layout with random weights, made without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from mpbridge.settings.container import ConfigContainer, Run
from mpbridge.training.serving.convert import Taken, to_checkpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES = {
    "input_layernorm.weight": (64,), "self_attn.q_proj.weight": (64, 64), "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64), "self_attn.o_proj.weight": (64, 64), "post_attention_layernorm.weight": (64,),
    "mlp.gate_proj.weight": (96, 64), "mlp.up_proj.weight": (96, 64), "mlp.down_proj.weight": (64, 96),
}  # fmt: skip


def llama_tensors(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = {"model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,)}
    sizes |= {} if tied else {"lm_head.weight": (128, 64)}
    sizes |= {f"model.layers.{layer}.{name}": size for layer in range(2) for name, size in SIZES.items()}
    made = {name: torch.randn(size, generator=generator) * 0.05 for name, size in sizes.items()}
    # norms near 1, as trained ones are
    return {name: (tensor + (tensor.ndim == 1)).to(dtype) for name, tensor in made.items()}


def write(path: Path, config: Mapping[str, Any], *shards: Mapping[str, torch.Tensor]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(dict(shards[0]), path / "model.safetensors")
        return path
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(dict(shard), path / name)
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


def run_of(folder: Path, *overrides: str) -> Run:
    return ConfigContainer.load(f"hf:{folder}", overrides).resolved(training=False)


def convert(folder: Path, target: Path) -> Taken:
    return to_checkpoint(folder, target, run_of(folder))


def load(engine: Any, path: Path) -> None:
    """The weights of a checkpoint into an engine, as a run without optimizer states takes them."""
    from mpbridge.training.checkpoint.io import load

    load(SimpleNamespace(run=engine.run, engine=engine), path, weights_alone=True)  # type: ignore[arg-type]
