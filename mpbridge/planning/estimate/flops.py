"""Model FLOPs per token, forward and backward, without recomputation and padding: as counted in published tables, and as in PaLM's appendix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.common.facts import ModelShape
from mpbridge.planning.memory.alike import windowed


def model_flops_per_token(shape: ModelShape, model: Mapping[str, Any]) -> float:
    """Floating-point operations per token as published tables count them: causal attention halved, no router.

    model: the model section, for sliding windows. Agrees with "Model TFLOP/s/GPU" of Megatron Bridge's performance summaries within 0.2 % in the median.
    """
    _, width = _attention(shape)
    scores = sum(width * attended(shape, model, layer) for layer in _layers(shape))
    return 6 * (_weights(shape) + scores)


def whole_square_flops_per_token(shape: ModelShape) -> int:
    """Floating-point operations per token, counting the full square of a causal mask and the routers: the basis of the rate in a run's log.

    6 for every weight that a token is multiplied by (2 forward, 4 backward), plus 12 * layers * sequence * (heads * head size) for attention:
    the "6N + 12LHQT" of PaLM (arXiv 2204.02311, appendix B). N is counted from the shape instead of the parameters: embeddings, norms and biases
    are not multiplied, the output layer is, and only the experts that a token visits are counted.
    """
    _, width = _attention(shape)
    layers = _layers(shape)
    routers = sum(shape.hidden_size * (shape.experts or 0) for layer in layers if shape.is_expert_layer(layer))
    return 6 * (_weights(shape) + routers + len(layers) * width * shape.seq_length)


def attended(shape: ModelShape, model: Mapping[str, Any], layer: int) -> float:
    """Average number of keys that a query of that 0-based layer attends to: half the sequence, or the mean over a window."""
    seq, window = shape.seq_length, model.get("window_size")
    if not window or not windowed(model, layer):
        return seq / 2
    reach = min(seq, int(window[0]) + 1)
    return reach - reach * (reach - 1) / (2 * seq)


def _layers(shape: ModelShape) -> list[int]:
    """The 0-based layers that a token passes through; a prediction layer after the last is built like the last."""
    return [*range(shape.num_layers), *[shape.num_layers - 1] * shape.mtp_layers]


def _weights(shape: ModelShape) -> int:
    """Number of weights that a token is multiplied by, without routers."""
    projections, _ = _attention(shape)
    heads = shape.hidden_size * shape.vocab_size * (1 + shape.mtp_layers) + shape.mtp_layers * 2 * shape.hidden_size**2
    return heads + sum(projections + _mlp(shape, layer) for layer in _layers(shape))


def _attention(shape: ModelShape) -> tuple[int, int]:
    """(weights of the projections, elements of scores and values per key), over all heads."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    latent = shape.latent_attention
    if latent is None:
        inner = heads * shape.kv_channels
        return hidden * (2 * inner + 2 * shape.num_query_groups * shape.kv_channels), 2 * inner
    keys, values = latent["qk_head_dim"] + latent["qk_pos_emb_head_dim"], latent["v_head_dim"]
    low, narrow = latent["q_lora_rank"], latent["kv_lora_rank"]
    query = low * (hidden + heads * keys) if low else hidden * heads * keys
    pair = hidden * (narrow + latent["qk_pos_emb_head_dim"]) + narrow * heads * (latent["qk_head_dim"] + values)
    return query + pair + heads * values * hidden, heads * (keys + values)


def _mlp(shape: ModelShape, layer: int) -> int:
    """Number of weights of one layer's MLP that a token is multiplied by."""
    matrices = 3 if shape.gated else 2
    if not shape.is_expert_layer(layer):
        return matrices * shape.hidden_size * shape.ffn_hidden_size
    return matrices * shape.hidden_size * (shape.expert_topk * shape.expert_ffn_hidden_size + shape.shared_expert_size)
