"""Mixture of experts: permutation by indices, padding of expert batches, and the router's fused functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpbridge.te_cpu.registry import KERNELS, argument_lists, kernel

_EPSILON = 1e-20
"""Added to the sum of sigmoid scores (common/fused_router/utils.h)."""


# --- padding -------------------------------------------------------------------------------------------------------------------------------
@kernel
def fused_multi_row_padding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Groups of rows, each filled up with zero rows."""
    source = target = 0
    for rows, padded in zip(input_row_list, padded_input_row_list, strict=True):
        output[target : target + rows].copy_(input.detach()[source : source + rows])
        output[target + rows : target + padded].zero_()
        source, target = source + rows, target + padded


@kernel
def fused_multi_row_unpadding(
    input: torch.Tensor, output: torch.Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Groups of rows, each cut to its own length."""
    source = target = 0
    for rows, kept in zip(input_row_list, unpadded_input_row_list, strict=True):
        output[target : target + kept].copy_(input.detach()[source : source + kept])
        source, target = source + rows, target + kept


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
    """Every token's rows summed in FP32, weighted where there are probabilities."""
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


# --- router --------------------------------------------------------------------------------------------------------------------------------
def _scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }[function](logits)  # type: ignore[no-untyped-call]


def _slope(value: torch.Tensor, function: str) -> torch.Tensor:
    """Derivative of an elementwise score from its stored value: of the sigmoid, or of sqrt(softplus), whose logit is stored."""
    if function == "sigmoid":
        return value * (1 - value)
    return torch.sigmoid(value) / (2 * torch.nn.functional.softplus(value).sqrt())


