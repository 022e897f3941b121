"""The share of quantization noise in a weight's gradient: a sample computed from the exact tensors and from the operands that the GEMM read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

SAMPLE = 64
"""Input and output features in the sample: 64 x 64 elements of the gradient, spread evenly over the weight."""


def spread(count: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Up to `wanted` positions, evenly spaced over `count`."""
    return torch.linspace(0, count - 1, min(count, wanted), device=device).round().long()


@dataclass(slots=True)
class Noise:
    """Sampled features of x and dy, exact and quantized: [tokens, features]. They are multiplied after the step, when no observer is active."""

    exact: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    rounded: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def note(self, linear: str, side: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """exact, rounded: [tokens, features] of one operand of wgrad. The first ones of a step count, and a copy made for wgrad before a shared one."""
        picked = spread(exact.shape[1], SAMPLE, exact.device)
        self.exact[linear, side] = exact[:, picked].float()
        self.rounded[linear, side] = rounded[:, picked].float()

    def ratios(self) -> dict[str, float]:
        """linear -> |g| / |g' - g|, g' being the gradient of the quantized operands; linears without noise are omitted."""
        found = {}
        for linear in {name for name, _ in self.exact}:
            pairs = [(table.get((linear, "dy")), table.get((linear, "x"))) for table in (self.exact, self.rounded)]
            if any(one is None for pair in pairs for one in pair):
                continue
            exact, rounded = (_gradient(*pair) for pair in pairs)
            noise = float((rounded - exact).norm())
            if noise > 0:
                found[linear] = float(exact.norm()) / noise
        self.exact.clear()
        self.rounded.clear()
        return found


def _gradient(dy: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor:
    assert dy is not None
    assert x is not None
    count = min(dy.shape[0], x.shape[0])  # an expert's padding
    with torch._C.DisableTorchFunction():
        return dy[:count].t() @ x[:count]
