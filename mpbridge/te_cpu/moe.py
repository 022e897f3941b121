"""Mixture of experts: permutation by indices, and padding of expert batches."""

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.te_cpu.played import KERNELS, kernel


# --- padding -------------------------------------------------------------------------------------------------------------------------------
@kernel
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Pads each group of rows with zero rows, or cuts it, to its length in the second list."""
    source = target = 0
    for rows, wanted in zip(input_row_list, padded_input_row_list, strict=True):
        kept = min(rows, wanted)
        output[target : target + kept].copy_(input.detach()[source : source + kept])
        output[target + kept : target + wanted].zero_()
        source, target = source + rows, target + wanted


KERNELS["fused_multi_row_unpadding"] = fused_multi_row_padding


# --- permutation by indices ----------------------------------------------------------------------------------------------------------------
@kernel
def moe_permute_fwd(
    input: torch.Tensor,
    dtype: Any,
    indices: torch.Tensor,
    num_out_tokens: int,
    workspace: Sequence[torch.Tensor],
    max_expanded_token_num: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(rows sorted by expert, map from (choice, token) to its row or -1, workspace)."""
    tokens, choices = indices.shape
    order = torch.argsort(indices.reshape(-1), stable=True)
    count = num_out_tokens if num_out_tokens > 0 else tokens * choices
    places = torch.full((tokens * choices,), -1, dtype=torch.int32)
    kept = order[:count]
    places[(kept % choices) * tokens + kept // choices] = torch.arange(kept.numel(), dtype=torch.int32)
    out = input.detach()[kept // choices]
    return out, places, list(workspace)


def _weighted(rows: torch.Tensor, places: torch.Tensor, prob: torch.Tensor, tokens: int, choices: int) -> torch.Tensor:
    total = torch.zeros(tokens, rows.shape[1])
    for choice in range(choices):
        at = places[choice * tokens : (choice + 1) * tokens].long()
        part = rows[at.clamp_min(0)].float() * (at >= 0).unsqueeze(1)
        total += part * prob[:, choice : choice + 1].float() if prob.numel() else part
    return total.to(rows.dtype)


@kernel
def moe_unpermute_fwd(
    input: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor, num_tokens: int, topK: int
) -> torch.Tensor:
    """Every token's rows summed in FP32, weighted if probabilities are given."""
    return _weighted(input.detach(), row_id_map, prob.detach(), num_tokens, topK)


KERNELS["moe_permute_bwd"] = moe_unpermute_fwd


@kernel
def moe_unpermute_bwd(
    input_bwd: torch.Tensor, input_fwd: torch.Tensor, dtype: Any, row_id_map: torch.Tensor, prob: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the rows, gradient of the probabilities)."""
    choices = prob.shape[1] if prob.numel() else 1
    tokens = prob.shape[0] if prob.numel() else row_id_map.shape[0]
    rows = torch.zeros(input_fwd.shape[0], input_bwd.shape[1])
    prob_grad = torch.zeros(tokens, choices)
    grad, source = input_bwd.detach().float(), input_fwd.detach().float()
    for choice in range(choices):
        at = row_id_map[choice * tokens : (choice + 1) * tokens].long()
        there = at >= 0
        weight = prob.detach()[there, choice : choice + 1].float() if prob.numel() else 1.0
        rows[at[there]] = grad[there] * weight
        prob_grad[there, choice] = (grad[there] * source[at[there]]).sum(1)
    return rows.to(input_bwd.dtype), prob_grad
