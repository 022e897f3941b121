"""Bugs of training loops in plain torch: each first shows its symptom, then runs under a witness without a policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

import mpbridge
from tests.observe.witnessing.loops import Tiny, adam, loss_of, tokens

BF16 = torch.bfloat16


def said(seen: Any) -> str:
    return "\n".join(str(fault) for fault in seen.report.report.faults)


def stepped(model: Any, optimizer: Any, seen: Any, backward: Callable[[], None]) -> Any:
    with seen.step():
        backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def witnessed(model: Any, backward: Callable[[Any], Any], policy: str | None = None) -> str:
    """What a witness says of one step. backward: what comes before the update, given the optimizer."""
    optimizer = adam(model)
    return said(stepped(model, optimizer, mpbridge.witness(model, optimizer, policy), lambda: backward(optimizer)))


_linear = functional.linear


def cast_without_a_graph(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What autocast's cache hands out after a forward pass under no_grad, in torch before its fix."""
    return _linear(x, weight.detach().to(BF16), None if bias is None else bias.detach().to(BF16))


def cache_after_no_grad() -> str:
    model = Tiny()

    def backward(optimizer: Any) -> None:
        with torch.autocast("cpu", dtype=BF16), patch.object(functional, "linear", cast_without_a_graph):
            loss = functional.cross_entropy(model(tokens(1)).view(-1, 64), tokens(1).view(-1))
        loss.backward()
        assert model.layers[0].weight.grad is None

    return witnessed(model, backward)


def sixteen_bits_under_adam() -> str:
    """Updates of 1e-6 of weights near 1 are lost in BF16: 100 steps move nothing."""
    model = Tiny().to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    before = model.norm.weight.detach().clone()
    seen = mpbridge.witness(model, optimizer)
    for _ in range(4):
        stepped(model, optimizer, seen, lambda: loss_of(model, tokens(1), autocast=False).backward())
    assert torch.equal(model.norm.weight, before)
    assert optimizer.state[model.norm.weight]["exp_avg_sq"].dtype is BF16
    return "\n".join(str(fault) for fault in seen.reports[0].report.faults)


def with_bf16_moments(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Stores moments in BF16 between steps, as trainers do with a pair of hooks."""

    def to(dtype: torch.dtype) -> Callable[..., None]:
        def cast(*ignored: Any) -> None:
            for state in optimizer.state.values():
                state |= {key: state[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")}

        return cast

    optimizer.register_step_pre_hook(to(torch.float32))
    optimizer.register_step_post_hook(to(BF16))
    return optimizer


def moments_after_a_resume() -> str:
    """torch's load_state_dict casts states to their parameter's dtype, and the hooks that stored them in BF16 are gone."""
    model = Tiny()
    optimizer = with_bf16_moments(adam(model))
    before = mpbridge.witness(model, optimizer)
    stepped(model, optimizer, before, lambda: run(model))
    saved = copy.deepcopy(optimizer.state_dict())
    assert {state["exp_avg"].dtype for state in saved["state"].values()} == {BF16}
    resumed = adam(model)
    resumed.load_state_dict(saved)
    assert {state["exp_avg"].dtype for state in resumed.state.values()} == {torch.float32}
    seen = mpbridge.witness(model, resumed, since=before.report.as_data())
    return said(stepped(model, resumed, seen, lambda: run(model)))


def run(model: Any, batch: int = 1) -> None:
    loss_of(model, tokens(batch), autocast=False).backward()


def divided_by_a_scale() -> str:
    """Gradients divided by a loss scale that the loss was never multiplied by; Adam hides it but for its eps, clipping never acts."""
    model = Tiny()

    def backward(optimizer: Any) -> None:
        run(model)
        torch._foreach_div_([one.grad for one in model.parameters()], 65536.0)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) < 1e-3

    return witnessed(model, backward)


def cast_to_evaluate() -> str:
    """A model cast for its evaluation computes something else than what trains; once cast back, its weights are rounded for good."""
    model = Tiny()
    optimizer = adam(model)
    seen = mpbridge.witness(model, optimizer)
    stepped(model, optimizer, seen, lambda: run(model))
    assert seen.report.ok

    def evaluated() -> float:
        with torch.no_grad():
            return float(loss_of(model, tokens(2), autocast=False))

    with seen.evaluation():
        exact = evaluated()
    assert seen.report.ok
    model.to(BF16)
    with seen.evaluation():
        assert evaluated() != exact
    return said(seen)


class RotaryEmbedding(torch.nn.Module):
    """As in transformers: frequencies in a buffer, angles computed in FP32 from what the buffer holds."""

    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 32, 2) / 32), persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return positions[:, None].float() * self.inv_freq.float()


class Rotary(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        angles = self.rotary_emb(torch.arange(batch.shape[1]))
        hidden = self.emb(batch) * torch.cat([angles.cos(), angles.sin()], -1).to(self.emb.weight.dtype)
        for layer in self.layers:
            hidden = hidden + functional.gelu(layer(hidden))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def rounded_frequencies() -> str:
    model = Rotary()
    exact = model.rotary_emb(torch.tensor([4095]))
    model.rotary_emb.to(BF16)  # what model.to(torch.bfloat16) does to the buffer
    assert float((model.rotary_emb(torch.tensor([4095])) - exact).abs().max()) > 0.5
    return witnessed(model, lambda optimizer: run(model))


def only_the_last_micro_batch() -> str:
    """zero_grad, or a buffer that is written instead of added to, between the micro-batches of one step."""
    model = Tiny()

    def backward(optimizer: Any) -> None:
        for number in range(3):
            optimizer.zero_grad()
            (loss_of(model, tokens(number), autocast=False) / 3).backward()
        mine = model.head.weight.grad.clone()
        optimizer.zero_grad()
        (loss_of(model, tokens(2), autocast=False) / 3).backward()
        assert torch.equal(mine, model.head.weight.grad)

    return witnessed(model, backward)


def unequal_micro_batches() -> str:
    """The mean of micro-batches' means is not the mean over tokens."""
    model = Tiny()
    parts = tokens(1)[:, :2].contiguous(), tokens(2)
    counts = [part.numel() for part in parts]

    def gradient(weights: list[float]) -> torch.Tensor:
        model.zero_grad()
        for part, weight in zip(parts, weights, strict=True):
            (loss_of(model, part, autocast=False) * weight).backward()
        return model.head.weight.grad.clone()

    by_tokens = gradient([count / sum(counts) for count in counts])
    assert float((gradient([0.5, 0.5]) - by_tokens).norm() / by_tokens.norm()) > 0.1
    model.zero_grad()
    return witnessed(model, lambda optimizer: [(loss_of(model, part, autocast=False) / 2).backward() for part in parts])


def norm_in_bf16() -> str:
    """torch's norm of BF16 gradients is rounded to BF16, and so is the clipping factor."""
    model = Tiny().to(BF16)

    def backward(optimizer: Any) -> None:
        run(model)
        exact = float(torch.stack([one.grad.float().norm() for one in model.parameters()]).norm())
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert found.dtype is BF16
        assert float(found) != exact

    return witnessed(model, backward, "full_bf16")


PLAYS: dict[str, Callable[[], str]] = {
    made.__name__: cache(made)
    for made in (
        cache_after_no_grad, sixteen_bits_under_adam, moments_after_a_resume, divided_by_a_scale, cast_to_evaluate, rounded_frequencies,
        only_the_last_micro_batch, unequal_micro_batches, norm_in_bf16,
    )
}  # fmt: skip
