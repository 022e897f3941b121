"""Model FLOPs of a token as published tables count them: forward and backward, causal attention halved, no recomputation, no router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpbridge.facts import ModelShape
from mpbridge.memory.alike import windowed


def model_flops_per_token(shape: ModelShape, model: Mapping[str, Any]) -> float:
    """Floating-point operations of a token. model: the model section, for sliding windows.

    Agrees with "Model TFLOP/s/GPU" of Megatron Bridge's performance summaries within 0.2 % in the median; `train/flops.py` counts the whole square of
    attention scores instead (PaLM, arXiv 2204.02311, appendix B).
    """
    total = float(
        shape.hidden_size * shape.vocab_size * (1 + shape.mtp_layers) + shape.mtp_layers * 2 * shape.hidden_size**2
    )
    projections, width = _attention(shape)
    for layer in range(shape.num_layers + shape.mtp_layers):
        keys = attended(shape, model, min(layer, shape.num_layers - 1))
        total += projections + width * keys + _mlp(shape, min(layer, shape.num_layers - 1))
    return 6 * total


def attended(shape: ModelShape, model: Mapping[str, Any], layer: int) -> float:
    """Keys that a query of that 0-based layer meets on average: half of the sequence, or a window's mean."""
    seq, window = shape.seq_length, model.get("window_size")
    if not window or not windowed(model, layer):
        return seq / 2
    reach = min(seq, int(window[0]) + 1)
    return reach - reach * (reach - 1) / (2 * seq)


def _attention(shape: ModelShape) -> tuple[int, int]:
    """Weights of the projections, and elements of scores and values for each key, over all heads."""
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
    matrices = 3 if shape.gated else 2
    if not shape.is_expert_layer(layer):
        return matrices * shape.hidden_size * shape.ffn_hidden_size
    return matrices * shape.hidden_size * (shape.expert_topk * shape.expert_ffn_hidden_size + shape.shared_expert_size)
