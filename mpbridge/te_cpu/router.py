"""The router's fused functions: scores, the experts of each token, and load balancing by a loss or by quantiles."""

import math
from typing import Any

import torch

from mpbridge.te_cpu.played import KERNELS, argument_lists, kernel, now

_EPSILON = 1e-20
"""Added to the sum of sigmoid scores (common/fused_router/utils.h)."""


def _scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    return {
        "softmax": lambda x: torch.softmax(x, -1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }[function](logits)  # type: ignore[no-untyped-call]


def _behind(
    stored: torch.Tensor, grad: torch.Tensor, function: str, divided: bool, routed: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of the logits of elementwise scores, from what is stored: the sigmoid itself, or the logit of sqrt(softplus).

    divided: the scores were divided by their sum, over those that are `routed` (None: over all).
    """
    score = stored if function == "sigmoid" else torch.nn.functional.softplus(stored).sqrt()
    if divided:
        total = (score if routed is None else torch.where(routed, score, 0.0)).sum(-1, keepdim=True) + _EPSILON
        grad = grad / total - (grad * score).sum(-1, keepdim=True) / total.square()
        grad = grad if routed is None else torch.where(routed, grad, 0.0)
    return grad * (stored * (1 - stored) if function == "sigmoid" else torch.sigmoid(stored) / (2 * score))


def _in_bits(routing: torch.Tensor) -> torch.Tensor:
    """[tokens, ceil(experts / 8)] uint8: bit e % 8 of byte e // 8 belongs to expert e."""
    padded = torch.nn.functional.pad(routing.to(torch.uint8), (0, -routing.shape[1] % 8))
    return (padded.view(routing.shape[0], -1, 8) << _BITS).sum(-1, dtype=torch.uint8)


def _from_bits(packed: torch.Tensor, experts: int) -> torch.Tensor:
    """The inverse of `_in_bits`."""
    return (packed.unsqueeze(-1) >> _BITS & 1).flatten(1)[:, :experts].bool()


_BITS = torch.arange(8, dtype=torch.uint8)


def _routing(
    chosen: torch.Tensor, shape: torch.Size, routing_map_format: int, topk_indices: torch.Tensor | None = None
) -> torch.Tensor:
    """The chosen experts in the requested form: written into dense indices, or as a map of bytes or bits, with the logits' leading dimensions."""
    if topk_indices is not None:
        topk_indices.copy_(chosen.view(topk_indices.shape))
        return topk_indices
    routing = torch.zeros(chosen.shape[0], shape[-1], dtype=torch.bool).scatter_(1, chosen, True)
    return (_in_bits(routing) if routing_map_format else routing).view(*shape[:-1], -1)


def _probabilities(picked: torch.Tensor, topk: int) -> torch.Tensor:
    """Non-softmax scores of the chosen experts, divided by their sum."""
    return picked / (picked.sum(-1, keepdim=True) + _EPSILON) if topk > 1 else picked


def _chosen(scores: torch.Tensor, topk: int, groups: int | None, group_topk: int | None) -> torch.Tensor:
    """Indices [tokens, topk] of the highest scores, from the best groups only if experts are grouped."""
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
    """(probabilities [..., experts], routing map in bytes, in bits or as indices, what the backward pass needs [..., experts])."""
    x = logits.detach().float().reshape(-1, logits.shape[-1])
    soft = score_function == "softmax"
    scores = x if soft and not use_pre_softmax else _scores(x, score_function)
    ranked = scores if expert_bias is None or soft else scores + expert_bias.detach().float()
    chosen = _chosen(ranked, topk, num_groups, group_topk)
    picked = scores.gather(1, chosen)
    kept = scores if not soft or use_pre_softmax else None
    if soft and not use_pre_softmax:
        picked = torch.softmax(picked, -1)
        kept = torch.full_like(x, float("-inf")).scatter(1, chosen, picked)
    elif not soft:
        picked = _probabilities(picked, topk)
    if score_function == "sqrtsoftplus":
        kept = x
    assert kept is not None  # every score function stores something
    routing = _routing(chosen, logits.shape, routing_map_format, topk_indices)
    probs = torch.zeros_like(x).scatter(1, chosen, picked * (1.0 if scaling_factor is None else scaling_factor))
    # early releases store the logits' dtype, later ones FP32 regardless of the logits
    kept = kept.to(logits.dtype if _stores_in_logits_dtype() else torch.float32)
    return probs.to(logits.dtype).view(logits.shape), routing, kept.view(logits.shape)


def _stores_in_logits_dtype() -> bool:
    return now().release < (2, 13)


@kernel
def fused_topk_with_score_function_qb_fwd(
    logits: torch.Tensor,
    topk: int,
    scaling_factor: float | None,
    expert_bias: torch.Tensor,
    routing_map_format: int,
    topk_indices: torch.Tensor | None,
    histogram: torch.Tensor,
    bin_bounds: torch.Tensor,
    histogram_mode: int,
    bin_bounds_validated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sigmoid routing balanced by quantiles: (probabilities, routing, sigmoids [..., experts], cutoffs [tokens], the histogram).

    A token's cutoff is its (topk + 1)-th highest biased score; in a tie the expert with the highest index is not chosen. `histogram`
    [experts, bins] counts in place, in uniform bins, what each expert's bias must be for its score to reach the cutoff; both of the
    GPU's counting modes give the same result. Source: common/fused_router/fused_topk_with_score_function.cu. Raises RuntimeError, as the
    extension does.
    """
    experts = logits.shape[-1]
    if not 0 < topk < experts:
        raise RuntimeError(f"QB topk must be in [1, num_experts), got topk={topk} num_experts={experts}")
    lower, upper = bin_bounds.tolist()
    if not (bin_bounds_validated or (math.isfinite(lower) and math.isfinite(upper) and lower < upper)):
        raise RuntimeError(f"QB bin_bounds values must be finite with lower < upper, got [{lower}, {upper}]")
    scores = torch.sigmoid(logits.detach().float().reshape(-1, experts))
    ranked, order = (scores + expert_bias.detach()).sort(dim=-1, descending=True, stable=True)
    chosen, cutoff = order[:, :topk], ranked[:, topk].contiguous()
    _count(cutoff.unsqueeze(1) - scores, bin_bounds, histogram)
    picked = _probabilities(scores.gather(1, chosen), topk) * (1.0 if scaling_factor is None else scaling_factor)
    probs = torch.zeros_like(scores).scatter(1, chosen, picked).to(logits.dtype).view(logits.shape)
    routing = _routing(chosen, logits.shape, routing_map_format, topk_indices)
    return probs, routing, scores.view(logits.shape), cutoff, histogram


def _count(required: torch.Tensor, bin_bounds: torch.Tensor, histogram: torch.Tensor) -> None:
    """Adds [tokens, experts] values to a histogram [experts, bins]; values outside the bounds go into the first or last bin, NaN into the first."""
    experts, bins = histogram.shape
    lower, upper = bin_bounds.detach()
    found = ((required - lower) * (bins / (upper - lower))).floor().nan_to_num(nan=0.0).clamp(0, bins - 1).long()
    at = (found + torch.arange(experts) * bins).reshape(-1)
    histogram.add_(torch.bincount(at, minlength=experts * bins).view(experts, bins))


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
    """Gradient of the logits, also written into `grad_logits` if given."""
    stored = intermediate_output.detach().float().view(-1, intermediate_output.shape[-1])
    given = routing_map.detach().reshape(stored.shape[0], -1)
    if use_dense_indices:
        routed = torch.zeros_like(stored, dtype=torch.bool).scatter_(1, given.long(), True)
    else:
        routed = _from_bits(given, stored.shape[1]) if routing_map_format else given.bool()
    grad = grad_probs.detach().float().view(stored.shape) * (1.0 if scaling_factor is None else scaling_factor)
    grad = torch.where(routed, grad, 0.0)
    if score_function == "softmax":
        prob = stored if use_pre_softmax else torch.where(routed, stored, 0.0)
        found = prob * (grad - (grad * prob).sum(-1, keepdim=True))
    else:
        found = _behind(stored, grad, score_function, topk > 1, routed)
    found = found.to(grad_probs.dtype).view(grad_probs.shape)
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
    """(normalized scores [..., experts], routing map in bytes or bits, what the backward pass needs [..., experts])."""
    x = logits.detach().float().reshape(-1, logits.shape[-1])
    scores = _scores(x, score_function)
    kept = x if score_function == "sqrtsoftplus" else scores
    if score_function != "softmax" and (topk > 1 or not _stores_in_logits_dtype()):
        scores = scores / (scores.sum(-1, keepdim=True) + _EPSILON)
    routing = _routing(scores.topk(topk, -1).indices, logits.shape, routing_map_format)
    stored = logits.dtype if _stores_in_logits_dtype() else torch.float32
    return scores.to(stored).view(logits.shape), routing, kept.to(stored).view(logits.shape)


def _score_backward(
    intermediate_output: torch.Tensor,
    grad_scores: torch.Tensor,
    topk: int,
    score_function: str,
    grad_logits: torch.Tensor | None = None,
    num_tokens: int = 0,
    num_experts: int = 0,
) -> torch.Tensor:
    """Gradient of the logits, also written into `grad_logits` if given."""
    stored, grad = intermediate_output.detach().float(), grad_scores.detach().float().view(intermediate_output.shape)
    if score_function == "softmax":
        found = stored * (grad - (grad * stored).sum(-1, keepdim=True))
    else:
        found = _behind(stored, grad, score_function, topk > 1 or not _stores_in_logits_dtype())
    if grad_logits is not None:
        grad_logits.copy_(found.to(grad_logits.dtype).view(grad_logits.shape))
    return found.to(grad_scores.dtype)


_sizes, _scored = ("num_tokens", "num_experts"), ("intermediate_output", "grad_scores")
KERNELS["fused_score_for_moe_aux_loss_bwd"] = argument_lists(
    _score_backward,
    since_2_9=(*_sizes, *_scored, "topk", "score_function"),
    since_2_13=(*_sizes, *_scored, "grad_logits", "topk", "score_function"),
    since_2_17=(*_scored, "grad_logits", "topk", "score_function"),
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
