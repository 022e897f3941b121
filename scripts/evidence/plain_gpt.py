"""A GPT in plain PyTorch with the shape of a run: the peer in bench_peer.py. One process, BF16 weights with FP32 main weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mpbridge.common.facts import ModelShape


class Attention(nn.Module):
    """Causal self-attention with rotary positions (half-split, as megatron-core's default) and grouped queries."""

    def __init__(self, shape: ModelShape, bias: bool, rope: bool) -> None:
        super().__init__()
        self.heads, self.groups, self.width, self.rope = (
            shape.num_attention_heads,
            shape.num_query_groups,
            shape.kv_channels,
            rope,
        )
        self.qkv = nn.Linear(
            shape.hidden_size, (self.heads + 2 * self.groups) * self.width, bias=bias or shape.qkv_bias
        )
        self.out = nn.Linear(self.heads * self.width, shape.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, length, _ = x.shape
        parts = self.qkv(x).split([self.heads * self.width, self.groups * self.width, self.groups * self.width], dim=2)
        q, k, v = (part.view(batch, length, -1, self.width).transpose(1, 2) for part in parts)
        if self.rope:
            q, k = rotate(q, *turn), rotate(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [batch, heads, sequence, width]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Layer(nn.Module):
    """Pre-norm layer."""

    def __init__(self, shape: ModelShape, bias: bool, rope: bool) -> None:
        super().__init__()
        self.gated = shape.gated
        norm = nn.LayerNorm if shape.norm_bias else nn.RMSNorm
        self.norm1, self.norm2 = norm(shape.hidden_size, eps=1e-5), norm(shape.hidden_size, eps=1e-5)
        self.attention = Attention(shape, bias, rope)
        self.up = nn.Linear(shape.hidden_size, shape.ffn_hidden_size * (2 if shape.gated else 1), bias=bias)
        self.down = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.attention(self.norm1(x), turn)
        y = self.up(self.norm2(x))
        if self.gated:
            gate, value = y.chunk(2, dim=-1)
            y = F.silu(gate) * value
        else:
            y = F.gelu(y)
        return x + self.down(y)


class PlainGPT(nn.Module):
    """Tokens and labels [batch, sequence] to the mean loss in nats per token."""

    def __init__(self, shape: ModelShape, *, rope: bool) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.places = None if rope else nn.Embedding(shape.seq_length, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, shape.linear_bias, rope) for _ in range(shape.num_layers))
        self.norm = (nn.LayerNorm if shape.norm_bias else nn.RMSNorm)(shape.hidden_size, eps=1e-5)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        angles = torch.outer(
            torch.arange(shape.seq_length).float(),
            10000.0 ** (-torch.arange(0, shape.kv_channels, 2).float() / shape.kv_channels),
        )
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.embed(tokens)
        if self.places is not None:
            x = x + self.places.weight[: tokens.shape[1]]
        turn = (self.cos.to(x.dtype), self.sin.to(x.dtype))
        for layer in self.layers:
            x = layer(x, turn)
        return F.cross_entropy(self.head(self.norm(x)).float().view(-1, self.shape.vocab_size), labels.view(-1))


class PlainTrainer:
    """The training step of a plain script: micro-batches, FP32 gradients, clipping, the optimizer on FP32 main weights, cast back.

    adam: the optimizer's class, called with parameters, lr and weight_decay.
    """

    def __init__(
        self, model: PlainGPT, dtype: torch.dtype, adam: type, *, lr: float, weight_decay: float, clip: float
    ) -> None:
        self.main = [parameter.detach().clone().float() for parameter in model.parameters()]
        self.model, self.clip = model.to(dtype), clip
        self.sums = [torch.zeros_like(parameter) for parameter in self.main]
        for parameter, total in zip(self.main, self.sums, strict=True):
            parameter.grad = total
        self.optimizer = adam(self.main, lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95))
        self.same = dtype is torch.float32

    def step(self, batches: list[dict[str, torch.Tensor]]) -> float:
        """One update over the micro-batches; returns their mean loss."""
        total = 0.0
        torch._foreach_zero_(self.sums)
        for batch in batches:
            loss = self.model(batch["tokens"], batch["labels"])
            (loss / len(batches)).backward()
            grads = [parameter.grad for parameter in self.model.parameters()]
            torch._foreach_add_(self.sums, [grad if self.same else grad.float() for grad in grads])
            self.model.zero_grad(set_to_none=True)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.main, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.main)
        return total / len(batches)
