"""A small Llama whose heads fit every served format, as a checkpoint, and readers of served folders by the formats' definitions."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mpbridge.common.files import lock
from mpbridge.training.checkpoint.store import locate
from mpbridge.training.serving import files
from mpbridge.training.serving.convert import opened, to_checkpoint, to_folder
from tests.training import survival
from tests.training.serving import folders

CONFIG = folders.LLAMA | {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 320,
}  # fmt: skip
SIZES = {
    "input_layernorm.weight": (256,), "self_attn.q_proj.weight": (256, 256), "self_attn.k_proj.weight": (256, 256), "self_attn.v_proj.weight": (256, 256),
    "self_attn.o_proj.weight": (256, 256), "post_attention_layernorm.weight": (256,), "mlp.gate_proj.weight": (384, 256), "mlp.up_proj.weight": (384, 256),
    "mlp.down_proj.weight": (256, 384),
}  # fmt: skip
RECIPES = {
    "tensorwise": "bf16_with_fp8_current_scaling_mixed", "rowwise": "bf16_with_fp8_rowwise",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed", "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}  # fmt: skip
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


_MADE: dict[tuple[Path, str], Path] = {}


def checkpoints(root: Path, model: str) -> Path:
    """A checkpoint of one of the models, made once: the Llama, the same with heads of 64 rows, a mixture of experts, and a run that has FP32 main weights."""
    place = root / model.replace(" ", "_")
    if (place, model) not in _MADE:
        place.mkdir()
        made = {"llama": checkpoint, "heads of 64": _small_heads, "qwen3": _mixture, "trained": _trained}[model]
        _MADE[place, model] = made(place)
    return _MADE[place, model]


def _small_heads(root: Path) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    place = folders.write(root / "bf16", CONFIG | heads, weights())
    return to_checkpoint(place, root / "run", folders.run_of(place)).path


def _mixture(root: Path) -> Path:
    from tests.training.serving.test_mixtures import QWEN3, checkpoint

    return checkpoint(QWEN3, root)


def _trained(root: Path) -> Path:
    save = {"save": str(root / "run"), "save_interval": 1}
    how: dict[str, Any] = {"optimizer": {"lr": 1e-2}, "scheduler": {"lr_warmup_iters": 0}, "model": survival.LLAMA}
    survival.go(survival.run(RECIPES["mxfp8"], emulate=True, iters=1, checkpoint=save, **how))
    _MAIN.append(locate(root / "run"))
    return _MAIN[0]


_MAIN: list[Path] = []


def main_weight() -> torch.Tensor:
    """The FP32 main weight of the trained run's first down projection."""
    with opened(_MAIN[-1]) as export:
        (one,) = (one for one in export.wanted if one.name == "decoder.layers.0.mlp.linear_fc2.weight")
        found = export.found(one, main=True)
        assert found is not None
        return found


def recipe_of(root: Path, scaling: str) -> str:
    """The recipe of a scaling; of 'fp32 blocks', a file."""
    if scaling in RECIPES:
        return RECIPES[scaling]
    file = root / "fp32_blocks.yaml"
    file.write_text(f"extends: {RECIPES['blockwise']}\nfp8_options: {{power_of_two: false}}\n")
    return str(file)


def serve(path: Path, target: Path, method: str, recipe: str | None = None) -> Path:
    """A served folder of that checkpoint."""
    return to_folder(path, target, method=method, recipe=recipe).path


_FOLDERS: dict[tuple[Path, str, str], tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}


def served(path: Path, method: str, recipe: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and config of a served folder."""
    if (path, method, recipe) not in _FOLDERS:
        folder = serve(path, path.parent / f"{len(_FOLDERS)}", method, recipe)
        config = json.loads((folder / "config.json").read_text())
        _FOLDERS[path, method, recipe] = load_file(folder / "model.safetensors"), config
    held, config = _FOLDERS[path, method, recipe]
    return {name: tensor.clone() for name, tensor in held.items()}, json.loads(json.dumps(config))


def put(folder: Path, held: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(held, folder / "model.safetensors")


def after(count: int, number: int) -> Callable[[int, int], None]:
    """For `told`: sends this process a signal at the count-th tensor."""
    left = [count]

    def told(done: int, total: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)

    return told


def convert_and_stop(path: Path, target: Path, method: str, recipe: str, file_bytes: int) -> None:
    """In a process of its own: a conversion that is killed at its 22nd tensor."""
    files.FILE_BYTES = file_bytes
    to_folder(path, target, method=method, recipe=recipe, told=after(22, signal.SIGKILL))


def hold(file: Path) -> None:
    """In a process of its own: holds a lock until the process ends."""
    with lock(file, wait=False):
        print("held", flush=True)
        signal.pause()


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
            factor = 1.0 if second is None else second
            found[module] = values(codes, scale, factor if divisor is None else 1.0 / divisor)
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
