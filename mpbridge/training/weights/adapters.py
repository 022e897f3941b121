"""Low-rank adapters in peft's two files, under the names of the base in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpbridge.common.errors import Refused
from mpbridge.common.files import ProgressCallback
from mpbridge.planning.memory.keeps import is_frozen
from mpbridge.precision.globs import is_adapter, matches, place
from mpbridge.settings.huggingface.folder import FolderTensor
from mpbridge.settings.huggingface.tensors import Mapped, adapters
from mpbridge.training.weights.shards import Shards
from mpbridge.training.weights.source import SPELLING, apart

if TYPE_CHECKING:
    from mpbridge.training.weights.export import Export, Given

ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""peft's files."""
_UNLOADED = ("mamba2", "nemotron_h"), "mixer.out_proj"
"""Families and the linear whose adapters peft refuses to load (0.21 tuners_utils.py _check_lora_target_modules_mamba): Mamba's fused kernel takes its weight, not its module."""


def scale_of(export: Export) -> float:
    """alpha / rank, by which an adapter's product is multiplied."""
    alpha = export.run.inputs["model"].get("lora_alpha")
    return 1.0 if alpha is None else float(alpha) / export.run.facts.shape.lora_rank


def targets(export: Export) -> Iterator[Mapped]:
    """The parameters with an adapter beside them."""
    for one in export.wanted:
        where = place(one.name.removesuffix(".weight"))
        if one.linear and where and any(matches(glob, where[0]) for glob in export.shape.lora_targets):
            yield one


def matrices(export: Export, one: Mapped) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of that parameter's adapter, as stored or as their main weights. Raises CheckpointError."""
    inner, out = (export.read(matrix) for matrix in adapters(one, export.shape.lora_rank))
    return inner, out


def write_alone(export: Export, folder: Path, like: Path | None, told: ProgressCallback, given: Given) -> Given:
    """Writes peft's files: parts of a fused linear have the same A and their own rows of B. Raises Refused for adapters that peft does not load, and for a base that trained too."""
    _refuse(export)
    made = {one.name: dict(_parts(export, one)) for one in targets(export)}
    plan = {
        name: FolderTensor(ADAPTER, SPELLING[tensor.dtype], tuple(tensor.shape))
        for parts in made.values()
        for name, tensor in parts.items()
    }
    with Shards(folder, plan, export.identity(plan), told) as shards:
        for parts in made.values():
            for name, tensor in parts.items():
                shards.put(name, tensor)
                kind = str(tensor.dtype).removeprefix("torch.")
                given.dtypes[kind] = given.dtypes.get(kind, 0) + tensor.numel()
        (folder / CONFIG).write_text(json.dumps(_config(export, like), indent=2) + "\n", encoding="utf-8")
    given.tensors, given.elements = len(plan), sum(given.dtypes.values())
    given.notes += [f"{CONFIG} names no base: --like hf:DIR does"] if like is None else []
    return given


def _parts(export: Export, one: Mapped) -> Iterator[tuple[str, torch.Tensor]]:
    inner, out = matrices(export, one)
    for (name, _), rows in zip(one.parts, apart(out, one.layout, export.shape), strict=True):
        stem = f"base_model.model.{name.removesuffix('weight')}"
        for letter, matrix in (("A", inner), ("B", rows)):
            dtype = getattr(torch, export.dtype) if export.dtype else matrix.dtype
            yield f"{stem}lora_{letter}.weight", matrix.to(dtype).contiguous()


def _refuse(export: Export) -> None:
    families, linear = _UNLOADED
    names = [one.name for one in targets(export) if one.name.endswith(f"{linear}.weight")]
    if names and export.family.name in families:
        raise Refused(
            f"--adapters alone: peft loads no adapter of {linear} ({len(names)} of them): Mamba's kernel takes that linear's weight, not its module: "
            "merge them, or train with model.lora_targets without it"
        )
    policy = export.run.policy
    trained = [one.name for one in export.wanted if not (is_frozen(policy, one.name) or is_adapter(one.name))]
    if trained:
        raise Refused(
            f"--adapters alone: the base trained too ({trained[0]} and {len(trained) - 1} more parameters), so these adapters do not fit the base that the run began with: "
            "merge them, or train with mixed_precision.frozen=['*']"
        )


def _config(export: Export, like: Path | None) -> dict[str, Any]:
    rank, alpha = export.shape.lora_rank, export.run.inputs["model"].get("lora_alpha")
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None if like is None else str(like), "r": rank,
        "lora_alpha": rank if alpha is None else alpha, "target_modules": _modules(export), "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "init_lora_weights": True, "inference_mode": True, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False, "use_dora": False,
    }  # fmt: skip


def _modules(export: Export) -> list[str]:
    """The shortest ends of names that mean the linears with adapters and no other."""
    linears = [name.removesuffix(".weight") for one in export.wanted if one.linear for name, _ in one.parts]
    wanted = {name.removesuffix(".weight") for one in targets(export) for name, _ in one.parts}
    found = set()
    for name in wanted:
        words = name.split(".")
        ends = (".".join(words[at:]) for at in range(len(words) - 1, 0, -1))
        found.add(next((e for e in ends if all(x in wanted for x in linears if x.endswith(f".{e}"))), name))
    return sorted(found)
