"""Joins tensors of a folder into one parameter, and splits a parameter again; both only move elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpbridge.common.facts import ModelShape
from mpbridge.settings.huggingface.tensors import PartLayout


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
