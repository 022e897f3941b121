"""Transformer Engine's Triton functions: permutation by masks, chunk sorting, cross entropy, padding of scales, gradients of experts' biases."""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from mpbridge.te_cpu.played import argument_lists, now


# --- permutation ---------------------------------------------------------------------------------------------------------------------------
def make_row_id_map(routing_map: torch.Tensor, num_tokens: int, num_experts: int) -> torch.Tensor:
    """[tokens, 2 * experts + 1] int32: each token's rows in descending order, the experts that they belong to, and their number."""
    mask = routing_map.detach().bool()
    counts = mask.t().int()
    rows = counts.reshape(-1).cumsum(0).view(num_experts, num_tokens).t() - 1
    rows = torch.where(mask, rows, -1)
    sorted_rows, experts = rows.sort(dim=1, descending=True, stable=True)
    out = torch.cat([sorted_rows, experts, mask.sum(1, keepdim=True)], 1)
    return out.to(torch.int32)


def _pairs(
    row_id_map: torch.Tensor, experts: int, pad_offsets: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, row, expert) of every routed pair; rows are shifted by their expert's padding."""
    count = row_id_map[:, 2 * experts]
    there = torch.arange(experts).unsqueeze(0) < count.unsqueeze(1)
    token, slot = there.nonzero(as_tuple=True)
    row, expert = row_id_map[token, slot].long(), row_id_map[token, experts + slot].long()
    return token, row if pad_offsets is None else row + pad_offsets.long()[expert], expert


_PAIRS_AT_ONCE = 4096
"""Rows that are gathered together: at 9,216 columns a temporary of 150 MB in FP32, where 32,768 pairs would need 1.2 GB each."""


