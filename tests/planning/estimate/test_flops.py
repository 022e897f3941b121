"""Model FLOPs against counts made another way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mpbridge.common.facts import ModelShape
from mpbridge.planning.estimate.gemms import whole_square_flops_per_token

TINY = ModelShape(
    num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, num_query_groups=4, kv_channels=16, vocab_size=320, seq_length=32
)  # fmt: skip


def _counted(shape: ModelShape) -> float:
    """FLOPs per token of the same shape in plain torch, forward and backward, as torch's own counter sees them."""
    head, groups = shape.kv_channels, shape.num_query_groups
    widths = [(shape.num_attention_heads + 2 * groups) * head, shape.hidden_size]
    up = shape.ffn_hidden_size * (2 if shape.gated else 1)
    x = torch.randn(shape.seq_length, shape.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = x
        for _ in range(shape.num_layers):
            y = y @ torch.randn(shape.hidden_size, widths[0], requires_grad=True)
            q = y[:, : shape.num_attention_heads * head].reshape(shape.seq_length, -1, head).transpose(0, 1)
            scores = q @ q.transpose(1, 2)
            y = (scores @ q).transpose(0, 1).reshape(shape.seq_length, -1)
            y = y @ torch.randn(shape.num_attention_heads * head, widths[1], requires_grad=True)
            y = (y @ torch.randn(shape.hidden_size, up, requires_grad=True))[:, : shape.ffn_hidden_size]
            y = y @ torch.randn(shape.ffn_hidden_size, shape.hidden_size, requires_grad=True)
        (y @ torch.randn(shape.hidden_size, shape.vocab_size, requires_grad=True)).sum().backward()
    return counter.get_total_flops() / shape.seq_length


@pytest.mark.parametrize("shape", [
    pytest.param(TINY, id="plain"), pytest.param(replace(TINY, gated=True), id="gated"),
    pytest.param(replace(TINY, num_query_groups=2), id="grouped-queries"),
    pytest.param(replace(TINY, seq_length=128), id="longer"),
])  # fmt: skip
def test_agrees_with_torchs_counter(shape: ModelShape) -> None:
    assert whole_square_flops_per_token(shape) == pytest.approx(_counted(shape), rel=1e-12)


def test_only_visited_experts_count() -> None:
    experts = replace(TINY, experts=8, expert_topk=2, expert_ffn_hidden_size=256, expert_layers=(False, True))
    one_more = 2 * 64 * 256 + 64 * 8
    assert whole_square_flops_per_token(experts) - whole_square_flops_per_token(TINY) == 6 * one_more


def test_latent_attention_counts_its_low_ranks() -> None:
    mla = {"q_lora_rank": 0, "kv_lora_rank": 8, "qk_head_dim": 16, "qk_pos_emb_head_dim": 4, "v_head_dim": 16}
    shape = replace(TINY, num_layers=1, latent_attention=mla)
    weights = 64 * 4 * 20 + 64 * 12 + 8 * 4 * 32 + 4 * 16 * 64 + 2 * 64 * 256 + 64 * 320
    assert whole_square_flops_per_token(shape) == 6 * weights + 6 * 32 * 4 * 36
