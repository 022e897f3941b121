"""Tensors that certificates are measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

TOKENS, INNER, OUTER = 256, 256, 384
"""Multiples of the largest block, 128, and of the tiles of Transformer Engine's fused casts."""

Draw = Callable[[tuple[int, int], torch.Generator], torch.Tensor]


def _normal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _student(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Student's t with three degrees of freedom."""
    chi = torch.randn((*shape, 3), generator=generator).square().mean(-1)
    return _normal(shape, generator) / chi.sqrt()


def _lognormal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """exp of N(0, 1.5) with random signs."""
    return (1.5 * _normal(shape, generator)).exp() * _normal(shape, generator).sign()


def _sparse(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """5 % of the elements a hundred times as large as the others."""
    size = torch.where(torch.rand(shape, generator=generator) < 0.05, 30.0, 0.3)
    return _normal(shape, generator) * size


KINDS: Mapping[str, Draw] = {"normal": _normal, "student-3": _student, "lognormal": _lognormal, "sparse": _sparse}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The operands of one linear, in FP32."""

    x: torch.Tensor
    """[tokens, inner]"""
    w: torch.Tensor
    """[outer, inner]"""
    dy: torch.Tensor
    """[tokens, outer]"""
    truth: torch.Tensor | None = None
    """[inner, outer]: dy = x truth + noise, so that the mean of dyt x over batches points along it."""


def drawn(kind: str, seed: int) -> Linear:
    """All three of that kind."""
    generator = torch.Generator().manual_seed(seed)
    x, w, dy = (KINDS[kind](shape, generator) for shape in ((TOKENS, INNER), (OUTER, INNER), (TOKENS, OUTER)))
    return Linear(x=x, w=0.02 * w, dy=dy)


def with_signal(linear: Linear, seed: int, size: float = 0.3) -> Linear:
    """The same with a gradient that has a part along x: what averaging over batches is to find."""
    generator = torch.Generator().manual_seed(1000 + seed)
    shape = (linear.x.shape[1], linear.dy.shape[1])
    truth = torch.randn(shape, generator=generator)
    part = linear.x @ truth
    # relative to the median: with outliers the signal is one of ordinary elements
    part = part * (size * linear.dy.abs().median() / part.abs().median())
    return Linear(x=linear.x, w=linear.w, dy=linear.dy + part, truth=truth)