def _in_parts(*pairs: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors of `_pairs` in parts of `_PAIRS_AT_ONCE`, in their order."""
    return zip(*(torch.split(of, _PAIRS_AT_ONCE) for of in pairs), strict=True)


def permute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    scale: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(rows by expert, their scales, their probabilities)."""
    token, row, expert = _pairs(row_id_map, num_experts, pad_offsets)
    out = torch.zeros(num_out_tokens, hidden_size, dtype=inp.dtype)
    for tokens, rows in _in_parts(token, row):
        out[rows] = inp.detach()[tokens]
    permuted_scale = permuted_probs = None
    if scale is not None:
        permuted_scale = torch.zeros(num_out_tokens, int(scale_hidden_dim or scale.shape[-1]), dtype=scale.dtype)
        permuted_scale[row] = scale.detach()[token]
    if probs is not None:
        permuted_probs = torch.zeros(num_out_tokens, dtype=probs.dtype)
        weights = probs.detach()
        permuted_probs[row] = weights[token, expert] if weights.dim() > 1 else weights[token]
        # a token with probability 0 is dropped: its row is zero
        out[row[permuted_probs[row] == 0]] = 0
    return out, permuted_scale, permuted_probs


def unpermute_with_mask_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None,
    permuted_probs: torch.Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
    pad_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(every token's rows summed in FP32 and weighted, probabilities by token and expert)."""
    token, row, expert = _pairs(row_id_map, num_experts, pad_offsets)
    total = torch.zeros(num_tokens, hidden_size)
    for tokens, rows, experts in _in_parts(token, row, expert):
        part = inp.detach()[rows].float()
        if merging_probs is not None:
            part *= merging_probs.detach()[tokens, experts].float().unsqueeze(1)
        total.index_add_(0, tokens, part)
    out, probs = total.to(inp.dtype), None
    if permuted_probs is not None:
        probs = torch.zeros(num_tokens, num_experts, dtype=permuted_probs.dtype)
        probs[token, expert] = permuted_probs.detach()[row]
    return out, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: torch.Tensor,
    row_id_map: torch.Tensor,
    fwd_input: torch.Tensor,
    merging_probs: torch.Tensor,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    pad_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the rows, gradient of the probabilities)."""
    token, row, expert = _pairs(row_id_map, num_experts, pad_offsets)
    out = torch.zeros(num_out_tokens, hidden_size, dtype=fwd_output_grad.dtype)
    probs = torch.zeros(num_tokens, num_experts, dtype=merging_probs.dtype)
    for tokens, rows, experts in _in_parts(token, row, expert):
        grad, weight = fwd_output_grad.detach()[tokens].float(), merging_probs.detach()[tokens, experts].float()
        out[rows] = (grad * weight.unsqueeze(1)).to(out.dtype)
        probs[tokens, experts] = (grad * fwd_input.detach()[rows].float()).sum(1).to(probs.dtype)
    return out, probs


def make_chunk_sort_map(
    split_sizes: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int, num_splits: int
) -> torch.Tensor:
    """[tokens] int32: where each row goes when chunks of rows are put into the order `sorted_indices`."""
    sizes, order = split_sizes.long().cpu(), sorted_indices.long().cpu()
    begin = torch.zeros(num_splits, dtype=torch.long)
    begin[order] = sizes[order].cumsum(0) - sizes[order]
    chunk = torch.repeat_interleave(torch.arange(num_splits), sizes)
    inside = torch.arange(chunk.numel()) - (sizes.cumsum(0) - sizes)[chunk]
    out = torch.zeros(num_tokens, dtype=torch.int32)
    out[: chunk.numel()] = (begin[chunk] + inside).to(torch.int32)
    return out


def sort_chunks_by_map(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    probs: torch.Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows in the new order, or back; their probabilities)."""
    at = row_id_map.long()

    def moved(source: torch.Tensor) -> torch.Tensor:
        if not is_forward:
            return source.detach()[at]
        out = torch.empty_like(source)
        out[at] = source.detach()
        return out

    return moved(inp), None if probs is None else moved(probs)


# --- cross entropy -------------------------------------------------------------------------------------------------------------------------
class _Row:
    """One call's logits as FP32 rows, and what the gradient needs from them."""

    def __init__(self, logits: torch.Tensor, target: torch.Tensor, rank: int) -> None:
        self.logits = logits.detach().reshape(-1, logits.shape[-1]).float()
        vocabulary = self.logits.shape[1]
        place = target.reshape(-1) - rank * vocabulary
        self.here = (place >= 0) & (place < vocabulary)
        self.place = place.clamp(0, vocabulary - 1)

    def own(self) -> torch.Tensor:
        """Logits of the targets; minus infinity where another rank has them."""
        return self.logits.gather(1, self.place.unsqueeze(1)).squeeze(1).masked_fill(~self.here, float("-inf"))

    def gradient(
        self, highest: torch.Tensor, total: torch.Tensor, eps: float, target_share: float, scale: torch.Tensor
    ) -> torch.Tensor:
        """(softmax - eps - target_share at the target) times scale, with one scale per row."""
        grad = (self.logits - highest.unsqueeze(1)).exp() / total.unsqueeze(1) - eps
        grad[self.here, self.place[self.here]] -= target_share
        return grad * scale.unsqueeze(1)


def cross_entropy_forward(
    _input: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
    overwrite_input: bool = False,
) -> tuple[Any, ...]:
    """(loss [batch, sequence] or its mean, then what the backward pass needs): until release 2.18 the gradient itself, later the input and
    two statistics per row.
    """
    batch, sequence, vocabulary = _input.shape
    if target.numel() != batch * sequence:
        raise AssertionError("Each token needs a target token ID.")
    release = now().release
    group, sum_, max_ = dist_process_group, dist.ReduceOp.SUM, dist.ReduceOp.MAX
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def over_ranks(value: torch.Tensor, how: Any) -> torch.Tensor:
        if ranks > 1:
            dist.all_reduce(value, op=how, group=group)
        return value

    row, counted = _Row(_input, target, rank), target.reshape(-1) != ignore_idx
    highest, own = over_ranks(row.logits.amax(1), max_), over_ranks(row.own(), max_)
    every = over_ranks(row.logits.sum(1), sum_)
    total = over_ranks((row.logits - highest.unsqueeze(1)).exp().sum(1), sum_)
    eps = label_smoothing / (vocabulary * ranks)
    normalizer = highest + total.log()
    loss = (normalizer - own) * (1 - label_smoothing) + label_smoothing * normalizer - eps * every
    loss = torch.where(counted, loss, 0.0)
    # until 2.11 the mean was over all rows, ignored ones included
    count = counted.sum().clamp_min(1) if release >= (2, 12) else torch.tensor(batch * sequence)
    mean = loss.sum() / count if reduce_loss else loss.view(batch, sequence)
    if release >= (2, 19):
        kept, stats = _input if overwrite_input else _input.detach().clone(), torch.stack([highest, total], 1)
        return mean, kept, stats, target.contiguous(), count.reshape(1) if reduce_loss else None, rank, ranks
    grad = row.gradient(highest, total, eps, 1 - label_smoothing, counted / (count if reduce_loss else 1.0))
    place = _input if release < (2, 18) else torch.empty_like(_input)
    place.detach().copy_(grad.view(_input.shape))
    return mean, place


def _times(stored: torch.Tensor, grad_output: torch.Tensor, is_cg_capturable: bool = False) -> torch.Tensor:
    """The stored gradient times the incoming one, in place."""
    factor = grad_output.detach().float()
    factor = factor.reshape(*stored.shape[:2], 1) if factor.numel() > 1 else factor.reshape(1, 1, 1)
    stored.detach().copy_(stored.detach().float() * factor)
    return stored


def _rebuilt(
    saved_input: torch.Tensor,
    stats: torch.Tensor,
    target: torch.Tensor,
    n_non_ignore: torch.Tensor | None,
    grad_output: torch.Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    rank: int,
    world_size: int,
    ignore_idx: int,
) -> torch.Tensor:
    """The gradient from the saved logits, written over them."""
    eps = label_smoothing / (saved_input.shape[-1] * world_size)
    row, counted = _Row(saved_input, target, rank), target.reshape(-1) != ignore_idx
    scale = counted * grad_output.detach().float().reshape(-1)
    scale = scale / n_non_ignore if reduce_loss and n_non_ignore is not None else scale
    grad = row.gradient(stats[:, 0], stats[:, 1], eps, 1 - label_smoothing, scale)
    saved_input.detach().copy_(grad.view(saved_input.shape))
    return saved_input


def cross_entropy_backward(*given: Any, **named: Any) -> torch.Tensor:
    """Gradient of the logits from what this release's forward pass stored."""
    return _rebuilt(*given, **named) if now().release >= (2, 19) else _times(*given, **named)


# --- padding -------------------------------------------------------------------------------------------------------------------------------
def pad_columnwise_scale_inv(inp: torch.Tensor) -> torch.Tensor:
    """Scales padded with zeros to multiples of 128 rows and 4 columns."""
    return torch.nn.functional.pad(inp, (0, -inp.shape[1] % 4, 0, -inp.shape[0] % 128))


# --- biases of experts ---------------------------------------------------------------------------------------------------------------------
def compute_grouped_dbias(
    dy: torch.Tensor, offsets: torch.Tensor, num_groups: int, dbias: torch.Tensor | None = None
) -> torch.Tensor:
    """[groups, hidden] FP32: each group's rows of [tokens, hidden] summed, added to `dbias` if given."""
    out = torch.zeros(num_groups, dy.shape[1]) if dbias is None else dbias
    out.index_add_(0, _group_of(offsets, dy.shape[0]), dy.detach().float())
    return out


def compute_grouped_dbias_dscales(
    dy: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor,
    offsets: torch.Tensor,
    dbias: torch.Tensor | None = None,
    dscales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of biases multiplied by per-token factors, gradient of those factors) in FP32, added to the given tensors."""
    group, rows = _group_of(offsets, dy.shape[0]), dy.detach().float()
    of_bias = torch.zeros(bias.shape[0], dy.shape[1]) if dbias is None else dbias
    of_bias.index_add_(0, group, rows * scales.detach().float().unsqueeze(1))
    of_scales = torch.zeros(dy.shape[0]) if dscales is None else dscales
    of_scales += (rows * bias.detach().float()[group]).sum(1)
    return of_bias, of_scales


def _group_of(offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Each token's group, from the first row of each group and the end."""
    return torch.searchsorted(offsets[1:].contiguous(), torch.arange(tokens, dtype=offsets.dtype), right=True)


def _padded(function: Any) -> Any:
    """A function of four tensors and sizes; since release 2.12 the offsets of padding stand between them."""
    names = [name for name in signature(function).parameters if name != "pad_offsets"]
    return argument_lists(function, since_2_9=tuple(names), since_2_12=(*names[:4], "pad_offsets", *names[4:]))


MODULES: dict[str, tuple[Any, ...]] = {
    "permutation": (
        *map(_padded, (permute_with_mask_map, unpermute_with_mask_map, unpermute_with_mask_map_bwd_with_merging_probs)),
        *(make_row_id_map, make_chunk_sort_map, sort_chunks_by_map),
    ),
    "cross_entropy": (cross_entropy_forward, cross_entropy_backward),
    "pad": (pad_columnwise_scale_inv,),
    "mhc": (),
    "grouped_dbias_dscales": (compute_grouped_dbias, compute_grouped_dbias_dscales),
}
"""Module under transformer_engine.pytorch.triton -> its functions here."""
