"""A folder's tensors one by one, each read on demand, block-wise FP8 widened; how several are joined into one parameter, and a parameter is split again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mpbridge.common.errors import BadValue, Contradiction
from mpbridge.common.facts import ModelShape
from mpbridge.common.shipped import install
from mpbridge.settings.huggingface.folder import FolderTensor
from mpbridge.settings.huggingface.tensors import Mapped, PartLayout

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""dtype in safetensors' spelling -> torch's, for weights that need no conversion."""
FP8 = "F8_E4M3"
SPELLED: Mapping[str, torch.dtype] = {**DTYPES, "U8": torch.uint8, FP8: torch.float8_e4m3fn}
"""The same, of every tensor that is written."""
SPELLING: Mapping[torch.dtype, str] = {dtype: name for name, dtype in SPELLED.items()}
SCALE = "_scale_inv"
"""Suffix of an FP8 weight's name that gives the name of its block scales."""
_NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Suffixes of buffers that old folders contain and every program recomputes."""
MOST = 10
"""Maximum number of tensors of a kind that a message lists."""


def library() -> Any:
    """The module safetensors. Raises BadValue that names the extra if it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise BadValue(f"weights in Hugging Face's layout need the package safetensors: {install('hf')}") from None
    return safetensors


class FolderReader(ExitStack):
    """The tensors of a folder; a context manager that closes its files."""

    def __init__(self, folder: Path, held: Mapping[str, FolderTensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.folder, self.held, self.config = folder, held, config
        quantization = config.get("quantization_config") or {}
        self.block = tuple(quantization.get("weight_block_size") or (128, 128))
        self.dtype = config_dtype(config)
        self._open: dict[str, Any] = {}

    def is_quantized(self, name: str) -> bool:
        """Whether the tensor is stored in FP8 with a scale per block."""
        return self.held[name].dtype == FP8

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that `tensor` returns: FP8 becomes the model's dtype in config.json."""
        return self.dtype if self.is_quantized(name) else DTYPES[self.held[name].dtype]

    def tensor(self, name: str, *, wide: bool = False) -> torch.Tensor:
        """The tensor on the CPU. wide: block-wise FP8 as FP32, not yet rounded."""
        raw = self.raw(name)
        if not self.is_quantized(name):
            return raw
        values = widened(raw, self.raw(name + SCALE), (self.block[0], self.block[1]))
        return values if wide else values.to(self.dtype)

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as stored. Raises BadValue for a file that the library refuses: bytes that no tensor covers, or two."""
        file = self.held[name].file
        if file not in self._open:
            try:
                found = library().safe_open(self.folder / file, framework="pt")
            except library().SafetensorError as error:
                raise BadValue(f"{self.folder / file} cannot be read: {error}") from None
            self._open[file] = self.enter_context(found)
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor


def config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that config.json gives its model; BF16 if it gives none."""
    said = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return {"float32": torch.float32, "float16": torch.float16}.get(str(said), torch.bfloat16)


def check(
    held: Mapping[str, FolderTensor], wanted: Sequence[Mapped], copied: Mapping[str, str], block: Sequence[int]
) -> None:
    """Raises Contradiction with every tensor that is missing, has another shape or dtype than in the model of config.json, or is not part of it."""
    shapes = {name: shape for one in wanted for name, shape in one.parts}
    known = shapes | {name: shapes[original] for name, original in copied.items()}
    faults = _several("missing", [name for name in shapes if name not in held])
    faults += _several("not part of the model that config.json describes", list(_strangers(held, known)))
    for name, stored in held.items():
        if name in known and stored.shape != known[name]:
            faults.append(f"{name} is {list(stored.shape)}, expected {list(known[name])} by config.json")
        if name in known and stored.dtype not in DTYPES and stored.dtype != FP8:
            faults.append(f"{name} is {stored.dtype}, expected one of {', '.join((*DTYPES, FP8))}")
        if name in known and stored.dtype == FP8:
            faults += _scale_faults(name, stored, held.get(name + SCALE), block)
    if faults:
        more = [f"and {len(faults) - MOST} more"] if len(faults) > MOST else []
        raise Contradiction([*faults[:MOST], *more], subject="the weights do not match config.json's model")


def _strangers(held: Mapping[str, FolderTensor], known: Mapping[str, Any]) -> list[str]:
    scales = {name + SCALE for name, stored in held.items() if stored.dtype == FP8}
    return sorted(name for name in held if name not in known and name not in scales and not name.endswith(_NO_WEIGHTS))


def _scale_faults(name: str, stored: FolderTensor, scale: FolderTensor | None, block: Sequence[int]) -> list[str]:
    if scale is None:
        return [f"{name} is FP8, but {name}{SCALE} is missing"]
    if len(stored.shape) != 2:
        return [f"{name} is FP8, but has {len(stored.shape)} axes, expected 2"]
    blocks = tuple(-(-side // length) for side, length in zip(stored.shape, block, strict=True))
    if scale.shape != blocks:
        return [f"{name}{SCALE} is {list(scale.shape)}, expected {list(blocks)} for blocks of {list(block)}"]
    return []


def _several(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return [f"{what}: {', '.join(names[:MOST])}{more}"]


def joined(parts: Sequence[torch.Tensor], layout: PartLayout, shape: ModelShape) -> torch.Tensor:
    """The parameter made of `parts`.

    qkv: for each query group the rows of its queries, then of its key, then of its value, as in megatron-core's linear_qkv.
    stacked: the gate's rows above the others, as in megatron-core's gated linear_fc1.
    """
    if layout == "whole":
        return parts[0]
    if layout == "stacked":
        return torch.cat(list(parts))
    groups = shape.num_query_groups
    return torch.cat([_grouped(part, groups) for part in parts], dim=1).flatten(0, 1)


def apart(parameter: torch.Tensor, layout: PartLayout, shape: ModelShape) -> list[torch.Tensor]:
    """The inverse of `joined`: the parts."""
    if layout == "whole":
        return [parameter]
    if layout == "stacked":
        return list(parameter.chunk(2))
    keys = shape.kv_channels
    queries = shape.num_attention_heads // shape.num_query_groups * keys
    grouped = _grouped(parameter, shape.num_query_groups)
    return [part.flatten(0, 1) for part in torch.split(grouped, [queries, keys, keys], dim=1)]


def _grouped(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """[groups, rows of a group, ...]"""
    return tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])


def widened(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """FP32 values of block-wise FP8: each code times its block's scale. codes: [rows, columns]; scales: one per block; the last blocks may be partial."""
    rows, columns = codes.shape
    tall = scales.float().repeat_interleave(block[0], 0)[:rows]
    return codes.float() * tall.repeat_interleave(block[1], 1)[:, :columns]
