"""Model FLOPs of a GPT: what the arithmetic needs, recomputation and padding left out."""

from __future__ import annotations

from mpbridge.facts import ModelShape


def flops_per_token(shape: ModelShape) -> int:
    """Floating-point operations of forward and backward, a token.

    6 for every weight that multiplies a token (2 forward, 4 backward), and for attention 12 * layers * sequence * (heads * head size):
    the "6N + 12LHQT" of PaLM (arXiv 2204.02311, appendix B), which counts the whole square of a causal mask. N is counted from the
    shape instead of the parameters: embeddings, norms and biases multiply nothing, the output layer does, and of the
    experts only those that a token visits.
    """
    weights = shape.hidden_size * shape.vocab_size * (1 + shape.mtp_layers)
    attended = 0
    for layer in range(shape.num_layers + shape.mtp_layers):
        projections, width = _attention(shape)
        # a prediction layer after the last layer is built like the last
        weights += projections + _mlp(shape, shape.is_expert_layer(min(layer, shape.num_layers - 1)))
        attended += width
    weights += shape.mtp_layers * 2 * shape.hidden_size**2
    return 6 * weights + 6 * attended * shape.seq_length


def _attention(shape: ModelShape) -> tuple[int, int]:
    """Weights of one layer's projections, and the widths that the two attention products run over, summed."""
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    if shape.latent_attention is None:
        width = heads * shape.kv_channels
        return hidden * (2 * width + 2 * shape.num_query_groups * shape.kv_channels), 2 * width
    mla = shape.latent_attention
    query_key, value = mla["qk_head_dim"] + mla["qk_pos_emb_head_dim"], mla["v_head_dim"]
    low = mla.get("q_lora_rank") or 0
    query = low * (hidden + heads * query_key) if low else hidden * heads * query_key
    key_value = hidden * (mla["kv_lora_rank"] + mla["qk_pos_emb_head_dim"]) + mla["kv_lora_rank"] * heads * (
        mla["qk_head_dim"] + value
    )
    return query + key_value + heads * value * hidden, heads * (query_key + value)


def _mlp(shape: ModelShape, experts: bool) -> int:
    """Weights of one layer's MLP that a token meets."""
    matrices = 3 if shape.gated else 2
    if not experts:
        return matrices * shape.hidden_size * shape.ffn_hidden_size
    routed = shape.expert_topk * shape.expert_ffn_hidden_size + shape.shared_expert_size
    return matrices * shape.hidden_size * routed + shape.hidden_size * (shape.experts or 0)