def _chosen(scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None) -> torch.Tensor:
    """Indices [tokens, topk] of the highest scores, those of the best groups only where experts are grouped."""
    if groups and group_topk:
        grouped = scores.view(scores.shape[0], groups, -1)
        best = grouped.topk(topk // group_topk, -1).values.sum(-1).topk(group_topk, -1).indices
        allowed = torch.zeros(scores.shape[0], groups, dtype=torch.bool).scatter_(1, best, True)
        scores = scores.masked_fill(~allowed.unsqueeze(-1).expand_as(grouped).reshape(scores.shape), float("-inf"))
    return scores.topk(topk, -1).indices


@kernel
def fused_topk_with_score_function_fwd(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: int = 0,
    topk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(probabilities, routing map, what the backward pass needs), each [tokens, experts]."""
    if routing_map_format:
        raise RuntimeError(
            "a routing map in bits (NVTE_ROUTING_MAP_FORMAT_BITMAP_U8) has no CPU kernel: use the byte map"
        )
    x = logits.detach().float()
    soft = score_function == "softmax"
    scores = x if soft and not use_pre_softmax else _scores(x, score_function)
    ranked = scores if expert_bias is None or soft else scores + expert_bias.detach().float()
    chosen = _chosen(ranked, topk, num_groups, group_topk)
    picked = scores.gather(1, chosen)
    kept = scores if not soft or use_pre_softmax else None
    if soft and not use_pre_softmax:
        picked = torch.softmax(picked, -1)
        kept = torch.full_like(x, float("-inf")).scatter(1, chosen, picked)
    elif not soft and topk > 1:
        picked = picked / (picked.sum(-1, keepdim=True) + _EPSILON)
    if score_function == "sqrtsoftplus":
        kept = x
    if topk_indices is not None:
        topk_indices.copy_(chosen)
    assert kept is not None  # every score function stores something
    routing = torch.zeros(x.shape, dtype=torch.bool).scatter_(1, chosen, True)
    probs = torch.zeros_like(x).scatter(1, chosen, picked * (scaling_factor or 1.0))
    # logits' dtype: FP32 is kept for later releases, which store FP32 whatever the logits are
    return probs.to(logits.dtype), routing, kept.to(logits.dtype if _stores_in_logits_dtype() else torch.float32)


def _stores_in_logits_dtype() -> bool:
    from mpbridge.te_cpu.played import now

    return now().release < (2, 13)


def _topk_backward(
    routing_map: torch.Tensor,
    intermediate_output: torch.Tensor,
    grad_probs: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    grad_logits: torch.Tensor | None = None,
    use_dense_indices: bool = False,
    routing_map_format: int = 0,
    num_tokens: int = 0,
    num_experts: int = 0,
) -> torch.Tensor:
    """Gradient of the logits, also written into `grad_logits` where given."""
    stored = intermediate_output.detach().float()
    routed = (
        routing_map.bool().view(stored.shape)
        if not use_dense_indices
        else torch.zeros_like(stored, dtype=torch.bool).scatter_(1, routing_map.long(), True)
    )
    grad = torch.where(routed, grad_probs.detach().float().view(stored.shape) * (scaling_factor or 1.0), 0.0)
    if score_function == "softmax":
        prob = stored if use_pre_softmax else torch.where(routed, stored, 0.0)
        found = prob * (grad - (grad * prob).sum(-1, keepdim=True))
    else:
        score = torch.nn.functional.softplus(stored).sqrt() if score_function == "sqrtsoftplus" else stored
        if topk > 1:
            total = torch.where(routed, score, 0.0).sum(-1, keepdim=True) + _EPSILON
            grad = torch.where(routed, grad / total - (grad * score).sum(-1, keepdim=True) / total.square(), 0.0)
        found = grad * _slope(stored, score_function)
    found = found.to(grad_probs.dtype)
    if grad_logits is not None:
        grad_logits.copy_(found.view(grad_logits.shape))
    return found


_tail = ("topk", "use_pre_softmax", "scaling_factor", "score_function")
_body = ("routing_map", "intermediate_output", "grad_probs")
KERNELS["fused_topk_with_score_function_bwd"] = argument_lists(
    _topk_backward,
    since_2_9=("num_tokens", "num_experts", *_body, *_tail),
    since_2_13=("num_tokens", "num_experts", *_body, "grad_logits", *_tail),
    since_2_17=(*_body, "grad_logits", *_tail, "routing_map_format"),
    since_2_18=(*_body, "grad_logits", *_tail, "use_dense_indices", "routing_map_format"),
)


@kernel
def fused_score_for_moe_aux_loss_fwd(
    logits: torch.Tensor, topk: int, score_function: str, routing_map_format: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normalized scores, routing map, what the backward pass needs)."""
    x = logits.detach().float()
    scores = _scores(x, score_function)
    kept = x if score_function == "sqrtsoftplus" else scores
    if score_function != "softmax" and (topk > 1 or not _stores_in_logits_dtype()):
        scores = scores / (scores.sum(-1, keepdim=True) + _EPSILON)
    routing = torch.zeros(x.shape, dtype=torch.bool).scatter_(1, scores.topk(topk, -1).indices, True)
    old = _stores_in_logits_dtype()
    return scores.to(logits.dtype if old else torch.float32), routing, kept.to(logits.dtype if old else torch.float32)


def _score_backward(
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    topk: int,
    score_function: str,
    grad_logits: torch.Tensor | None = None,
    num_tokens: int = 0,
    num_experts: int = 0,
) -> torch.Tensor:
    """Gradient of the logits, also written into `grad_logits` where given."""
    stored, grad = intermediate_output.detach().float(), grad_scores.detach().float().view(intermediate_output.shape)
    if score_function == "softmax":
        found = stored * (grad - (grad * stored).sum(-1, keepdim=True))
    else:
        score = torch.nn.functional.softplus(stored).sqrt() if score_function == "sqrtsoftplus" else stored
        if topk > 1 or not _stores_in_logits_dtype():
            total = score.sum(-1, keepdim=True) + _EPSILON
            grad = grad / total - (grad * score).sum(-1, keepdim=True) / total.square()
        found = grad * _slope(stored, score_function)
    if grad_logits is not None:
        grad_logits.copy_(found.to(grad_logits.dtype).view(grad_logits.shape))
    return found.to(grad_scores.dtype)


KERNELS["fused_score_for_moe_aux_loss_bwd"] = argument_lists(
    _score_backward,
    since_2_9=("num_tokens", "num_experts", "intermediate_output", "grad_scores", "topk", "score_function"),
    since_2_13=(
        "num_tokens",
        "num_experts",
        "intermediate_output",
        "grad_scores",
        "grad_logits",
        "topk",
        "score_function",
    ),
    since_2_17=("intermediate_output", "grad_scores", "grad_logits", "topk", "score_function"),
)


@kernel
def fused_moe_aux_loss_fwd(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: Any,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(load-balancing loss, its constant for the backward pass)."""
    constant = float(num_experts) * coeff / topk / float(total_num_tokens) / float(total_num_tokens)
    loss = (probs.detach().double().sum(0) * tokens_per_expert.double()).sum() * constant
    return loss.to(probs.dtype), torch.tensor(constant, dtype=torch.float32)


KERNELS["fused_moe_aux_loss_fwd_graph_safe"] = fused_moe_aux_loss_fwd


@kernel
def fused_moe_aux_loss_bwd(
    Const_buf: torch.Tensor, tokens_per_expert: torch.Tensor, num_rows: int, num_cols: int, grad_aux_loss: torch.Tensor
) -> torch.Tensor:
    """Gradient of the probabilities, [rows, columns]."""
    row = tokens_per_expert.double() * float(Const_buf) * grad_aux_loss.double()
    return row.to(grad_aux_loss.dtype).reshape(1, num_cols).expand(num_rows, num_cols).contiguous()
